/* processor_is_able: does this processor, with the system on it, run the instruction set that this file is compiled for?
 *
 * Asked of the processor itself: __builtin_cpu_supports says no to everything in a library that zig has linked. */
#pragma once
#if defined(AVXVNNI) && !defined(AVX2)
#define AVX2
#endif
#if defined(AVX512VNNI) || defined(AVX512) || defined(AVX2) || defined(AVX512AMX)
#include <cpuid.h>
#endif
#ifdef AVX512AMX
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023 /* of asm/prctl.h */
#define XFEATURE_XTILEDATA 18
#endif
#if defined(NEONDOT) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

#if defined(AVX512VNNI) || defined(AVX512) || defined(AVX2) || defined(AVX512AMX)
#define ALL(word, bits) (((word) & (bits)) == (bits))

/* Bits of CPUID, and of XCR0: the registers that the system saves for a process. */
#define LEAF1_ECX (1u << 12 | 1u << 27 | 1u << 28 | 1u << 29)   /* FMA, OSXSAVE, AVX, F16C */
#define AVX2_EBX (1u << 5)
#define AVX512_EBX (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31)  /* F, DQ, BW, VL */
#define VNNI_ECX (1u << 11)
#define GFNI_ECX (1u << 8)
#define AMX_EDX (1u << 24 | 1u << 25)                           /* TILE, INT8 */
#define AVXVNNI_EAX (1u << 4)                                   /* of leaf 7.1 */
#define XCR0_AVX 0x6u
#define XCR0_AVX512 0xe6u
#define XCR0_AMX 0x60000u

static int processor_is_able(void) {
    unsigned a, b, c, d, saved, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !ALL(c, LEAF1_ECX)) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!ALL(saved, XCR0_AVX)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !ALL(b, AVX2_EBX)) return 0;
#ifndef AVX2
    if (!ALL(b, AVX512_EBX) || !ALL(saved, XCR0_AVX512)) return 0;
#endif
#if defined(AVX512VNNI) || defined(AVX512AMX)
    if (!ALL(c, VNNI_ECX)) return 0;
#endif
#ifdef AVX512AMX
    if (!ALL(c, GFNI_ECX) || !ALL(d, AMX_EDX) || !ALL(saved, XCR0_AMX)) return 0;
    /* Linux lets a process use AMX tiles after a request. */
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return 0;
#endif
#ifdef AVXVNNI
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !ALL(a, AVXVNNI_EAX)) return 0;
#endif
    return 1;
}
#elif defined(NEONDOT) && defined(__linux__)
static int processor_is_able(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#else
static int processor_is_able(void) { return 1; }
#endif
