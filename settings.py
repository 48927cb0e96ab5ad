"""Settings: every environment variable and positional argument, read once. docs/env_vars.md describes each.

colibri.py and the scripts call Settings.read and pass the values down; no other file reads the environment (a test).
"""

import ipaddress
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from errors import Refused, show
from machine.fields import TextFieldReader

EMBEDDED_SNAPSHOT = Path(__file__).resolve().parent / "models" / "tiny"

# A test holds this equal to kernels/dispatch.py, which is not imported here because torch is slow to import.
KERNELS = ("native", "reference", "avx512amx", "avx512vnni", "avx512", "avxvnni", "avx2", "neondot", "neon", "portable")

MAX_DRAFT = 16
LOOPBACK = "127.0.0.1"
DEFAULT_TEMPERATURE = 0.7  # of the modes that sample
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
usage: [SNAP=folder or .gguf] MODE python colibri.py [cap] [expert_bits] [dense_bits] [--tools]

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


# Values that other programs give to the same names.
SNAP_PACKAGE = re.compile(r"(/var/lib/snapd)?/snap/[^/]+/(x?\d+|current)/?")  # in the terminals of snap packages
SHELL_PROMPT = re.compile(  # the PROMPT of zsh and cmd: escapes and signs, and no word between them
    r"""(?=.*(?:%\d*[a-zA-Z#~/({]|\$[a-zA-Z_](?!\w)))
    (?>%\d*[a-zA-Z#~/!?.@_^)](?:\{[^{}]*\})?|%\d*\{.*?%\}|%\d*\(.|\$e\[[\d;]*m|\$[a-zA-Z_+&|](?!\w)
    |\$[a-zA-Z_]\w*(?:\[\w+\])?|\$\([^()]*\)|\$\{[^{}]*\}|\x1b\[[\d;]*m|[^\w%$]|\$(?!\w))+""",
    re.VERBOSE | re.DOTALL,
)


