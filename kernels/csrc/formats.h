/* Byte layouts of the weight formats: scales, single values, unpacking of codes, `dequantize` (docs/formats.md). */
#pragma once
#include "colibri.h"
#include "simd.h"

#define SEGMENT 64
#define BLOCK_COLUMNS 1024 /* 16 segments */
#define SCALES_AHEAD 1024
#define PAGE_AHEAD 6144    /* prefetch distance in bytes */

INLINE int is_integer(int kind) { return kind >= INT8; }
/* What is added to a code to make it unsigned. */
#ifdef SIGNED_INT8
#define INT8_OFFSET 0
#else
#define INT8_OFFSET 128
#endif
INLINE int offset_of(int kind) { return kind == INT8 ? INT8_OFFSET : kind == INT4 ? 8 : kind == INT3 ? 4 : 2; }
INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
INLINE int64_t block_bytes(int kind) { return kind == INT8 ? 1024 : kind == INT4 ? 512 : kind == INT3 ? 384 : 256; }
/* Bytes of a row of an integer format; the next row may begin later. */
INLINE int64_t packed_row_bytes(int kind, int64_t columns) {
    return kind == INT8   ? columns
           : kind == INT4 ? round_up(columns, 2) / 2
           : kind == INT2 ? round_up(columns, 4) / 4 : round_up(columns, 64) / 64 * 24;
}
INLINE int segment_bytes(int kind) { return (int)(block_bytes(kind) / 16); }

/* NaN counts as the largest, so that it is selected and noticed. */
INLINE float nan_as_infinity(float x) { return x == x ? x : INFINITY; }

INLINE float scale_at(const weight_t *w, int64_t i) {
    if (w->scale_kind == F32) return ((const float *)w->scales)[i];
    if (w->scale_kind == E8M0) {
        uint32_t exponent = ((const uint8_t *)w->scales)[i];
        return bits_f32(exponent ? exponent << 23 : 1u << 22); /* 2^-127 is subnormal */
    }
    uint16_t h = ((const uint16_t *)w->scales)[i];
    return w->scale_kind == F16 ? f16_f32(h) : bits_f32((uint32_t)h << 16);
}
INLINE int is_odd_group(const weight_t *w) { return w->group < w->columns && w->group % SEGMENT; }
INLINE int64_t groups_of(const weight_t *w) { return (w->columns + w->group - 1) / w->group; }

INLINE float fp8_f32(uint8_t b) {
    float x = (b & 127) == 127 ? NAN : bits_f32((uint32_t)(b & 127) << 20) * 0x1p120f;
    return b & 128 ? -x : x;
}

/* 16 values in E4M3 / 256: exponent and mantissa moved to their places in a float16, whose exponent has a bias greater by 8,
 * subnormal numbers included. 127 is NaN. */
INLINE vf load_fp8(const uint8_t *p) {
#if defined(AVX512VNNI) || defined(AVX512) || defined(AVX2)
    __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    h = _mm256_and_si256(h, _mm256_set1_epi16((int16_t)0xbf80));
    __m256i magnitude = _mm256_and_si256(h, _mm256_set1_epi16(0x3f80));
    h = _mm256_or_si256(h, _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80)));
#ifdef AVX2
    return PAIR(vf, _mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)));
#else
    return _mm512_cvtph_ps(h);
#endif
#else
    uint16_t h[16];
    for (int i = 0; i < 16; i++) {
        int magnitude = p[i] & 127;
        h[i] = (uint16_t)((p[i] & 128) << 8 | (magnitude == 127 ? 0x7fff : magnitude << 7));
    }
    return vf_load_f16(h);
#endif
}

/* E2M1, two to a byte, the lower half first: the values of 16 columns times a scale. */
static const float FLOAT4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
INLINE vf load_mxfp4(const uint8_t *p, float scale) {
#if defined(AVX512VNNI) || defined(AVX512)
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i pair = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    vf table = _mm512_mul_ps(_mm512_loadu_ps(FLOAT4), _mm512_set1_ps(scale));
    __m512i lanes = _mm512_permutexvar_epi32(pair, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p)));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(lanes, shifts), table); /* the lowest four bits of a lane count */
