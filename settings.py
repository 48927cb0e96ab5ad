"""Every environment variable, read once, here. docs/env_vars.md describes each; a test holds the two equal.

Doors (colibri.py, scripts) call Settings.read and hand values down; nothing else looks at the environment.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from errors import Refused

EMBEDDED_SNAPSHOT = Path(__file__).resolve().parent / "models" / "tiny"

VARIABLES = (
    "SNAP SCORE SERVE PROMPT REF REPLAY TF REPORT NGEN CTX CHAT THINK PREFIX "
    "TEMP NUCLEUS SEED DRAFT RAM_GB PREFILL_CHUNK TOPK TOPP EXACT KV_DTYPE KERNELS THREADS READ_MODE SNAP_MIRROR "
    "LOOKAHEAD USAGE EXPERT_TIER ROUTE_TRACE HOST PORT API_KEY ALLOWED_HOSTS KV_SLOTS QUEUE KVSAVE XDG_CACHE_HOME TERM"
).split()

# What may run the arithmetic; a test holds this and kernels/dispatch.py equal, for torch is slow to import here.
KERNELS = ("native", "reference", "avx512amx", "avx512vnni", "avx512", "avx2", "neondot", "neon", "portable")

KV_DTYPES = ("f32", "bf16")
READ_MODES = ("auto", "direct", "buffered")
LOOKAHEADS = ("auto", "0", "1")
MAX_DRAFT = 16
TIERS = ("full", "reference")
SERVERS = ("1", "stdio", "0")
# Tokens of an answer where NGEN is not set: over HTTP the request decides, and the room there is.
SERVE_NGEN = {"1": 1 << 31, "stdio": 256}

# Names of the C engine that do nothing here, yet or ever: names, status, why. Setting one prints a notice.
NOT_YET = "not built yet"
CPU_ONLY = "this engine runs on the CPU"
C_ENGINE = (
    ("SERVE_BATCH", "ignored", "conversations always share their forwards; KV_SLOTS says how many"),
    ("MTP", "renamed", "DRAFT=0 turns drafts off"),
    ("GRAMMAR GRAMMAR_DRAFT SCHEMA", NOT_YET, "drafts from a grammar"),
    (
        "PIN PIN_GB PIN_FILL AUTOPIN REPIN REPIN_VERBOSE",
        "ignored",
        "what is used most stays anyway",
    ),
    ("STATS", "renamed", "ROUTE_TRACE=file records which experts a run asks for"),
    ("PREFETCH SPEC PILOT PILOT_K PILOT_REAL PILOT_TWO", "renamed", "LOOKAHEAD; by default it is on while it pays"),
    ("COUPLE COUPLE_K COUPLE_D", "renamed", "LOOKAHEAD; by default it is on while it pays"),
    ("PIPE PIPE_WORKERS", "ignored", "reads and arithmetic always overlap; the drive is measured"),
    ("DIRECT", "renamed", "READ_MODE=direct; by default the drive is measured"),
    ("DROP", "ignored", "the kernel gives pages of files back first when memory is short; READ_MODE=direct keeps none"),
    ("MLOCK COLI_MMAP", "ignored", "experts are read into memory of the process's own, within its budget"),
    ("CAP_RAISE", "renamed", "an explicit cap is exact, cap 0 takes what the budget allows"),
    ("CHAT_TEMPLATE", "renamed", "CHAT=1 turns the template on"),
    ("ABSORB", "ignored", "attention is absorbed for any number of rows"),
    ("IDOT", "renamed", "EXACT=1 keeps the activations of integer weights in float32"),
    ("I4S I4_ACC512 I4_ACC512_TEST COLI_NO_FUSED_PAIR", "ignored", "a choice between kernels of the C engine"),
    ("DSA", "ignored", "the indexer runs when the snapshot has one"),
    ("DSA_TOPK DSA_FORCE", "ignored", "index_topk of config.json holds"),
    ("CACHE_ROUTE ROUTE_J ROUTE_M ROUTE_P ROUTE_ALPHA ROUTE_AGREE", "ignored", "the cache never changes a route"),
    ("NOPACK LOOKA MTP_PRENORM MTP_SWAP MTP_DEBUG", "ignored", "an experiment of the C engine"),
    ("REF_FORCE COLI_POLICY", "ignored", "a safeguard of the C engine; here lossy switches are announced"),
    ("COLI_NO_OMP_TUNE COLI_OMP_TUNED", "ignored", "there is no OpenMP; THREADS sets the threads"),
    ("COLI_CUDA COLI_GPU COLI_GPUS CUDA_DENSE CUDA_EXPERT_GB CUDA_RELEASE_HOST COLI_METAL", "ignored", CPU_ONLY),
)
IGNORED = {name: (status, why) for names, status, why in C_ENGINE for name in names.split()}

USAGE = """\
usage: [SNAP=folder] MODE python colibri.py [cap] [expert_bits] [dense_bits]

  PROMPT="Once upon a time"   generate text; CHAT=1 puts it in the chat template
  SERVE=1                     an HTTP server with the OpenAI API on http://127.0.0.1:8000
  SCORE=requests.txt          log-likelihoods of continuations, one line each
  REPLAY=1                    measure decode speed over the tokens of REF
  TF=1                        compare the argmax after every token of REF with the reference
  (no mode)                   generate from the prompt of REF and compare with the reference
  REF=file.json               the reference, by default ref_glm.json of the snapshot

