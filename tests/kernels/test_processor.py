"""The features of the processor: detected in Python and in C, alike with each compiler that the kernels' hint names."""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import processor
from kernels.build import FLAGS, SOURCES, VARIANTS, find_library, machine_flags, usable_variants
from kernels.formats import FORMATS
from kernels.native import Native
from kernels.processor import X86_BITS, arm_features, processor_flags, x86_features
from tests.kernels.test_kernels import FOLDER, randn, weights_of

COMPILERS = {name: [name] for name in ("cc", "gcc", "clang")} | {"zig": [sys.executable, "-m", "ziglang", "cc"]}


@pytest.fixture(params=COMPILERS)
def compiler(request):
    """The command of one compiler; skips where it is not installed."""
    command = COMPILERS[request.param]
    found = importlib.util.find_spec("ziglang") if request.param == "zig" else shutil.which(command[0])
    if not found:
        pytest.skip(f"{request.param} is not installed")
    return [shutil.which(command[0]) or command[0], *command[1:]]


def is_able(compiler, variant, folder):
    """What csrc/processor.h says in a library of its own."""
    source, library = folder / f"{variant}.c", folder / f"{variant}.so"
    source.write_text(f'#include "{SOURCES}/processor.h"\nint is_able(void) {{ return processor_is_able(); }}\n')
    flags = [flag for flag in FLAGS if flag != "-fvisibility=hidden"]
    line = [*compiler, *flags, *machine_flags(variant, compiler), f"-D{variant.upper()}", "-shared", source]
    done = subprocess.run([*map(str, line), "-o", str(library)], capture_output=True, text=True, timeout=300)
    if done.returncode:
        return None  # this compiler does not know the instructions
    return bool(ctypes.CDLL(str(library)).is_able())


def test_each_compiler_sees_the_processor_as_it_is(compiler, tmp_path):
    """A library that zig had compiled said that the processor has nothing, and the kernels took the portable path, ten
    times slower: its __builtin_cpu_supports says 0."""
    is_arm = "asimd" in processor_flags()
    for variant in VARIANTS:
        if (variant != "portable" and variant.startswith("neon") != is_arm) or variant == "avx512amx":
            continue  # of another architecture; and the system may refuse tiles that the processor has
        able = is_able(compiler, variant, tmp_path)
        assert able in (variant in usable_variants(), None), variant


def test_each_compiler_gives_the_same_bits(compiler):
    """And the best instruction set is the one that opens, not the portable one."""
    best = next(name for name in usable_variants() if name != "avx512amx")
    if compiler[0] != shutil.which("cc") and Path(compiler[0]).resolve() == Path(shutil.which("cc") or "").resolve():
        pytest.skip(f"{compiler[0]} is cc")
    native = Native(find_library(FOLDER, best, compiler))
    assert native.name == best
    expected = Native(find_library(FOLDER, "portable"))
    for name in ("bf16", "int4-g64", "int8-row"):
        for weight in weights_of(FORMATS[name], 33, 191):
            x = randn(5, 191)
            assert torch.equal(native.linear(x, weight), expected.linear(x, weight)), name


@pytest.mark.skipif("avx2" not in processor_flags(), reason="no AVX2")
def test_without_proc_the_c_library_is_asked(monkeypatch):
    """A container without /proc took the portable path, ten times slower."""
    flags, variants = processor_flags(), usable_variants()
    assert x86_features() == flags & X86_BITS.keys()
    monkeypatch.setattr(processor, "CPUINFO", Path("/no/such/file"))
    assert usable_variants() == variants


def test_what_is_assumed_where_nothing_is_detected(monkeypatch):
    """Another C library, no /proc: what every processor of the architecture has."""
    monkeypatch.setattr(processor, "CPUINFO", Path("/no/such/file"))
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: object())
    for machine, has in [("aarch64", {"asimd"}), ("arm64", {"asimd"}), ("x86_64", set())]:
        monkeypatch.setattr(processor.platform, "machine", lambda machine=machine: machine)
        assert processor_flags() == has
    assert arm_features() == x86_features() == set()


def test_hwcap_of_an_arm_processor(monkeypatch):
    def getauxval(kind):
        return {16: 1 << 20 | 1 << 1}[kind.value]

    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name: type("Library", (), {"getauxval": getauxval}))
    assert arm_features() == {"asimddp"}


def test_cpuinfo_without_a_line_of_flags(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : hidden\n")
    flags = usable_variants()
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert usable_variants() == flags