#elif defined(AVX2)
    const __m128i values = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), mask = _mm_set1_epi8(15);
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), high), twice = _mm_shuffle_epi8(values, codes);
    __m256i sign = _mm256_set1_epi32(INT32_MIN);
    __m256 by = _mm256_set1_ps(0.5f), out[2];
    for (int i = 0; i < 2; i++) { /* -0 has its sign from the code */
        __m256i lanes = _mm256_cvtepu8_epi32(i ? _mm_srli_si128(codes, 8) : codes);
        __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(i ? _mm_srli_si128(twice, 8) : twice)), by);
        x = _mm256_or_ps(x, _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(lanes, 28), sign)));
        out[i] = _mm256_mul_ps(x, _mm256_set1_ps(scale));
    }
    return PAIR(vf, out[0], out[1]);
#else
    float out[16];
    for (int i = 0; i < 16; i++) out[i] = FLOAT4[p[i / 2] >> 4 * (i % 2) & 15] * scale;
    return vf_load(out);
#endif
}

INLINE int code_at(int kind, const uint8_t *p, int64_t c) {
    if (kind == INT8) return (int8_t)p[c];
    if (kind == INT4) return (p[c / 2] >> 4 * (c % 2) & 15) - 8;
    if (kind == INT2) return (p[c / 4] >> 2 * (c % 4) & 3) - 2;
    const uint8_t *g = p + c / 64 * 24;
    int i = (int)(c % 64);
    return (g[i / 4] >> 2 * (i % 4) & 3) + 4 * (g[16 + i / 8] >> i % 8 & 1) - 4;
}

/* The 64 codes of a segment, signed, in the order of the columns. */
INLINE void codes_in_order(int kind, const uint8_t *p, int8_t *out) {
    if (kind == INT8) memcpy(out, p, SEGMENT);
    if (kind == INT4)
        for (int i = 0; i < 32; i++) out[2 * i] = (int8_t)((p[i] & 15) - 8), out[2 * i + 1] = (int8_t)((p[i] >> 4) - 8);
    if (kind == INT2 || kind == INT3)
        for (int i = 0; i < SEGMENT; i++) out[i] = (int8_t)code_at(kind, p, i);
}

/* A segment of a row times its scale, as four vectors. */
INLINE void load_segment(int kind, const uint8_t *p, float scale, vf *out) {
#if defined(AVX512VNNI) || defined(AVX512)
    if (kind == INT4) { /* the 16 values a nibble may have, looked up: the index is the lowest four bits of a lane */
        const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        const __m512i pair = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        vf table = _mm512_mul_ps(values, _mm512_set1_ps(scale));
        __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p));
        UNROLL
        for (int i = 0; i < 4; i++) {
            __m512i lanes = _mm512_permutexvar_epi32(_mm512_add_epi32(pair, _mm512_set1_epi32(2 * i)), bytes);
            out[i] = _mm512_permutexvar_ps(_mm512_srlv_epi32(lanes, shifts), table);
        }
        return;
    }
#elif defined(AVX2)
    if (kind == INT4) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)p), mask = _mm256_set1_epi8(15);
        __m256i low = _mm256_and_si256(bytes, mask), high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
        __m256i codes[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
        __m256 by = _mm256_set1_ps(scale);
        UNROLL
        for (int i = 0; i < 4; i++) { /* columns 0..15 and 32..47 are in the first, the others in the second */
            __m256i deinterleave = _mm256_sub_epi8(codes[i % 2], _mm256_set1_epi8(8));
            __m128i lane = i < 2 ? _mm256_castsi256_si128(deinterleave) : _mm256_extracti128_si256(deinterleave, 1);
            out[i].a = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(lane)), by);
            out[i].b = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(lane, 8))), by);
        }
        return;
    }
#endif
    int8_t codes[SEGMENT];
    codes_in_order(kind, p, codes);
    for (int i = 0; i < 4; i++) out[i] = vf_mul(vf_load_i8(codes + 16 * i), vf_set1(scale));
}

/* 16 bytes -> 64 codes of two bits: columns 0, 4, 8 ..., then 1, 5, 9 ... */
INLINE vb unpack_int2(const uint8_t *p) {
#if defined(AVX512VNNI) || defined(AVX512)
    const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    return vb_and(_mm512_srlv_epi32(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)), shifts), 3);