class Environ(TextFieldReader):
    """Typed reads of an environment. A variable set to nothing counts as unset, except in `utf8` and `present`."""

    def __init__(self, environ: Mapping[str, str], **defaults: str) -> None:
        """defaults: the values of variables that are unset."""
        super().__init__(environ)
        self.defaults = defaults
        self.notices: list[str] = []

    def find(self, name: str) -> str | None:
        return self.values.get(name) or self.defaults.get(name)

    def path(self, name: str) -> str | None:
        """A file name, as the system gave it; 0 is none."""
        value = self.find(name)
        return None if value == "0" else value

    def ignore(self, name: str, why: str, instead: Any = None) -> Any:
        """Notice that a value is not used -> what is used instead."""
        self.notices.append(f"[env] {name}={show(self.values[name])} {why}: ignored, see docs/env_vars.md")
        return instead

    def snapshot(self, name: str) -> str | None:
        value = self.path(name)
        if value and SNAP_PACKAGE.fullmatch(value):
            value = self.ignore(name, "is set by the snap package of this terminal")
        return value

    def prompt(self, name: str) -> str | None:
        """A text. A shell that exports its own PROMPT must not choose the mode."""
        text = self.utf8(name)
        if text and SHELL_PROMPT.fullmatch(text):
            text = self.ignore(name, "is a shell's prompt")
        return text

    def prefix(self, name: str) -> bool:
        """A flag. Conda, Termux and many makefiles use the name for the folder that programs are installed in."""
        is_folder = "/" in (self.find(name) or "")
        return bool(self.ignore(name, "is a folder", True) if is_folder else self.flag(name, True))

    def server(self, name: str, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """A value that a server alone reads: in other modes whatever it holds is no matter."""
        is_used = self.find(name) and self.find("SERVE") in SERVE_NGEN
        return read(self if is_used else Environ({}), name, *arguments, **options)

    def address(self, name: str) -> str:
        """An address to listen on. Conda sets the name to a triplet, tcsh to the name of the machine."""
        value = (self.utf8(name) or "").strip("[]")
        if value in ("", "0", "localhost"):
            return value if value == "localhost" else LOOPBACK
        try:
            return str(ipaddress.ip_address(value))
        except ValueError:
            return str(self.ignore(name, "is no numeric address, and other programs use the name", LOOPBACK))

    def key(self, name: str) -> str | None:
        """A key that clients must send."""
        key = self.utf8(name) or None
        if key == "0":
            raise Refused(f"{name}=0 would be the key that clients must send; unset it to ask for none")
        return key

    def words(self, name: str) -> tuple[str, ...]:
        text = self.utf8(name) or ""
        return () if text == "0" else tuple(text.replace(",", " ").split())

    def utf8(self, name: str) -> str | None:
        """The value as UTF-8, whatever the locale made of its bytes."""
        value = self.values.get(name)
        try:
            return None if value is None else os.fsencode(value).decode("utf-8")
        except UnicodeError:
            raise Refused(f"{name} is not valid UTF-8; check the terminal's encoding") from None

    def cache_folder(self, name: str) -> Path:
        """XDG_CACHE_HOME, or .cache of the home folder; where there is none that can be written, a temporary folder."""
        value = self.path(name)
        if value and os.path.isabs(value):
            return Path(value, "colibri.py")
        if value:
            self.ignore(name, "is no absolute path")
        home = Path("/.cache")
        with suppress(RuntimeError, OSError):  # no HOME and a user id without an entry; folders that cannot be entered
            home = Path(Path.home() if Path.home().is_absolute() else "/", ".cache")
            if os.access(next(path for path in (home, *home.parents) if path.exists()), os.W_OK | os.X_OK):
                return home / "colibri.py"
        import tempfile  # needed here alone, and slow to import

        with suppress(OSError):  # nowhere a file can be written
            folder = Path(tempfile.gettempdir(), f"colibri.py-{os.getuid()}")
            if folder.parent != Path.cwd():
                self.notices.append(f"[env] no home folder can be written: {folder} takes its place; set {name}")
                return folder
        return home / "colibri.py"

    def is_dumb(self, name: str) -> bool:
        """True for a terminal that cannot move its cursor."""
        return self.path(name) in (None, "dumb")

    def present(self, name: str) -> bool:
        return name in self.values

    def is_on(self, name: str) -> bool:
        """A switch that anything turns on, but for 0 and nothing."""
        return self.find(name) not in (None, "", "0")

    def draft(self, name: str) -> str:
        value = self.find(name)
        return value if value == "auto" else str(self.whole(name, high=MAX_DRAFT))

    def temperature(self, name: str) -> float:
        """A TEMP that is not a number is ignored with a notice: other programs use the name for a folder."""
        value = self.find(name)
        number = self.to_number(value or "-1")
        if number is None:
            self.ignore(name, "is not a number")
        return DEFAULT_TEMPERATURE if number is None or number < 0 else number


def variable(read: Callable[..., Any], *arguments: Any, name: str = "", **options: Any) -> Any:
    """A field that `read`, a method of Environ, reads from the variable `name`, by default the field's own."""
    return field(metadata={"name": name, "read": lambda env, name: read(env, name, *arguments, **options)})


@dataclass(frozen=True)
class Settings:
    """One field for each variable, under its name in lower case, after the arguments."""

    cap: int
    expert_bits: int
    dense_bits: int
    tools: bool  # of a chat
    top_k: int  # of a chat: the likeliest tokens that it samples from; 0 = all
    notices: tuple[str, ...]
    snap: str = variable(Environ.snapshot)
    score: str | None = variable(Environ.path)
    serve: str | None = variable(Environ.one_of, ("1", "stdio", "0"), None)  # 1, stdio, or None for 0
    prompt: str | None = variable(Environ.prompt)
    ref: str | None = variable(Environ.path)
    replay: bool = variable(Environ.is_on)
    tf: bool = variable(Environ.is_on)
    report: str | None = variable(Environ.path)
    ngen: int = variable(Environ.whole, low=1)  # max_tokens
    ctx: int = variable(Environ.whole, 0)  # max_model_len; 0 = 4096, or less if the model has fewer positions
    chat: bool = variable(Environ.flag, False)
    think: bool = variable(Environ.flag, False)
    unsafe_sandbox: bool = variable(Environ.flag, False)  # run programs of the model where no walls can be built
    prefix: bool = variable(Environ.prefix)
    temp: float = variable(Environ.temperature)
    nucleus: float = variable(Environ.number, 0.90, -1e9, 1e9)  # top_p
    seed: int = variable(lambda env, name: env.whole(name, time.time_ns() % 2**32, 0, 2**64 - 1))
    draft: str = variable(Environ.draft)  # draft tokens of a forward pass: auto, or a number
    draft_guard: bool = variable(Environ.flag, True)  # pause a number of draft tokens that are hardly ever accepted
    ram_gb: float = variable(Environ.number, 0.0, 0.0, 1e6)  # 0 = ask host and cgroup
    prefill_chunk: int = variable(Environ.whole, 0, 0, 1 << 20)  # token rows; 0 = by the budget
    topk: int = variable(Environ.whole, 0, 0, 65536)  # active experts of a token; 0 = as config.json says
    topp: float = variable(Environ.number, 0.0, 0.0, 1.0)  # share of the router scores to keep; 0 = all
    exact: bool = variable(Environ.flag, False)  # activations stay float32 where weights are integers
    kv_dtype: str = variable(Environ.one_of, ("f32", "bf16", "int8"), "f32")
    kernels: str | None = variable(Environ.one_of, KERNELS, None)  # None = the best for this processor
    threads: int = variable(Environ.whole, 0, 0, 256)  # 0 = as many as the process may keep busy
    read_mode: str = variable(Environ.one_of, ("auto", "direct", "buffered"), "auto")  # of experts
    snap_mirror: str | None = variable(Environ.path)
    lookahead: str = variable(Environ.one_of, ("auto", "0", "1"), "auto")  # expert prefetch
    usage: bool = variable(Environ.flag, True)  # record the expert usage over runs
    route_trace: str | None = variable(Environ.path)  # file to which the active experts are appended
    host: str = variable(Environ.server, Environ.address)  # that the server listens on
    port: int = variable(Environ.server, Environ.whole, 8000, 0, 65535)  # 0 = any that is free
    api_key: str | None = variable(Environ.server, Environ.key)
    # Host names of the server, besides numeric addresses and localhost.
    allowed_hosts: tuple[str, ...] = variable(Environ.server, Environ.words)
    kv_slots: int = variable(Environ.whole, 0, 0, 64)  # conversations at once; 0 = 4, or fewer as the budget asks
    queue: int = variable(Environ.server, Environ.whole, 64, 0, 1 << 16)  # requests that may wait
    kvsave: bool = variable(Environ.flag, False)  # keep KV caches of conversations over a restart
    # Folder of compiled kernels, drive speeds, usage histories, saved conversations.
    cache: Path = variable(Environ.cache_folder, name="XDG_CACHE_HOME")  # noqa: RUF009 - a field
    dumb: bool = variable(Environ.is_dumb, name="TERM")  # it cannot move its cursor

    @property
    def drafts(self) -> bool:
        """True if this run generates with draft tokens: then the MTP layer is loaded."""
        generates = not self.score and bool(self.serve or self.prompt or not (self.replay or self.tf))
        return generates and self.draft != "0"

    @property
    def is_chat(self) -> bool:
        """True if CHAT=1 stands alone: in a terminal it starts an interactive chat."""
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
        if len(arguments) > 3:
            raise Refused(f"{len(arguments)} arguments, at most 3 are known: cap, expert_bits, dense_bits")
        positional = TextFieldReader(dict(zip(("cap", "expert_bits", "dense_bits"), arguments, strict=False)))
        env = Environ(os.environ if environ is None else environ, DRAFT=draft)
        if env.flag("CHAT", False) and not Environ(env.values).prompt("PROMPT"):
            ngen = CHAT_NGEN
        env.defaults["NGEN"] = str(SERVE_NGEN.get(env.find("SERVE") or "", ngen))
        values = {setting.name: setting.metadata["read"](env, name) for name, setting in VARIABLES.items()}
        if not snap and not values["snap"]:
            env.notices.append("[snapshot] SNAP is not set: models/tiny, the embedded model")
        values["snap"] = snap or values["snap"] or str(EMBEDDED_SNAPSHOT)
        if values["serve"] == "0":
            values["serve"] = None
        if values["prompt"] is not None and not values["prompt"].strip():
            raise Refused("PROMPT is empty; give it some text, or leave it unset")
        for name in filter(env.present, IGNORED):
            instead = f"; use {RENAMED[name]}" if name in RENAMED else ""
            env.notices.append(f"[env] {name} does nothing here{instead}, see docs/env_vars.md")
        return Settings(
            **values,
            cap=positional.whole("cap", 0, 0, 1 << 20),
            expert_bits=int(positional.one_of("expert_bits", BITS, "16")),
            dense_bits=int(positional.one_of("dense_bits", BITS, "16")),
            tools=tools,
            top_k=0,
            notices=tuple(env.notices),
        )


def terminal_is_dumb() -> bool:
    """Settings.dumb, for programs that read no other variable."""
    return Environ(os.environ).is_dumb("TERM")


VARIABLES = {
    setting.metadata["name"] or setting.name.upper(): setting for setting in fields(Settings) if setting.metadata
}
