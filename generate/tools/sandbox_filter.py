"""The seccomp filter of the sandbox: system calls that no Python program needs, and that lead around its walls.

Only the standard library can be imported here: sandbox_child.py does.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable

# The processor's number for the kernel (AUDIT_ARCH), and which column of the table below is its own.
PROCESSORS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# name, number on x86_64, on aarch64; - where it does not exist
TABLE = """
unshare 272 97                  setns 308 268                   chroot 161 51                   pivot_root 155 41
mount 165 40                    umount2 166 39                  open_tree 428 428               move_mount 429 429
fsopen 430 430                  fsconfig 431 431                fsmount 432 432                 fspick 433 433
mount_setattr 442 442           open_by_handle_at 304 265       name_to_handle_at 303 264       fanotify_init 300 262
inotify_init 253 -              inotify_init1 294 26            memfd_create 319 279            memfd_secret 447 447
shmget 29 194                   shmat 30 196                    semget 64 190                   msgget 68 186
mq_open 240 180                 io_setup 206 0                  io_uring_setup 425 425          io_uring_enter 426 426
io_uring_register 427 427       userfaultfd 323 282             bpf 321 280                     perf_event_open 298 241
ptrace 101 117                  process_vm_readv 310 270        process_vm_writev 311 271       process_madvise 440 440
process_mrelease 448 448        kcmp 312 272                    pidfd_getfd 438 438             keyctl 250 219
add_key 248 217                 request_key 249 218             syslog 103 116                  lookup_dcookie 212 18
modify_ldt 154 -                iopl 172 -                      ioperm 173 -                    uselib 134 -
init_module 175 105             finit_module 313 273            delete_module 176 106           kexec_load 246 104
kexec_file_load 320 294         reboot 169 142                  swapon 167 224                  swapoff 168 225
acct 163 89                     quotactl 179 60                 quotactl_fd 443 443             settimeofday 164 170
clock_settime 227 112           adjtimex 159 171                clock_adjtime 305 266           sethostname 170 161
setdomainname 171 162           migrate_pages 256 238           move_pages 279 239              vhangup 153 58
clone 56 220                    clone3 435 435                  socket 41 198                   socketpair 53 199
setsockopt 54 208
"""
WORDS = TABLE.split()
NUMBERS = {name: pair for name, *pair in zip(WORDS[::3], WORDS[1::3], WORDS[2::3], strict=True)}
JUDGED = ("clone", "clone3", "socket", "socketpair", "setsockopt")  # by their arguments
DENIED = tuple(name for name in NUMBERS if name not in JUDGED)
LAST_KNOWN = 456  # futex_requeue; what later kernels bring is not there, and the C library does without
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW* of clone
FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6; others reach the host (vsock) or parts of the kernel that nobody needs

SOL_SOCKET = 1
BUFFER_OPTIONS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and the same by force, of SOL_SOCKET

LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # instructions of BPF
KILL, ERROR, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
NUMBER, PROCESSOR, ARGUMENT = 0, 4, 16  # offsets in what the filter sees
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def number_of(name: str) -> int | None:
    """The number of a system call on this processor. OSError where its numbers are not known here."""
    _, column = processor()
    text = NUMBERS[name][column]
    return None if text == "-" else int(text)


def processor() -> tuple[int, int]:
    machine = platform.machine()
    if machine not in PROCESSORS:
        raise OSError(errno.ENOSYS, f"no filter of system calls for a processor {machine}")
    return PROCESSORS[machine]


def build_filter(denied: Iterable[str] = DENIED) -> bytes:
    """A program of BPF: 8 bytes an instruction, jumps count the instructions to skip."""
    audit, _ = processor()
    program = [(LOAD, 0, 0, PROCESSOR), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    # The numbers of x32, a second set on x86_64, lie above too.
    program += [(GREATER, 0, 1, LAST_KNOWN), (RETURN, 0, 0, ERROR | errno.ENOSYS)]
    # Its flags lie in memory, which no filter sees; told that it does not exist, the C library takes clone.
    program += answer("clone3", [(RETURN, 0, 0, ERROR | errno.ENOSYS)])
    for name in denied:
        program += answer(name, [(RETURN, 0, 0, ERROR | errno.EPERM)])
    flags = [(LOAD, 0, 0, ARGUMENT), (ANY_BIT, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, ERROR | errno.EPERM)]
    program += answer("clone", [*flags, (RETURN, 0, 0, ALLOW)])
    known = [(EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)]
    family = [(LOAD, 0, 0, ARGUMENT), *known, (RETURN, 0, 0, ERROR | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    program += answer("socket", family) + answer("socketpair", family)
    # Sizes of buffers stay what sandbox_walls.py counts. The answer is 0: the kernel too takes less than asked.
    sizes = [(EQUAL, len(BUFFER_OPTIONS) - at, 0, option) for at, option in enumerate(BUFFER_OPTIONS)]
    level = [(LOAD, 0, 0, ARGUMENT + 8), (EQUAL, 0, len(sizes) + 1, SOL_SOCKET), (LOAD, 0, 0, ARGUMENT + 16)]
    program += answer("setsockopt", [*level, *sizes, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR)])
    return b"".join(struct.pack("HBBI", *instruction) for instruction in [*program, (RETURN, 0, 0, ALLOW)])


def answer(name: str, instructions: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """The instructions for one system call, skipped by all others."""
    number = number_of(name)
    return [] if number is None else [(EQUAL, 0, len(instructions), number), *instructions]


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def install_filter(program: bytes) -> None:
    """For the calling thread and all that it starts, for ever. It must have given up new privileges."""
    libc = ctypes.CDLL(None, use_errno=True)
    argument = FilterProgram(len(program) // 8, program)
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(argument), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls (seccomp)")
