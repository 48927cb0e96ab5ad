/* SIMD vectors of 16 lanes, the same on every processor: floats, int32 and 64 bytes.
 *
 * Every kernel is written once against these few operations. A lane always does the same arithmetic in the same order
 * (fused multiply-add included), so results are equal bit by bit whichever instruction set runs them.
 *
 * One of AVX512AMX, AVX512VNNI, AVX512, AVX2, NEONDOT, NEON or none (plain C) is defined by the build for each copy of
 * the kernels. AVX512AMX is AVX512VNNI and GFNI, and AMX tiles for GEMM (amx.h).
 */
#pragma once
#ifdef AVX512AMX
#define AVX512VNNI
#endif
#ifdef AVXVNNI
#define AVX2
#endif
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Loops over arrays of registers must be unrolled. Plain C has no registers of 16 lanes, and unrolled it would take a
 * minute to compile: there only the general form of a kernel is compiled. */
#if defined(AVX512VNNI) || defined(AVX512) || defined(AVX2) || defined(NEONDOT) || defined(NEON)
#define UNROLL _Pragma("GCC unroll 16")
#define SPECIAL 1
#else
#define UNROLL
#define SPECIAL 0
#endif

/* r[0 .. n): transpose each 4 x 4 block of int32, one in each 128 bits of four vectors, by way of t[n]. */
#define TRANSPOSE_4X4(mm, n, r, t)                                                                                      \
    for (int i = 0; i < n; i += 2)                                                                                      \
        t[i] = mm##_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = mm##_unpackhi_epi32(r[i], r[i + 1]);                     \
    for (int i = 0; i < n; i += 4) {                                                                                    \
        r[i] = mm##_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = mm##_unpackhi_epi64(t[i], t[i + 2]);                     \
        r[i + 2] = mm##_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = mm##_unpackhi_epi64(t[i + 1], t[i + 3]);         \
    }

INLINE float bits_f32(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE float f16_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return bits_f32(sign | 0x7f800000 | rest << 13); /* infinity and NaN */
    return bits_f32(sign) + bits_f32(sign | rest << 13) * 0x1p112f;     /* subnormal numbers come out right too */
}

#if defined(AVX512VNNI) || defined(AVX512)
#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;

