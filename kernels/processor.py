"""The features of this processor that the kernels may use, by their names in /proc/cpuinfo.

A container may have no /proc; then the C library is asked, which has asked the processor (CPUID and XGETBV, or the
kernel's HWCAP). It decides what is compiled; csrc/processor.h asks again before a library is used.
"""

import ctypes
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AT_HWCAP = 16  # of getauxval
HWCAP_ASIMDDP = 20  # bit
# Feature -> (leaf of glibc's table: 0 is CPUID 1, 1 is CPUID 7, 6 is CPUID 7.1; register EAX to EDX; bit).
X86_BITS = {
    "fma": (0, 2, 12),
    "f16c": (0, 2, 29),
    "avx2": (1, 1, 5),
    "avx512f": (1, 1, 16),
    "avx512dq": (1, 1, 17),
    "avx512bw": (1, 1, 30),
    "avx512vl": (1, 1, 31),
    "gfni": (1, 2, 8),
    "avx512vnni": (1, 2, 11),
    "amx-tile": (1, 3, 24),
    "amx-int8": (1, 3, 25),
    "avxvnni": (6, 0, 4),
}


class CpuidFeature(ctypes.Structure):
    """glibc's struct cpuid_feature: what the processor has, and what the system lets a process use of it."""

    _fields_ = (("cpuid", ctypes.c_uint * 4), ("active", ctypes.c_uint * 4))


def processor_flags() -> set[str]:
    """The features of the processor."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    baseline = {"asimd"} if is_arm else set()  # of every such processor
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    if flags is None:
        return baseline | (arm_features() if is_arm else x86_features())
    names = flags.partition(":")[2].replace("avx512_", "avx512").replace("avx_vnni", "avxvnni").replace("amx_", "amx-")
    return baseline.union(names.split())


def x86_features() -> set[str]:
    """By glibc 2.33 or newer; nothing with another C library or on another processor."""
    try:
        leaf = ctypes.CDLL(None).__getattr__("__x86_get_cpuid_feature_leaf")
    except (AttributeError, OSError):
        return set()
    leaf.restype = ctypes.POINTER(CpuidFeature)
    leaves = {number: leaf(number).contents.active for number in (0, 1, 6)}
    return {name for name, (number, register, bit) in X86_BITS.items() if leaves[number][register] >> bit & 1}


def arm_features() -> set[str]:
    """By HWCAP of the Linux kernel."""
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (AttributeError, OSError):
        return set()
    getauxval.restype = ctypes.c_ulong
    return {"asimddp"} if getauxval(ctypes.c_ulong(AT_HWCAP)) >> HWCAP_ASIMDDP & 1 else set()
