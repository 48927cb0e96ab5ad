/* The door of the library. */
#include "colibri.h"
#include "pool.h"
#ifdef AVX512AMX
#define AVX512VNNI
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023 /* of asm/prctl.h */
#define XFEATURE_XTILEDATA 18
#endif
#if defined(NEONDOT) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORT __attribute__((visibility("default")))
extern const kernels_t JOIN(kernels_, NAME);

/* The kernels, or NULL where this processor lacks the instructions they were compiled for. */
EXPORT const kernels_t *colibri_kernels(void) {
#if defined(AVX512VNNI) || defined(AVX512) || defined(AVX2)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
#endif
#if defined(AVX512VNNI) || defined(AVX512)
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) return 0;
#endif
#if defined(AVX512VNNI)
    if (!__builtin_cpu_supports("avx512vnni")) return 0;
#endif
#if defined(AVX512AMX)
    /* Linux lets a process use tiles after it has asked. */
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return 0;
#endif
#if defined(NEONDOT) && defined(__linux__)
    if (!(getauxval(AT_HWCAP) & HWCAP_ASIMDDP)) return 0;
#endif
    return &JOIN(kernels_, NAME);
}

EXPORT void colibri_set_threads(int threads) { set_threads(threads); }

/* Sizes of the structs, so that the Python side can check that it mirrors them. */
EXPORT int colibri_size(int i) {
    const int sizes[] = {sizeof(weight_t), sizeof(linear_t), sizeof(experts_t), sizeof(mlp_t), sizeof(add_t),
                         sizeof(mla_t), sizeof(grouped_t), sizeof(index_t), sizeof(top_t), sizeof(norm_t), sizeof(rotate_t),
                         sizeof(route_t), sizeof(group_t), sizeof(logprobs_t), sizeof(values_t), sizeof(kernels_t)};
    return i >= 0 && i < (int)(sizeof sizes / sizeof *sizes) ? sizes[i] : 0;
}