/* One register of a vector, for loops that keep as many sums in registers as there are. */
typedef __m512 vr;
#define REGISTERS 1
INLINE vr vr_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vr_store(float *p, vr x) { _mm512_storeu_ps(p, x); }
INLINE vr vr_set1(float x) { return _mm512_set1_ps(x); }
INLINE vr vr_fma(vr a, vr b, vr c) { return _mm512_fmadd_ps(a, b, c); }

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf vf_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf vf_of(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vi_round(vf a) { return _mm512_cvtps_epi32(a); } /* half to even */
INLINE vf vf_bits(vi a) { return _mm512_castsi512_ps(a); }

INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_load(const int32_t *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(int32_t *p, vi a) { _mm512_storeu_si512(p, a); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE void vi_store_i8(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }

INLINE vb vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE void vb_store(uint8_t *p, vb a) { _mm512_storeu_si512(p, a); }
INLINE vb vb_and(vb a, uint8_t mask) { return _mm512_and_si512(a, _mm512_set1_epi8((char)mask)); }
INLINE vb vb_xor(vb a, uint8_t mask) { return _mm512_xor_si512(a, _mm512_set1_epi8((char)mask)); }
#define vb_shift(a, bits) _mm512_srli_epi16(a, bits) /* bits of the neighbor come in: mask them off */

/* acc + products of unsigned and signed bytes, four to a lane; with SIGNED_INT8 of signed bytes. */
INLINE vi dot(vi acc, vb u, vb s) {
#ifdef AVX512VNNI
    return _mm512_dpbusd_epi32(acc, u, s);
#else
    /* Pairs are added with 16 bits: split bytes above 127 off, so that none overflows. */
    vb low = _mm512_and_si512(u, _mm512_set1_epi8(127));
    vb high = _mm512_and_si512(_mm512_srli_epi16(u, 7), _mm512_set1_epi8(1));
    vi a = _mm512_madd_epi16(_mm512_maddubs_epi16(low, s), _mm512_set1_epi16(1));
    vi b = _mm512_madd_epi16(_mm512_maddubs_epi16(high, s), _mm512_set1_epi16(128));
    return _mm512_add_epi32(acc, _mm512_add_epi32(a, b));
#endif
}

/* The same for unsigned bytes up to 15, up to eight times in a row:
 *     p = dot15_start(acc); p = dot15(p, u, s); ... acc = dot15_end(acc, p)
 * Where pairs are added with 16 bits first, that is done for all of them. */
#ifdef AVX512VNNI
#define dot15 dot
#define dot15_start(acc) (acc)
#define dot15_end(acc, p) (p)
#else
#define dot15_start(acc) vi_zero()
INLINE vi dot15(vi p, vb u, vb s) { return _mm512_add_epi16(p, _mm512_maddubs_epi16(u, s)); }
INLINE vi dot15_end(vi acc, vi p) { return _mm512_add_epi32(acc, _mm512_madd_epi16(p, _mm512_set1_epi16(1))); }
#endif

/* Four vectors -> one whose 128 bits at each place hold the sums of the four lanes there of v[0], v[1], v[2], v[3].
 * small: no sum of two lanes is beyond 16 bits, so two vectors go into one and pairs are added by one instruction. */
INLINE vi four_sums(const vi *v, int small) {
    if (small) {
        const __m512i ones = _mm512_set1_epi16(1);
        vi p0 = _mm512_madd_epi16(_mm512_packs_epi32(v[0], v[1]), ones);
        vi p1 = _mm512_madd_epi16(_mm512_packs_epi32(v[2], v[3]), ones);
        return _mm512_madd_epi16(_mm512_packs_epi32(p0, p1), ones);
    }
    vi p0 = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    vi p1 = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(p0, p1), _mm512_unpackhi_epi64(p0, p1));
}

/* Sums of 16 vectors -> one vector, lane k the sum of v[k]. small: no sum of two lanes is beyond 16 bits. */
INLINE vi vi_sums(const vi *v, int small) {
    vi q[4];
    for (int i = 0; i < 4; i++) q[i] = four_sums(v + 4 * i, small);
    vi r0 = _mm512_add_epi32(_mm512_shuffle_i32x4(q[0], q[1], 0x88), _mm512_shuffle_i32x4(q[0], q[1], 0xdd));
    vi r1 = _mm512_add_epi32(_mm512_shuffle_i32x4(q[2], q[3], 0x88), _mm512_shuffle_i32x4(q[2], q[3], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(r0, r1, 0x88), _mm512_shuffle_i32x4(r0, r1, 0xdd));
}

/* Half sums of 8 vectors, small ones: lane 2k the sum of the lower half of v[k], lane 2k + 1 of the upper half. */
INLINE vi vi_half_sums(const vi *v) {
    vi q0 = four_sums(v, 1), q1 = four_sums(v + 4, 1);
    vi r = _mm512_add_epi32(_mm512_shuffle_i32x4(q0, q1, 0x88), _mm512_shuffle_i32x4(q0, q1, 0xdd));
    const vi order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return _mm512_permutexvar_epi32(order, r);
}

/* Quarter sums of 4 vectors, small ones: lane 4k + j the sum of quarter j of v[k]. */
INLINE vi vi_quarter_sums(const vi *v) {
    const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, four_sums(v, 1));
}

/* Transpose 16 vectors of 16 int32. */
INLINE void vi_transpose(vi *r) {
    vi t[16];
    TRANSPOSE_4X4(_mm512, 16, r, t)
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* 32 bytes of nibbles -> 64 bytes: the low nibbles, then the high ones. */
INLINE vb vb_nibbles(const uint8_t *p) {
    __m256i d = _mm256_loadu_si256((const __m256i *)p);
    const __m256i mask = _mm256_set1_epi8(15);
    __m256i low = _mm256_and_si256(d, mask), high = _mm256_and_si256(_mm256_srli_epi16(d, 4), mask);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

INLINE float vf_max_of(vf a) { return _mm512_reduce_max_ps(a); }

#elif defined(AVX2)
#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef vi vb;

typedef __m256 vr;
#define REGISTERS 2
INLINE vr vr_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vr_store(float *p, vr x) { _mm256_storeu_ps(p, x); }
INLINE vr vr_set1(float x) { return _mm256_set1_ps(x); }
INLINE vr vr_fma(vr a, vr b, vr c) { return _mm256_fmadd_ps(a, b, c); }

/* The compiler knows nothing of the value from here on: it is computed once, here, and stays in a register. */
#define IN_REGISTER(x) __asm__("" : "+x"(x))

#define PAIR(T, x, y) ((T){x, y})
INLINE vf vf_zero(void) { return PAIR(vf, _mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE vf vf_set1(float x) { return PAIR(vf, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE vf vf_load(const float *p) { return PAIR(vf, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE vf vf_add(vf x, vf y) { return PAIR(vf, _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE vf vf_sub(vf x, vf y) { return PAIR(vf, _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
INLINE vf vf_mul(vf x, vf y) { return PAIR(vf, _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE vf vf_div(vf x, vf y) { return PAIR(vf, _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
INLINE vf vf_fma(vf x, vf y, vf z) {
    return PAIR(vf, _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
INLINE vf vf_max(vf x, vf y) { return PAIR(vf, _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE vf vf_abs(vf x) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return PAIR(vf, _mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask));
}
INLINE vf vf_load_f16(const uint16_t *p) {
    return PAIR(vf, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE __m256 bf16x8(const uint16_t *p) {
    __m256i row_floats = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(row_floats, 16));
}
INLINE vf vf_load_bf16(const uint16_t *p) { return PAIR(vf, bf16x8(p), bf16x8(p + 8)); }
INLINE __m256 i8x8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vf vf_load_i8(const int8_t *p) { return PAIR(vf, i8x8(p), i8x8(p + 8)); }
INLINE vf vf_of(vi x) { return PAIR(vf, _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
INLINE vi vi_round(vf x) { return PAIR(vi, _mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); }
INLINE vf vf_bits(vi x) { return PAIR(vf, _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)); }

INLINE vi vi_zero(void) { return PAIR(vi, _mm256_setzero_si256(), _mm256_setzero_si256()); }
INLINE vi vi_set1(int32_t x) { return PAIR(vi, _mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE vi vi_load(const int32_t *p) {
    return PAIR(vi, _mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8)));
}
INLINE void vi_store(int32_t *p, vi x) {
    _mm256_storeu_si256((__m256i *)p, x.a), _mm256_storeu_si256((__m256i *)(p + 8), x.b);
}
INLINE vi vi_add(vi x, vi y) { return PAIR(vi, _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)); }
INLINE vi vi_sub(vi x, vi y) { return PAIR(vi, _mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)); }
INLINE void vi_store_i8(int8_t *p, vi x) {
    int32_t lanes[16];
    vi_store(lanes, x);
    for (int i = 0; i < 16; i++) p[i] = (int8_t)lanes[i];
}

INLINE vb vb_load(const uint8_t *p) { return vi_load((const int32_t *)p); }
INLINE void vb_store(uint8_t *p, vb x) { vi_store((int32_t *)p, x); }
INLINE vb vb_and(vb x, uint8_t mask) {
    const __m256i m = _mm256_set1_epi8((char)mask);
    return PAIR(vb, _mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m));
}
INLINE vb vb_xor(vb x, uint8_t mask) {
    const __m256i m = _mm256_set1_epi8((char)mask);
    return PAIR(vb, _mm256_xor_si256(x.a, m), _mm256_xor_si256(x.b, m));
}
#define vb_shift(x, bits) PAIR(vb, _mm256_srli_epi16((x).a, bits), _mm256_srli_epi16((x).b, bits))

#ifdef AVXVNNI
INLINE __m256i dot32(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
#else
#define SIGNED_INT8 /* the first factor is signed too: magnitudes times signs, so that two products fit 16 bits */
INLINE __m256i dot32(__m256i acc, __m256i w, __m256i s) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(s, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
INLINE vi dot(vi acc, vb u, vb s) { return PAIR(vi, dot32(acc.a, u.a, s.a), dot32(acc.b, u.b, s.b)); }
#ifdef AVXVNNI
#define dot15 dot
#define dot15_start(acc) (acc)
#define dot15_end(acc, p) (p)
#else
#define dot15_start(acc) vi_zero()
/* In assembly: compilers compute all products first and add them then, with more registers than there are. */
INLINE __m256i add_words(__m256i p, __m256i x) {
    __asm__("vpaddw %1, %0, %0" : "+x"(p) : "x"(x));
    return p;
}
#define dot15_first(u, s) PAIR(vi, _mm256_maddubs_epi16((u).a, (s).a), _mm256_maddubs_epi16((u).b, (s).b))
INLINE vi dot15(vi p, vb u, vb s) {
    return PAIR(vi, add_words(p.a, _mm256_maddubs_epi16(u.a, s.a)), add_words(p.b, _mm256_maddubs_epi16(u.b, s.b)));
}
INLINE vi dot15_end(vi acc, vi p) {
    const __m256i ones = _mm256_set1_epi16(1);
    return PAIR(vi, _mm256_add_epi32(acc.a, _mm256_madd_epi16(p.a, ones)),
                _mm256_add_epi32(acc.b, _mm256_madd_epi16(p.b, ones)));
}
#endif

/* Four vectors -> one whose halves hold the sums of the four lanes there of a, b, c, d. */
INLINE __m256i four_sums(__m256i a, __m256i b, __m256i c, __m256i d, int small) {
    if (small) {
        const __m256i ones = _mm256_set1_epi16(1);
        __m256i p0 = _mm256_madd_epi16(_mm256_packs_epi32(a, b), ones);
        __m256i p1 = _mm256_madd_epi16(_mm256_packs_epi32(c, d), ones);
        return _mm256_madd_epi16(_mm256_packs_epi32(p0, p1), ones);
    }
    return _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
}
/* The lower halves of x and y, and the upper ones, added. */
INLINE __m256i halves(__m256i x, __m256i y) {
    return _mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20), _mm256_permute2x128_si256(x, y, 0x31));
}
INLINE __m256i whole(vi x) { return _mm256_add_epi32(x.a, x.b); }
INLINE vi vi_sums(const vi *v, int small) {
    __m256i q[4];
    for (int i = 0; i < 4; i++)
        q[i] = four_sums(whole(v[4 * i]), whole(v[4 * i + 1]), whole(v[4 * i + 2]), whole(v[4 * i + 3]), small);
    return PAIR(vi, halves(q[0], q[1]), halves(q[2], q[3]));
}
INLINE vi vi_half_sums(const vi *v) {
    __m256i q[4];
    for (int i = 0; i < 4; i++) q[i] = four_sums(v[2 * i].a, v[2 * i].b, v[2 * i + 1].a, v[2 * i + 1].b, 1);
    return PAIR(vi, halves(q[0], q[1]), halves(q[2], q[3]));
}
/* Lane 4k + j is quarter j of v[k]: of v[k].a the lower half, the upper half, the same of v[k].b. */
INLINE vi vi_quarter_sums(const vi *v) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i x = four_sums(v[0].a, v[0].b, v[1].a, v[1].b, 1), y = four_sums(v[2].a, v[2].b, v[3].a, v[3].b, 1);
    return PAIR(vi, _mm256_permutevar8x32_epi32(x, order), _mm256_permutevar8x32_epi32(y, order));
}
INLINE void transpose8(__m256i *r) {
    __m256i t[8];
    TRANSPOSE_4X4(_mm256, 8, r, t)
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    memcpy(r, t, sizeof t);
}
INLINE void vi_transpose(vi *r) {
    __m256i q[4][8];
    for (int i = 0; i < 8; i++) q[0][i] = r[i].a, q[1][i] = r[i].b, q[2][i] = r[i + 8].a, q[3][i] = r[i + 8].b;
    for (int i = 0; i < 4; i++) transpose8(q[i]);
    for (int i = 0; i < 8; i++) r[i] = PAIR(vi, q[0][i], q[2][i]), r[i + 8] = PAIR(vi, q[1][i], q[3][i]);
}
INLINE vb vb_nibbles(const uint8_t *p) {
    __m256i d = _mm256_loadu_si256((const __m256i *)p);
    const __m256i mask = _mm256_set1_epi8(15);
    return PAIR(vb, _mm256_and_si256(d, mask), _mm256_and_si256(_mm256_srli_epi16(d, 4), mask));
}
INLINE float vf_max_of(vf x) {
    float lanes[16];
    vf_store(lanes, x);
    float most = lanes[0];
    for (int i = 1; i < 16; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

#elif defined(NEONDOT) || defined(NEON)
#include "simd_neon.h"

#else /* plain C: the definition, and what compilers turn into the vectors of other processors */

typedef struct { float x[16]; } vf;
typedef struct { int32_t x[16]; } vi;
typedef struct { uint8_t x[64]; } vb;

#define LANES(T, expr) T r; for (int i = 0; i < 16; i++) r.x[i] = (expr); return r
INLINE vf vf_zero(void) { LANES(vf, 0); }
INLINE vf vf_set1(float a) { LANES(vf, a); }
INLINE vf vf_load(const float *p) { LANES(vf, p[i]); }
INLINE void vf_store(float *p, vf a) { memcpy(p, a.x, 64); }
INLINE vf vf_add(vf a, vf b) { LANES(vf, a.x[i] + b.x[i]); }
INLINE vf vf_sub(vf a, vf b) { LANES(vf, a.x[i] - b.x[i]); }
INLINE vf vf_mul(vf a, vf b) { LANES(vf, a.x[i] * b.x[i]); }
INLINE vf vf_div(vf a, vf b) { LANES(vf, a.x[i] / b.x[i]); }
INLINE vf vf_fma(vf a, vf b, vf c) { LANES(vf, fmaf(a.x[i], b.x[i], c.x[i])); }
typedef vf vr;
#define REGISTERS 1
#define vr_load vf_load
#define vr_store vf_store
#define vr_set1 vf_set1
#define vr_fma vf_fma
INLINE vf vf_max(vf a, vf b) { LANES(vf, a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
INLINE vf vf_abs(vf a) { LANES(vf, fabsf(a.x[i])); }
INLINE vf vf_load_f16(const uint16_t *p) { LANES(vf, f16_f32(p[i])); }
INLINE vf vf_load_bf16(const uint16_t *p) { LANES(vf, bits_f32((uint32_t)p[i] << 16)); }
INLINE vf vf_load_i8(const int8_t *p) { LANES(vf, p[i]); }
INLINE vf vf_of(vi a) { LANES(vf, (float)a.x[i]); }
INLINE vi vi_round(vf a) { LANES(vi, (int32_t)lrintf(a.x[i])); }
INLINE vf vf_bits(vi a) { LANES(vf, bits_f32((uint32_t)a.x[i])); }
INLINE vi vi_zero(void) { LANES(vi, 0); }
INLINE vi vi_set1(int32_t a) { LANES(vi, a); }
INLINE vi vi_load(const int32_t *p) { LANES(vi, p[i]); }
INLINE void vi_store(int32_t *p, vi a) { memcpy(p, a.x, 64); }
INLINE vi vi_add(vi a, vi b) { LANES(vi, a.x[i] + b.x[i]); }
INLINE vi vi_sub(vi a, vi b) { LANES(vi, a.x[i] - b.x[i]); }
INLINE void vi_store_i8(int8_t *p, vi a) { for (int i = 0; i < 16; i++) p[i] = (int8_t)a.x[i]; }
INLINE vb vb_load(const uint8_t *p) { vb r; memcpy(r.x, p, 64); return r; }
INLINE void vb_store(uint8_t *p, vb a) { memcpy(p, a.x, 64); }
#define BYTES(expr) vb r; for (int i = 0; i < 64; i++) r.x[i] = (uint8_t)(expr); return r
INLINE vb vb_and(vb a, uint8_t mask) { BYTES(a.x[i] & mask); }
INLINE vb vb_xor(vb a, uint8_t mask) { BYTES(a.x[i] ^ mask); }
INLINE vb vb_shift(vb a, int bits) { BYTES(a.x[i] >> bits); }
INLINE vi dot(vi acc, vb u, vb s) {
    for (int i = 0; i < 64; i++) acc.x[i / 4] += u.x[i] * (int8_t)s.x[i];
    return acc;
}
#define dot15 dot
#define dot15_start(acc) (acc)
#define dot15_end(acc, p) (p)
INLINE int32_t sum_of(const vi *v, int from, int count) {
    int32_t sum = 0;
    for (int i = from; i < from + count; i++) sum += v->x[i];
    return sum;
}
INLINE vi vi_sums(const vi *v, int small) { (void)small; LANES(vi, sum_of(v + i, 0, 16)); }
INLINE vi vi_half_sums(const vi *v) { LANES(vi, sum_of(v + i / 2, i % 2 * 8, 8)); }
INLINE vi vi_quarter_sums(const vi *v) { LANES(vi, sum_of(v + i / 4, i % 4 * 4, 4)); }
INLINE void vi_transpose(vi *r) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < i; j++) {
            int32_t x = r[i].x[j];
            r[i].x[j] = r[j].x[i], r[j].x[i] = x;
        }
}
INLINE vb vb_nibbles(const uint8_t *p) { BYTES(i < 32 ? p[i] & 15 : p[i - 32] >> 4); }
INLINE float vf_max_of(vf a) {
    float most = a.x[0];
    for (int i = 1; i < 16; i++) most = a.x[i] > most ? a.x[i] : most;
    return most;
}
#endif

#ifndef IN_REGISTER
#define IN_REGISTER(x)
#endif
#ifndef dot15_first /* dot15 after dot15_start(zero) */
#define dot15_first(u, s) dot15(vi_zero(), u, s)
#endif

/* The sum of 16 lanes, in one fixed order: lane i and i + 8, then i + 4, i + 2, the last two. */
INLINE float vf_sum(vf a) {
#if defined(AVX512VNNI) || defined(AVX512) || defined(AVX2)
#ifdef AVX2
    __m256 x = _mm256_add_ps(a.a, a.b);
#else
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
#endif
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
#elif defined(NEONDOT) || defined(NEON)
    float32x4_t x = vaddq_f32(vaddq_f32(a.a, a.c), vaddq_f32(a.b, a.d));
    return vpadds_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x)));
#else
    float x[16];
    vf_store(x, a);
    for (int n = 8; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
#endif
}

/* out[i] = vf_sum(v[i]), i < 4. */
INLINE void vf_sums4(const vf *v, float *out) {
#if defined(AVX512VNNI) || defined(AVX512) || defined(AVX2)
    __m128 y[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
#ifdef AVX2
        __m256 x = _mm256_add_ps(v[i].a, v[i].b);
#else
        __m256 x = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
#endif
        y[i] = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    }
    __m128 a = _mm_add_ps(_mm_movelh_ps(y[0], y[1]), _mm_movehl_ps(y[1], y[0]));
    __m128 b = _mm_add_ps(_mm_movelh_ps(y[2], y[3]), _mm_movehl_ps(y[3], y[2]));
    _mm_storeu_ps(out, _mm_add_ps(_mm_shuffle_ps(a, b, 0x88), _mm_shuffle_ps(a, b, 0xdd)));
#else
    for (int i = 0; i < 4; i++) out[i] = vf_sum(v[i]);
#endif
}

/* The upper four bits of each byte. */
INLINE vb vb_upper(vb a) {
#ifdef AVX512AMX
    return _mm512_gf2p8affine_epi64_epi8(a, _mm512_set1_epi64(0x1020408000000000), 0); /* bit i is bit i + 4 */
#else
    return vb_and(vb_shift(a, 4), 15);
#endif
}

/* The first n lanes or bytes, the others zero; what lies beyond is neither read nor written. */
#if defined(AVX512VNNI) || defined(AVX512)
INLINE uint64_t first_bits(int64_t n) { return n >= 64 ? ~(uint64_t)0 : n > 0 ? ((uint64_t)1 << n) - 1 : 0; }
INLINE vf vf_load_n(const float *p, int64_t n) { return _mm512_maskz_loadu_ps((__mmask16)first_bits(n), p); }
INLINE void vf_store_n(float *p, vf a, int64_t n) { _mm512_mask_storeu_ps(p, (__mmask16)first_bits(n), a); }
INLINE vf vf_load_f16_n(const uint16_t *p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)first_bits(n), p));
}
INLINE vb vb_load_n(const uint8_t *p, int64_t n) { return _mm512_maskz_loadu_epi8(first_bits(n), p); }
#else
INLINE vf vf_load_n(const float *p, int64_t n) {
    float x[16] = {0};
    if (n >= 16) return vf_load(p);
    memcpy(x, p, 4 * n);
    return vf_load(x);
}
INLINE void vf_store_n(float *p, vf a, int64_t n) {
    float x[16];
    vf_store(x, a);
    memcpy(p, x, 4 * n);
}
INLINE vf vf_load_f16_n(const uint16_t *p, int64_t n) {
    uint16_t x[16] = {0};
    memcpy(x, p, 2 * n);
    return vf_load_f16(x);
}
INLINE vb vb_load_n(const uint8_t *p, int64_t n) {
    uint8_t x[64] = {0};
    if (n >= 64) return vb_load(p);
    if (n > 0) memcpy(x, p, n);
    return vb_load(x);
}
#endif

/* e^x for x <= 0: 2^n times a polynomial. Relative error below 2e-7. */
INLINE vf vf_exp_negative(vf x) {
    x = vf_max(vf_set1(-87.0f), x);
    vi n = vi_round(vf_mul(x, vf_set1(1.44269504f)));
    vf f = vf_of(n), r = vf_fma(f, vf_set1(-0.693359375f), x);
    r = vf_fma(f, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    const float c[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1, 1};
    for (int i = 0; i < 7; i++) p = vf_fma(p, r, vf_set1(c[i]));
    int32_t bits[16];
    vi_store(bits, n);
    for (int i = 0; i < 16; i++) bits[i] = (int32_t)((uint32_t)(bits[i] + 127) << 23); /* of NaN anything */
    return vf_mul(p, vf_bits(vi_load(bits)));
}

/* silu(g) * u = g / (1 + e^-g) * u, without overflow on either side. */
INLINE vf swiglu(vf g, vf u) {
    vf e = vf_exp_negative(vf_sub(vf_zero(), vf_abs(g)));
    vf positive = vf_div(vf_set1(1), vf_add(vf_set1(1), e)); /* 1 / (1 + e^-|g|) */
    vf high = vf_max(g, vf_zero()), low = vf_sub(g, high);   /* g = high + low, one of them zero */
    vf gated = vf_fma(high, positive, vf_mul(low, vf_mul(e, positive)));
    return vf_mul(gated, u);
}

/* (u + 1) g / (1 + e^(-alpha g)), g at most `limit`, u between -limit and limit; alpha > 0. What is no number stays so. */
INLINE vf clamped_swiglu(vf g, vf u, float limit, float alpha) {
    vf zero = vf_zero(), least = vf_set1(-limit);
    g = vf_sub(zero, vf_max(least, vf_sub(zero, g)));
    u = vf_sub(zero, vf_max(least, vf_sub(zero, vf_max(least, u))));
    vf e = vf_exp_negative(vf_sub(zero, vf_abs(vf_mul(g, vf_set1(alpha)))));
    vf positive = vf_div(vf_set1(1), vf_add(vf_set1(1), e));
    vf high = vf_max(g, zero), low = vf_sub(g, high);
    vf gated = vf_fma(high, positive, vf_mul(low, vf_mul(e, positive)));
    return vf_mul(vf_add(u, vf_set1(1)), gated);
}
