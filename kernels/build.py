"""Compile csrc/ into a shared library, at first use or by `make native`, and find it again.

The name of a library contains a hash of its sources, the compiler and the instruction set, so a stale one is never
loaded. Its folder must belong to the user alone: whoever may write there decides what the engine runs.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kernels.processor import processor_flags

SOURCES = Path(__file__).resolve().parent / "csrc"
# Compilation units, compiled in parallel, the longest first. Small files share a unit: each unit spends a sixth of a
# second on the headers of the SIMD intrinsics.
UNITS = (
    ("gemv_int.c",),
    ("gemm_int.c",),
    ("gemm_float.c", "mla.c", "attention.c", "gqa.c", "indexer.c"),
    ("matmul.c", "moe.c", "router.c", "norms.c", "logprobs.c", "library.c", "pool.c"),
)
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-pthread", "-fvisibility=hidden", "-w", "-D_GNU_SOURCE")
# The instruction sets, the fastest first, each with the features it needs as /proc/cpuinfo names them.
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
NEON = ("asimd",)
NEONDOT = (*NEON, "asimddp")
VARIANTS = {
    "avx512amx": (*AVX512, "avx512vnni", "gfni", "amx-tile", "amx-int8"),
    "avx512vnni": (*AVX512, "avx512vnni"),
    "avx512": AVX512,
    "avxvnni": (*AVX2, "avxvnni"),
    "avx2": AVX2,
    "neondot": NEONDOT,
    "neon": NEON,
    "portable": (),
}
COMPILERS = ("cc", "gcc", "clang")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1")
COMPILE_SECONDS = 300
MIN_FREE_BYTES = 16_000_000  # objects and library take some MB
FULL = ("No space left on device", "Disk quota exceeded")


class BuildError(Exception):
    """No library could be made; the reason in one line."""


class CannotBuild(BuildError):
    """Nor for any other instruction set."""


class NoCompiler(CannotBuild):
    """There is no C compiler on this machine."""


def usable_variants() -> list[str]:
    """The instruction sets of this processor, the fastest first."""
    has = processor_flags()
    return [name for name, needs in VARIANTS.items() if has.issuperset(needs)]


def machine_flags(variant: str, command: Sequence[str]) -> list[str]:
    """The flags that select an instruction set in a compiler."""
    # zig alone compiles for the processor at hand unless it is told not to; a folder of libraries may be shared.
    base = ["-mcpu=baseline"] if "ziglang" in command else []
    if variant == "neondot":
        return ["-mcpu=generic+dotprod" if base else "-march=armv8.2-a+dotprod"]
    return base if variant == "neon" else base + [f"-m{feature}" for feature in VARIANTS[variant]]


def compilers() -> list[list[str]]:
    """Commands that may compile C, in the order in which they are tried."""
    found = [[path] for path in map(shutil.which, COMPILERS) if path]
    return [*found, [sys.executable, "-m", "ziglang", "cc"]]


def has_compiler() -> bool:
    """True if a compiler seems to be installed; none is run."""
    return any(shutil.which(name) for name in COMPILERS) or importlib.util.find_spec("ziglang") is not None


def find_library(
    folder: Path, variant: str, compiler: Sequence[str] | None = None, extra: tuple[str, ...] = ()
) -> Path:
    """The library for an instruction set in `folder`, compiled if it is not there; raises BuildError."""
    check_folder(folder)
    problems: list[str] = []
    for command in [compiler] if compiler else compilers():
        version = compiler_version(command)
        if version is None:
            continue
        path = folder / f"kernels-{variant}-{source_hash(command, version, variant, extra)}.so"
        if path.exists():
            return path
        check_space(folder)
        with locked(folder):  # a second process waits for the first, and finds the library that it made
            if path.exists() or compile_into(path, command, variant, extra, problems):
                return path
    if problems:
        raise BuildError(problems[0])
    raise NoCompiler("no C compiler was found (cc, gcc, clang, or pip install ziglang)")


def compile_into(path: Path, command: Sequence[str], variant: str, extra: tuple[str, ...], problems: list[str]) -> bool:
    """Compile the units in parallel, link under another name, then rename -> True, or False after an error, which is
    appended to `problems`."""
    flags = [*FLAGS, *machine_flags(variant, command), f"-DNAME={variant}", f"-D{variant.upper()}", *extra]
    with tempfile.TemporaryDirectory(dir=path.parent, suffix=".partial") as folder:
        units = [write_unit(Path(folder, f"{i}.c"), files) for i, files in enumerate(UNITS)]
        compiles = [[*command, *flags, "-c", str(unit), "-o", f"{unit}.o"] for unit in units]
        link = [*command, *flags, "-shared", *(f"{unit}.o" for unit in units), "-o", f"{folder}/linked", "-lm"]
        try:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                try:
                    list(pool.map(run_compiler, compiles))
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            run_compiler(link)
            os.chmod(f"{folder}/linked", 0o700)
            os.replace(f"{folder}/linked", path)
            return True
        except (OSError, subprocess.SubprocessError, BuildError) as error:
            if any(words in str(error) for words in FULL):  # of compiler, assembler or linker, whatever they blame
                raise CannotBuild(f"{path.parent}, or the temporary folder: {error}") from None
            problems.append(f"{' '.join(command)} failed: {error}")
    return False


def write_unit(path: Path, files: Sequence[str]) -> Path:
    """A C file that includes others -> its path."""
    path.write_text("".join(f'#include "{SOURCES / file}"\n' for file in files))
    return path


def run_compiler(line: Sequence[str]) -> None:
    """Run a compiler; raises BuildError with its first error in one line."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=COMPILE_SECONDS, errors="replace")
    if done.returncode:
        lines = done.stderr.splitlines()
        raise BuildError(next((text for text in lines if "error" in text), done.stderr.strip()[-200:]))


def compiler_version(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def source_hash(command: Sequence[str], version: str, variant: str, extra: tuple[str, ...]) -> str:
    """Twenty digits that change with a source, the compiler, the flags or the architecture."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("[!.]*.[ch]")):  # a Mac adds ._ files
        digest.update(path.name.encode() + path.read_bytes())
    flags = (*FLAGS, *machine_flags(variant, command), *extra)
    digest.update(repr((command, version, flags, platform.machine(), sys.platform)).encode())
    return digest.hexdigest()[:20]


def check_space(folder: Path) -> None:
    """Raise CannotBuild, rather than a linker minutes later, if the disk of the folder is full."""
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        need = f"{MIN_FREE_BYTES / 1e6:.0f} MB are needed to compile"
        raise CannotBuild(f"{folder}: its disk has {free / 1e6:.1f} MB free, {need}; free some, or set XDG_CACHE_HOME")


def check_folder(folder: Path) -> None:
    """Create the folder; raise CannotBuild if another user owns it or may write to it, or no library in it can run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise CannotBuild(f"{folder}: {error.strerror}") from None
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise CannotBuild(f"{folder}: is on a disk from which nothing may run (noexec); set XDG_CACHE_HOME to another")
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise CannotBuild(f"{folder}: must be writable by you alone (chmod go-w, or set XDG_CACHE_HOME)")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with open(folder / "build.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
