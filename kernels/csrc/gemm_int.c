/* GEMM of quantized activations (dynamic int8) with integer weights: tiles of 32 weight rows times many token rows. The
 * same sums in the same order as in gemv_int.c. */

#include "matmul.h"

INLINE float *scales_of_tile(const uint8_t *tile, int64_t columns) {
    return (float *)(tile + tile_stride(columns) * TILE_ROWS);
}

INLINE vb unpack_segment(int kind, const uint8_t *p) { /* the 64 codes of a segment in the order of `gemm_codes`, unsigned */
    if (kind == INT8) return vb_xor(vb_load(p), INT8_OFFSET);
    if (kind == INT4) return vb_nibbles(p);
    return kind == INT3 ? unpack_int3(p) : unpack_int2(p);
}

/* Segment `s` of a weight row. A last, partial one is filled with zero bytes, which meet activations that are zero. */
static __attribute__((noinline)) vb unpack_row_segment(int kind, const weight_t *w, int64_t row, int64_t s) {
    int bytes = segment_bytes(kind);
    const uint8_t *p = w->data + row * w->row_bytes + s * bytes;
    uint8_t last[64] = {0};
    if ((s + 1) * bytes > packed_row_bytes(kind, w->columns)) {
        memcpy(last, p, (size_t)(packed_row_bytes(kind, w->columns) - s * bytes));
        p = last;
    }
    return unpack_segment(kind, p);
}

/* The scales of 32 weight rows from `row`: [blocks * 16][32], zero beyond the end. */
static __attribute__((noinline)) void unpack_tile_scales(const weight_t *w, int64_t row, int64_t blocks, float *scales) {
    for (int64_t b = 0; b < blocks; b++)
        for (int half = 0; half < 2; half++) {
            vi r[16];
            for (int i = 0; i < 16; i++) {
                int64_t at = row + 16 * half + i;
                vf x = at < w->rows ? block_scales(w, at, b) : vf_zero();
                memcpy(&r[i], &x, 64);
            }
            vi_transpose(r);
            for (int i = 0; i < 16; i++) vi_store((int32_t *)(scales + (b * 16 + i) * TILE_ROWS + 16 * half), r[i]);
        }
}

