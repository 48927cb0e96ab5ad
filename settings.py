"""Settings: every environment variable and positional argument, read once. docs/env_vars.md describes each.

colibri.py and the scripts call Settings.read and pass the values down; no other file reads the environment (a test).
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from errors import Refused
from machine.fields import TextFieldReader

EMBEDDED_SNAPSHOT = Path(__file__).resolve().parent / "models" / "tiny"

VARIABLES = (
    "SNAP SCORE SERVE PROMPT REF REPLAY TF REPORT NGEN CTX CHAT THINK PREFIX "
    "TEMP NUCLEUS SEED DRAFT RAM_GB PREFILL_CHUNK TOPK TOPP EXACT KV_DTYPE KERNELS THREADS READ_MODE SNAP_MIRROR "
    "LOOKAHEAD USAGE ROUTE_TRACE HOST PORT API_KEY ALLOWED_HOSTS KV_SLOTS QUEUE KVSAVE XDG_CACHE_HOME TERM"
).split()

# A test holds this equal to kernels/dispatch.py, which is not imported here because torch is slow to import.
KERNELS = ("native", "reference", "avx512amx", "avx512vnni", "avx512", "avx2", "neondot", "neon", "portable")

KV_DTYPES = ("f32", "bf16")
READ_MODES = ("auto", "direct", "buffered")
LOOKAHEADS = ("auto", "0", "1")
MAX_DRAFT = 16
DEFAULT_TEMPERATURE = 0.7  # of the modes that sample
SERVERS = ("1", "stdio", "0")
BITS = ("16", "8", "4", "2")
# NGEN where it is not set: HTTP requests bound their answers themselves.
SERVE_NGEN = {"1": 1 << 31, "stdio": 256}
CHAT_NGEN = 256

# Variables of the C engine that do nothing here, why: docs/env_vars.md. Some have a new name.
RENAMED = {
    "MTP": "DRAFT=0",
    "STATS": "ROUTE_TRACE",
    "DIRECT": "READ_MODE=direct",
    "CAP_RAISE": "the argument cap",
    "CHAT_TEMPLATE": "CHAT=1",
    "IDOT": "EXACT=1",
    "EXPERT_TIER": "bench/reference_tier.py",  # of an earlier version of this engine
    **dict.fromkeys("PREFETCH SPEC PILOT PILOT_K PILOT_REAL PILOT_TWO COUPLE COUPLE_K COUPLE_D".split(), "LOOKAHEAD"),
}
IGNORED = (
    *RENAMED,
    *(
        "SERVE_BATCH GRAMMAR GRAMMAR_DRAFT SCHEMA PIN PIN_GB PIN_FILL AUTOPIN REPIN REPIN_VERBOSE PIPE PIPE_WORKERS "
        "DROP MLOCK COLI_MMAP ABSORB I4S I4_ACC512 I4_ACC512_TEST COLI_NO_FUSED_PAIR DSA DSA_TOPK DSA_FORCE "
        "CACHE_ROUTE ROUTE_J ROUTE_M ROUTE_P ROUTE_ALPHA ROUTE_AGREE NOPACK LOOKA MTP_PRENORM MTP_SWAP MTP_DEBUG "
        "REF_FORCE COLI_POLICY COLI_NO_OMP_TUNE COLI_OMP_TUNED COLI_CUDA COLI_GPU COLI_GPUS CUDA_DENSE CUDA_EXPERT_GB "
        "CUDA_RELEASE_HOST COLI_METAL"
    ).split(),
)

USAGE = """\
usage: [SNAP=folder] MODE python colibri.py [cap] [expert_bits] [dense_bits] [--tools]

  PROMPT="Once upon a time"   generate text; CHAT=1 puts it in the chat template
  CHAT=1                      chat in the terminal
  SERVE=1                     an HTTP server with the OpenAI API on http://127.0.0.1:8000
  SCORE=requests.txt          log-likelihoods of continuations, one line each
  REPLAY=1                    measure decode speed over the tokens of REF
  TF=1                        compare the argmax after every token of REF with the reference
  (no mode)                   generate from the prompt of REF and compare with the reference
  REF=file.json               the reference, by default ref_glm.json of the snapshot