cap: expert slots per layer, 0 = what the budget allows; bits: 16 = as stored, 8, 4 or 2 quantise at load.
Every variable: docs/env_vars.md"""


@dataclass(frozen=True)
class Settings:
    """One field for each variable, named as it is but in lower case; the arguments at the end."""

    snap: str
    score: str | None
    serve: str | None  # 1, or stdio
    prompt: str | None
    ref: str | None
    replay: bool
    tf: bool
    report: str | None
    ngen: int
    ctx: int  # 0 = the smaller of 4096 and what the model was made for
    chat: bool
    think: bool
    prefix: bool
    temp: float | None  # None = the mode's own: 0.7 for PROMPT
    nucleus: float
    seed: int
    draft: str  # guesses per forward: auto, or a number
    ram_gb: float  # 0 = ask host and cgroup
    prefill_chunk: int  # 0 = 1024, or less where the budget asks for it
    topk: int  # 0 = as many experts a token as config.json says
    topp: float  # 0 = all of them
    exact: bool  # activations stay float32 where weights are integers
    kv_dtype: str  # how the KV state is stored
    kernels: str | None  # None = the best of this processor
    threads: int  # 0 = as many as the process may keep busy
    read_mode: str  # how experts are read
    snap_mirror: str | None
    lookahead: str  # whether the next layer's experts are read before they are asked for: auto, 0 or 1
    usage: bool  # learn over runs which experts a model uses
    expert_tier: str  # full, or the plain one to compare with
    route_trace: str | None  # file that the chosen experts are appended to
    host: str  # address that the server listens on
    port: int  # 0 = any that is free
    api_key: str | None
    allowed_hosts: tuple[str, ...]  # names by which clients may call the server, beside addresses and localhost
    kv_slots: int  # conversations at once; 0 = 4, or fewer where the budget asks for it
    queue: int  # requests that may wait
    kvsave: bool  # keep conversations over a restart
    cache: Path  # where what can be made again is kept: compiled kernels, how fast drives are
    dumb: bool  # from TERM: the terminal cannot move its cursor
    cap: int
    expert_bits: int
    dense_bits: int
    notices: tuple[str, ...]

    @property
    def drafts(self):
        """Whether this run generates and may guess: then the MTP layer is loaded."""
        generates = not self.score and (self.serve or self.prompt is not None or not (self.replay or self.tf))
        return generates and self.draft != "0"

    @staticmethod
    def read(arguments, environ=None, snap=None, ngen=64, draft="auto"):
        """Command-line arguments and the environment -> Settings; `snap` goes before SNAP, `ngen` and `draft` hold
        where NGEN and DRAFT are not set. Refused for a value that means nothing."""
        read = EnvironReader(os.environ if environ is None else environ)
        if len(arguments) > 3:
            raise Refused(f"{len(arguments)} arguments, at most 3 are known: cap, expert_bits, dense_bits")
        cap, expert_bits, dense_bits = (*arguments, *("0", "16", "16")[len(arguments) :])
        serve = read.one_of("SERVE", SERVERS)
        serve = None if serve == "0" else serve
        values = dict(
            snap=snap or read.path("SNAP") or str(EMBEDDED_SNAPSHOT),
            score=read.path("SCORE"),
            serve=serve,
            prompt=read.text("PROMPT"),
            ref=read.path("REF"),
            replay=read.present("REPLAY"),
            tf=read.present("TF"),
            report=read.path("REPORT"),
            ngen=read.whole("NGEN", SERVE_NGEN.get(serve, ngen), 1, 1 << 31),
            ctx=read.whole("CTX", 0, 0, 1 << 31),
            chat=read.flag("CHAT", False),
            think=read.flag("THINK", False),
            prefix=read.flag("PREFIX", True),
            temp=read.temperature("TEMP"),
            nucleus=read.number("NUCLEUS", 0.90, -1e9, 1e9),
            seed=read.whole("SEED", time.time_ns() % 2**32, 0, 2**64 - 1),
            draft=read.draft("DRAFT", draft),
            ram_gb=read.number("RAM_GB", 0.0, 0.0, 1e6),
            prefill_chunk=read.whole("PREFILL_CHUNK", 0, 0, 1 << 20),
            topk=read.whole("TOPK", 0, 0, 65536),
            topp=read.number("TOPP", 0.0, 0.0, 1.0),
            exact=read.flag("EXACT", False),
            kv_dtype=read.one_of("KV_DTYPE", KV_DTYPES) or "f32",
            kernels=read.one_of("KERNELS", KERNELS),
            threads=read.whole("THREADS", 0, 0, 256),
            read_mode=read.one_of("READ_MODE", READ_MODES) or "auto",
            snap_mirror=read.path("SNAP_MIRROR"),
            lookahead=read.one_of("LOOKAHEAD", LOOKAHEADS) or "auto",
            usage=read.flag("USAGE", True),
            expert_tier=read.one_of("EXPERT_TIER", TIERS) or "full",
            route_trace=read.path("ROUTE_TRACE"),
            host=read.text("HOST") or "127.0.0.1",
            port=read.whole("PORT", 8000, 0, 65535),
            api_key=read.text("API_KEY") or None,
            allowed_hosts=tuple((read.text("ALLOWED_HOSTS") or "").replace(",", " ").split()),
            kv_slots=read.whole("KV_SLOTS", 0, 1, 64),
            queue=read.whole("QUEUE", 64, 0, 1 << 16),
            kvsave=read.flag("KVSAVE", False),
            cache=Path(read.path("XDG_CACHE_HOME") or Path.home() / ".cache") / "colibri.py",
            dumb=read.path("TERM") in (None, "dumb"),
            cap=read_whole("cap", cap, 0, 1 << 20),
            expert_bits=read_bits("expert_bits", expert_bits),
            dense_bits=read_bits("dense_bits", dense_bits),
        )
        if values["prompt"] is not None and not values["prompt"].strip():
            raise Refused("PROMPT is empty; give it some text, or leave it unset")
        if not snap and not read.path("SNAP"):
            read.notices.insert(0, "[snapshot] SNAP is not set: models/tiny, the embedded model")
        for name, (status, why) in IGNORED.items():
            if read.present(name):
                read.notices.append(f"[env] {name} is {status}: {why}")
        return Settings(**values, notices=tuple(read.notices))


class EnvironReader:
    """Typed reads of an environment. A variable set to nothing counts as unset, but for those asked by `present`."""

    def __init__(self, environ):
        self.environ, self.notices = environ, []

    def text(self, name):
        """The value as UTF-8, whatever the locale made of its bytes."""
        value = self.environ.get(name)
        try:
            return None if value is None else os.fsencode(value).decode("utf-8")
        except UnicodeError:
            raise Refused(f"{name} is not valid UTF-8; check the terminal's encoding") from None

    def path(self, name):
        """The value as the system gave it, for it names a file; None when it is empty."""
        return self.environ.get(name) or None

    def present(self, name):
        return name in self.environ

    def one_of(self, name, words):
        value = self.environ.get(name) or None
        if value is not None and value not in words:
            raise Refused(f"{name}={value!r}: expected {', '.join(words[:-1])} or {words[-1]}")
        return value

    def flag(self, name, default):
        value = self.environ.get(name, "")
        if value not in ("", "0", "1"):
            raise Refused(f"{name}={value!r}: expected 1 (on) or 0 (off)")
        return default if value == "" else value == "1"

    def whole(self, name, default, low, high):
        value = self.environ.get(name, "")
        return default if value == "" else read_whole(name, value, low, high)

    def number(self, name, default, low, high):
        value = self.environ.get(name, "")
        if value == "":
            return default
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            raise Refused(f"{name}={value!r}: expected a number from {low:g} to {high:g}")
        return number

    def draft(self, name, default):
        value = self.environ.get(name) or default
        return value if value == "auto" else str(read_whole(name, value, 0, MAX_DRAFT))

    def temperature(self, name):
        """A TEMP that is not a number is no temperature: other programs use the name for a folder."""
        value = self.environ.get(name, "")
        try:
            number = float(value or -1)
            if math.isfinite(number):
                return number if number >= 0 else None
        except ValueError:
            pass
        self.notices.append(f"[env] {name}={value!r} is not a number: ignored, as no temperature")
        return None


def read_whole(name, value, low, high):
    # int() alone would also take 1_0, blanks, or digits of other scripts.
    number = int(value) if value.isascii() and value.isdigit() and len(value) <= 20 else None
    if number is None or not low <= number <= high:
        raise Refused(f"{name}={value!r}: expected a whole number from {low} to {high}")
    return number


def read_bits(name, value):
    if value not in ("16", "8", "4", "2"):
        raise Refused(f"{name}={value!r}: expected 16 (as stored), 8, 4 or 2")
    return int(value)