#elif defined(AVX2)
    __m256i d = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2);
    return vb_and(PAIR(vb, _mm256_srlv_epi32(d, shifts), _mm256_srlv_epi32(_mm256_srli_epi32(d, 4), shifts)), 3);
#else
    uint64_t d[2];
    uint8_t out[64];
    memcpy(d, p, 16);
    for (int s = 0; s < 4; s++)
        for (int h = 0; h < 2; h++) {
            uint64_t codes = d[h] >> 2 * s & 0x0303030303030303u;
            memcpy(out + 16 * s + 8 * h, &codes, 8);
        }
    return vb_load(out);
#endif
}

/* 24 bytes -> 64 codes: two bits of each as above, then the high ones. Those of columns 4i .. 4i + 3 are half a byte: of
 * each byte one bit goes to the code of an even i, one to the next. */
INLINE vb unpack_int3(const uint8_t *p) {
    vb low = unpack_int2(p);
#if defined(AVX512VNNI) || defined(AVX512)
    const __m512i bits = _mm512_setr_epi32(0x10011001, 0x10011001, 0x10011001, 0x10011001, 0x20022002, 0x20022002,
                                           0x20022002, 0x20022002, 0x40044004, 0x40044004, 0x40044004, 0x40044004,
                                           0x80088008, 0x80088008, 0x80088008, 0x80088008);
    const __m512i twice = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7));
    __m512i high = _mm512_broadcast_i32x4(_mm_loadl_epi64((const __m128i *)(p + 16)));
    __mmask64 set = _mm512_test_epi8_mask(_mm512_shuffle_epi8(high, twice), bits);
    return _mm512_mask_add_epi8(low, set, low, _mm512_set1_epi8(4));
#elif defined(AVX2)
    const __m256i four = _mm256_set1_epi8(4);
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7));
    __m256i high = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadl_epi64((const __m128i *)(p + 16))), twice);
    __m256i out[2] = {low.a, low.b};
    for (int i = 0; i < 2; i++) { /* bits s and s + 4 of s = 0 and 1, then 2 and 3 */
        const int32_t even = i ? 0x40044004 : 0x10011001, odd = i ? (int32_t)0x80088008 : 0x20022002;
        const __m256i bits = _mm256_setr_epi32(even, even, even, even, odd, odd, odd, odd);
        __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(high, bits), bits);
        out[i] = _mm256_or_si256(out[i], _mm256_and_si256(set, four));
    }
    return PAIR(vb, out[0], out[1]);
#else
    uint64_t codes[8];
    uint32_t high[2];
    vb_store((uint8_t *)codes, low), memcpy(high, p + 16, 8);
    for (int h = 0; h < 2; h++) {
        /* 32 bits of high codes -> 8 bytes with half a byte each */
        uint64_t x = high[h];
        x = (x | x << 16) & 0x0000ffff0000ffffu;
        x = (x | x << 8) & 0x00ff00ff00ff00ffu;
        x = (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
        for (int s = 0; s < 4; s++) codes[2 * s + h] |= (x >> s & 0x0101010101010101u) << 2;
    }
    return vb_load((const uint8_t *)codes);
#endif
}

/* The scales of the 16 segments of a block of a row, zero beyond the end. */
static __attribute__((noinline)) vf block_scales(const weight_t *w, int64_t row, int64_t block) {
    int64_t segments = (w->columns + SEGMENT - 1) / SEGMENT, at = block * 16, n = segments - at;
    if (w->group >= w->columns) return vf_set1(scale_at(w, row * w->row_scales));
    if (w->group == SEGMENT && w->scale_kind == F32) return vf_load_n((const float *)w->scales + row * w->row_scales + at, n);
    if (w->group == SEGMENT && w->scale_kind == F16) {
        const uint16_t *p = (const uint16_t *)w->scales + row * w->row_scales + at;
        return n >= 16 ? vf_load_f16(p) : vf_load_f16_n(p, n);
    }
    float out[16] = {0};
    for (int64_t i = 0; i < 16 && i < n; i++) out[i] = scale_at(w, row * w->row_scales + (at + i) * SEGMENT / w->group);
    return vf_load(out);
}

/* Columns from .. from + count of a row as float32, zero beyond the end of the row. */
void dequantize(const weight_t *w, int64_t row, int64_t from, int64_t count, float *out);