--tools: in a chat, the model may call a calculator and python.
cap: expert slots per layer, 0 = what the budget allows; bits: 16 = as stored, 8, 4 or 2 quantize at load.
Every variable: docs/env_vars.md"""


@dataclass(frozen=True)
class Settings:
    """One field for each variable, under its name in lower case; then the arguments."""

    snap: str
    score: str | None
    serve: str | None  # 1, or stdio
    prompt: str | None
    ref: str | None
    replay: bool
    tf: bool
    report: str | None
    ngen: int  # max_tokens
    ctx: int  # max_model_len; 0 = the smaller of 4096 and the model's max_position_embeddings
    chat: bool
    think: bool
    prefix: bool
    temp: float
    nucleus: float  # top_p
    seed: int
    draft: str  # draft tokens of a forward pass: auto, or a number
    ram_gb: float  # 0 = ask host and cgroup
    prefill_chunk: int  # token rows; 0 = 1024, or less where the budget asks for it
    topk: int  # active experts of a token; 0 = as config.json says
    topp: float  # share of a token's router scores that the kept experts reach; 0 = all
    exact: bool  # activations stay float32 where weights are integers
    kv_dtype: str
    kernels: str | None  # None = the best for this processor
    threads: int  # 0 = as many as the process may keep busy
    read_mode: str  # of experts
    snap_mirror: str | None
    lookahead: str  # expert prefetch: auto, 0 or 1
    usage: bool  # record the expert usage over runs
    route_trace: str | None  # file to which the active experts are appended
    host: str  # address that the server listens on
    port: int  # 0 = any that is free
    api_key: str | None
    allowed_hosts: tuple[str, ...]  # host names of the server, besides numeric addresses and localhost
    kv_slots: int  # conversations at once; 0 = 4, or fewer where the budget asks for it
    queue: int  # requests that may wait
    kvsave: bool  # keep KV caches of conversations over a restart
    cache: Path  # folder of compiled kernels, drive speeds, usage histories, saved conversations
    dumb: bool  # from TERM: the terminal cannot move its cursor
    cap: int
    expert_bits: int
    dense_bits: int
    tools: bool  # of a chat
    notices: tuple[str, ...]

    @property
    def drafts(self) -> bool:
        """Whether this run generates with draft tokens: then the MTP layer is loaded."""
        generates = not self.score and (self.serve or self.prompt is not None or not (self.replay or self.tf))
        return bool(generates) and self.draft != "0"

    @property
    def is_chat(self) -> bool:
        """Whether CHAT=1 stands alone: in a terminal it starts an interactive chat."""
        return self.chat and not (self.score or self.serve or self.prompt or self.replay or self.tf or self.ref)

    @staticmethod
    def read(
        arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
        snap: str | None = None,
        ngen: int = 64,
        draft: str = "auto",
        tools: bool = False,
    ) -> "Settings":
        """Read the command-line arguments and the environment. Refused for a value out of its range.

        `snap` takes precedence over SNAP; `ngen` and `draft` are the defaults of NGEN and DRAFT.
        """
        env = EnvironReader(os.environ if environ is None else environ)
        if len(arguments) > 3:
            raise Refused(f"{len(arguments)} arguments, at most 3 are known: cap, expert_bits, dense_bits")
        positional = TextFieldReader(dict(zip(("cap", "expert_bits", "dense_bits"), arguments, strict=False)))
        prompt = env.utf8("PROMPT")
        if prompt is not None and not prompt.strip():
            raise Refused("PROMPT is empty; give it some text, or leave it unset")
        serve = env.one_of("SERVE", SERVERS, None)
        serve = None if serve == "0" else serve
        chat = env.flag("CHAT", False)
        if chat and prompt is None:
            ngen = CHAT_NGEN
        if not snap and not env.path("SNAP"):
            env.notices.append("[snapshot] SNAP is not set: models/tiny, the embedded model")
        temp = env.temperature("TEMP")
        for name in filter(env.present, IGNORED):
            instead = f"; use {RENAMED[name]}" if name in RENAMED else ""
            env.notices.append(f"[env] {name} does nothing here{instead}, see docs/env_vars.md")
        return Settings(
            snap=snap or env.path("SNAP") or str(EMBEDDED_SNAPSHOT),
            score=env.path("SCORE"),
            serve=serve,
            prompt=prompt,
            ref=env.path("REF"),
            replay=env.present("REPLAY"),
            tf=env.present("TF"),
            report=env.path("REPORT"),
            ngen=env.whole("NGEN", SERVE_NGEN.get(serve or "", ngen), 1),
            ctx=env.whole("CTX", 0),
            chat=chat,
            think=env.flag("THINK", False),
            prefix=env.flag("PREFIX", True),
            temp=temp,
            nucleus=env.number("NUCLEUS", 0.90, -1e9, 1e9),
            seed=env.whole("SEED", time.time_ns() % 2**32, 0, 2**64 - 1),
            draft=env.draft("DRAFT", draft),
            ram_gb=env.number("RAM_GB", 0.0, 0.0, 1e6),
            prefill_chunk=env.whole("PREFILL_CHUNK", 0, 0, 1 << 20),
            topk=env.whole("TOPK", 0, 0, 65536),
            topp=env.number("TOPP", 0.0, 0.0, 1.0),
            exact=env.flag("EXACT", False),
            kv_dtype=env.one_of("KV_DTYPE", KV_DTYPES, "f32"),
            kernels=env.one_of("KERNELS", KERNELS, None),
            threads=env.whole("THREADS", 0, 0, 256),
            read_mode=env.one_of("READ_MODE", READ_MODES, "auto"),
            snap_mirror=env.path("SNAP_MIRROR"),
            lookahead=env.one_of("LOOKAHEAD", LOOKAHEADS, "auto"),
            usage=env.flag("USAGE", True),
            route_trace=env.path("ROUTE_TRACE"),
            host=env.utf8("HOST") or "127.0.0.1",
            port=env.whole("PORT", 8000, 0, 65535),
            api_key=env.utf8("API_KEY") or None,
            allowed_hosts=tuple((env.utf8("ALLOWED_HOSTS") or "").replace(",", " ").split()),
            kv_slots=env.whole("KV_SLOTS", 0, 1, 64),
            queue=env.whole("QUEUE", 64, 0, 1 << 16),
            kvsave=env.flag("KVSAVE", False),
            cache=Path(env.path("XDG_CACHE_HOME") or Path.home() / ".cache") / "colibri.py",
            dumb=env.path("TERM") in (None, "dumb"),
            cap=positional.whole("cap", 0, 0, 1 << 20),
            expert_bits=int(positional.one_of("expert_bits", BITS, "16")),
            dense_bits=int(positional.one_of("dense_bits", BITS, "16")),
            tools=tools,
            notices=tuple(env.notices),
        )


class EnvironReader(TextFieldReader):
    """Typed reads of an environment. A variable set to nothing counts as unset, except in `utf8` and `present`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.notices: list[str] = []

    def find(self, name: str) -> str | None:
        return self.values.get(name) or None

    path = find  # a file name stays as the system gave it

    def utf8(self, name: str) -> str | None:
        """The value as UTF-8, whatever the locale made of its bytes."""
        value = self.values.get(name)
        try:
            return None if value is None else os.fsencode(value).decode("utf-8")
        except UnicodeError:
            raise Refused(f"{name} is not valid UTF-8; check the terminal's encoding") from None

    def present(self, name: str) -> bool:
        return name in self.values

    def draft(self, name: str, default: str) -> str:
        value = self.find(name) or default
        return value if value == "auto" else str(self.whole(name, default, 0, MAX_DRAFT))

    def temperature(self, name: str) -> float:
        """A TEMP that is not a number is ignored with a notice: other programs use the name for a folder."""
        value = self.find(name)
        number = self.to_number(value or "-1")
        if number is None:
            self.notices.append(f"[env] {name}={value!r} is not a number: ignored, as no temperature")
        return DEFAULT_TEMPERATURE if number is None or number < 0 else number