#ifdef AVX512AMX
#include "amx.h"
INLINE int64_t tokens_at_once(int64_t left) { return left < TILE_TOKENS ? left : TILE_TOKENS; }
#else
#define TILE_TOKENS 6 /* token rows whose sums stay in registers, with one half of the tile or both: */
#ifdef AVX2
#define HALVES 1
#else
#define HALVES 2
#endif
/* Each of these numbers has code of its own. */
INLINE int64_t tokens_at_once(int64_t left) { return left >= TILE_TOKENS ? TILE_TOKENS : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

/* 32 weight rows from `row` -> tile [segments][2][16][64 bytes], for 4 columns at a time those of 16 rows; scales as of
 * unpack_tile_scales. Rows beyond the end are zero. */
INLINE void unpack_tile(int kind, const weight_t *w, int64_t row, int64_t blocks, uint8_t *tile, float *scales) {
    const int64_t columns = w->columns, segments = (columns + SEGMENT - 1) / SEGMENT, row_bytes = w->row_bytes;
    const int64_t whole = packed_row_bytes(kind, columns) / segment_bytes(kind), left = w->rows - row;
    const uint8_t *from = w->data + row * row_bytes;
    for (int64_t s = 0; s < segments; s++)
        for (int half = 0; half < 2; half++) {
            vi r[16];
            for (int64_t i = 0; i < 16; i++) {
                int64_t at = 16 * half + i;
                vb codes;
                if (at >= left) {
                    r[i] = vi_zero();
                    continue;
                }
                if (s < whole) codes = unpack_segment(kind, from + at * row_bytes + s * segment_bytes(kind));
                else codes = unpack_row_segment(kind, w, row + at, s);
                memcpy(&r[i], &codes, 64);
            }
            vi_transpose(r);
            for (int i = 0; i < 16; i++) vi_store((int32_t *)(tile + ((s * 2 + half) * 16 + i) * 64), r[i]);
        }
    unpack_tile_scales(w, row, blocks, scales);
}

/* Token rows rows[first ...], `n` of them, times a tile -> out [n][32]. */
INLINE void multiply_tile(int kind, int n, const uint8_t *tile, const float *scales, int64_t columns, const quantized_t *a,
                       const int64_t *rows, int64_t first, float out[][TILE_ROWS]) {
    int64_t segments = (columns + SEGMENT - 1) / SEGMENT, padded = a->padded / SEGMENT;
    rows += first;
    vf chains[TILE_TOKENS][2][16];
    memset(chains, 0, sizeof chains);
    for (int64_t s = 0; s < segments; s++)
        for (int first_half = 0; first_half < 2; first_half += HALVES) {
            vi acc[TILE_TOKENS][HALVES];
            const int32_t *x[TILE_TOKENS];
            UNROLL
            for (int t = 0; t < n; t++) {
                x[t] = (const int32_t *)(a->gemm_codes + rows[t] * a->padded + s * SEGMENT);
                for (int h = 0; h < HALVES; h++) acc[t][h] = vi_set1(-a->sums[rows[t] * padded + s]);
            }
            const uint8_t *w = tile + s * 2048 + first_half * 1024;
            for (int k = 0; k < 16; k += 8) {
                vi p[TILE_TOKENS][HALVES];
                UNROLL
                for (int t = 0; t < n; t++)
                    for (int h = 0; h < HALVES; h++) p[t][h] = kind == INT8 ? acc[t][h] : dot15_start(acc[t][h]);
                for (int j = k; j < k + 8; j++) {
                    vb codes[HALVES];
                    for (int h = 0; h < HALVES; h++) codes[h] = vb_load(w + 1024 * h + 64 * j);
                    UNROLL
                    for (int t = 0; t < n; t++) {
                        vi four = vi_set1(x[t][j]);
                        vb b;
                        memcpy(&b, &four, 64);
                        for (int h = 0; h < HALVES; h++)
                            p[t][h] = kind == INT8 ? dot(p[t][h], codes[h], b) : dot15(p[t][h], codes[h], b);
                    }
                }
                UNROLL
                for (int t = 0; t < n; t++)
                    for (int h = 0; h < HALVES; h++) acc[t][h] = kind == INT8 ? p[t][h] : dot15_end(acc[t][h], p[t][h]);
            }
            for (int h = 0; h < HALVES; h++) {
                vf scale = vf_load(scales + s * TILE_ROWS + 16 * (first_half + h));
                UNROLL
                for (int t = 0; t < n; t++) {
                    vf *c = &chains[t][first_half + h][s % 16];
                    *c = vf_fma(vf_of(acc[t][h]), vf_mul(scale, vf_set1(a->scales[rows[t] * padded + s])), *c);
                }
            }
        }
    UNROLL
    for (int t = 0; t < n; t++)
        UNROLL
        for (int half = 0; half < 2; half++) {
            vf *c = chains[t][half];
            UNROLL
            for (int m = 8; m; m /= 2)
                UNROLL
                for (int i = 0; i < m; i++) c[i] = vf_add(c[i], c[i + m]);
            vf_store(out[t] + 16 * half, c[0]);
        }
}
#endif

#define GEMM_KERNEL(name, kind)                                                                                         \
    static void name##_unpack(const weight_t *w, int64_t row, int64_t blocks, uint8_t *tile, float *scales) {             \
        unpack_tile(kind, w, row, blocks, tile, scales);                                                                  \
    }                                                                                                                   \
    static void name(int n, const uint8_t *tile, const float *scales, int64_t columns, const quantized_t *a,                 \
                     const int64_t *rows, int64_t first, float out[][TILE_ROWS]) {                                      \
        if (SPECIAL && n == TILE_TOKENS) multiply_tile(kind, TILE_TOKENS, tile, scales, columns, a, rows, first, out);       \
        else if (SPECIAL && n == 4) multiply_tile(kind, 4, tile, scales, columns, a, rows, first, out);                   \
        else if (SPECIAL && n == 2) multiply_tile(kind, 2, tile, scales, columns, a, rows, first, out);                   \
        else multiply_tile(kind, SPECIAL ? 1 : n, tile, scales, columns, a, rows, first, out);                            \
    }
GEMM_KERNEL(gemm_int8, INT8)
GEMM_KERNEL(gemm_int4, INT4)
GEMM_KERNEL(gemm_int3, INT3)
GEMM_KERNEL(gemm_int2, INT2)

typedef struct {
    void (*unpack)(const weight_t *, int64_t, int64_t, uint8_t *, float *);
    void (*multiply)(int, const uint8_t *, const float *, int64_t, const quantized_t *, const int64_t *, int64_t,
                 float[][TILE_ROWS]);
} tile_kernels_t;
static const tile_kernels_t BY_KIND[] = {
    {gemm_int8_unpack, gemm_int8},
    {gemm_int4_unpack, gemm_int4},
    {gemm_int3_unpack, gemm_int3},
    {gemm_int2_unpack, gemm_int2},
};

void gemm_int(const weight_t *w, const quantized_t *a, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
              int64_t out_stride, uint8_t *scratch) {
    const tile_kernels_t *k = &BY_KIND[w->kind - INT8];
    int64_t blocks = a->padded / BLOCK_COLUMNS, bytes = tile_bytes(w->columns);
    float sums[TILE_TOKENS][TILE_ROWS];
    for (int64_t r = row; r < stop; r += TILE_ROWS) {
        uint8_t *tile = scratch + (r - row) / TILE_ROWS * bytes;
        k->unpack(w, r, blocks, tile, scales_of_tile(tile, w->columns));
    }
    for (int64_t i = 0, m; i < count; i += m) {
        m = tokens_at_once(count - i);
        for (int64_t r = row; r < stop; r += TILE_ROWS) {
            const uint8_t *tile = scratch + (r - row) / TILE_ROWS * bytes;
            int64_t n = stop - r < TILE_ROWS ? stop - r : TILE_ROWS;
            k->multiply((int)m, tile, scales_of_tile(tile, w->columns), w->columns, a, rows, i, sums);
            for (int64_t t = 0; t < m; t++) memcpy(out + (i + t) * out_stride + r, sums[t], (size_t)(4 * n));
        }
    }
}
