/* GEMV and GEMM of float32 activations with float weights, and with `exact` integer weights, which are dequantized first.
 *
 * Columns go to an accumulator of 16 lanes, ascending, whatever the number of token rows. */

#include "float_tile.h"
#include "matmul.h"

#define FLOAT_TOKENS 48  /* token rows that a block of weights is dequantized for */

/* Dot products of R float weight rows with n token rows, without a float32 copy of the weights. */
INLINE vf load_as(int kind, const uint8_t *p, vf scale) {
    return kind == F32   ? vf_load((const float *)p)
           : kind == F16 ? vf_load_f16((const uint16_t *)p)
           : kind == FP8 ? vf_mul(load_fp8(p), scale) /* times 256 */
                         : vf_load_bf16((const uint16_t *)p);
}
INLINE int64_t bytes_of(int kind, int64_t columns) {
    return kind == MXFP4 ? columns / 2 : columns * (kind == F32 ? 4 : kind == FP8 ? 1 : 2);
}
INLINE void float_rows(int kind, int R, int n, const weight_t *w, int64_t row, const float *const *x, float *out,
                       int64_t out_stride) {
    const int64_t columns = w->columns, ahead = R > 1 ? R * w->row_bytes : PAGE_AHEAD; /* the next rows, or this one */
    vf acc[GEMV_ROWS][GEMV_ROWS], scale[GEMV_ROWS];
    UNROLL
    for (int i = 0; i < R; i++)
        UNROLL
        for (int t = 0; t < n; t++) acc[i][t] = vf_zero();
    for (int64_t c = 0; c < columns; c += 32) {
        const int is_last = c + 32 > columns; /* never with MXFP4, where columns come in groups of 32 */
        float rest[GEMV_ROWS][32];
        if (is_last)
            for (int t = 0; t < n; t++) {
                memset(rest[t], 0, sizeof rest[t]);
                memcpy(rest[t], x[t] + c, (size_t)(4 * (columns - c)));
            }
        UNROLL
        for (int i = 0; i < R; i++) {
            const uint8_t *at = w->data + (row + i) * w->row_bytes + bytes_of(kind, c);
            uint8_t last[128];
            if (is_last) {
                memset(last, 0, sizeof last);
                memcpy(last, at, (size_t)bytes_of(kind, columns - c)), at = last;
            } else {
                __builtin_prefetch(at + ahead);
                if (kind == F32) __builtin_prefetch(at + ahead + 64);
            }
            if (kind == FP8 && c % 128 == 0) scale[i] = vf_set1(256 * scale_at(w, (row + i) / 128 * w->row_scales + c / 128));
            UNROLL
            for (int j = 0; j < 2; j++) {
                vf u = kind == MXFP4 ? load_mxfp4(at + 8 * j, scale_at(w, (row + i) * w->row_scales + c / 32))
                                     : load_as(kind, at + bytes_of(kind, 16 * j), scale[i]);
                UNROLL
                for (int t = 0; t < n; t++)
                    acc[i][t] = vf_fma(u, vf_load((is_last ? rest[t] : x[t] + c) + 16 * j), acc[i][t]);
            }
        }
    }
    for (int i = 0; i < R; i++)
        for (int t = 0; t < n; t++) out[t * out_stride + row + i] = vf_sum(acc[i][t]);
}
/* Weight rows row .. stop: a chain of sums for each is too slow where few token rows share it. */
INLINE void gemv_float(int kind, int n, const weight_t *w, int64_t row, int64_t stop, const float *const *x, float *out,
                       int64_t out_stride) {
    const int R = !SPECIAL || n > 2 ? 1 : n == 2 ? 2 : 4;
    for (; row + R <= stop; row += R) float_rows(kind, R, n, w, row, x, out, out_stride);
    for (; row < stop; row++) float_rows(kind, 1, n, w, row, x, out, out_stride);
}
#define GEMV_KERNEL(name, kind)                                                                                        \
    static void name(int n, const weight_t *w, int64_t row, int64_t stop, const float *const *x, float *out,            \
                     int64_t out_stride) {                                                                              \
        if (SPECIAL && n == 1) gemv_float(kind, 1, w, row, stop, x, out, out_stride);                                   \
        else if (SPECIAL && n == 2) gemv_float(kind, 2, w, row, stop, x, out, out_stride);                              \
        else if (SPECIAL && n == 3) gemv_float(kind, 3, w, row, stop, x, out, out_stride);                              \
        else gemv_float(kind, SPECIAL ? GEMV_ROWS : n, w, row, stop, x, out, out_stride);                               \
    }
GEMV_KERNEL(gemv_f32, F32)
GEMV_KERNEL(gemv_bf16, BF16)
GEMV_KERNEL(gemv_f16, F16)
GEMV_KERNEL(gemv_fp8, FP8)
GEMV_KERNEL(gemv_mxfp4, MXFP4)

/* Columns from .. from + count of a row as float32, zero beyond the end of the row. */
void dequantize(const weight_t *w, int64_t row, int64_t from, int64_t count, float *out) {
    const uint8_t *p = w->data + row * w->row_bytes;
    int64_t stop = from + count < w->columns ? from + count : w->columns, c = from;
    out -= from;
    if (w->kind == BF16)
        for (; c + 16 <= stop; c += 16) vf_store(out + c, vf_load_bf16((const uint16_t *)p + c));
    if (w->kind == F16)
        for (; c + 16 <= stop; c += 16) vf_store(out + c, vf_load_f16((const uint16_t *)p + c));
    if (w->kind == F32)
        for (; c + 16 <= stop; c += 16) vf_store(out + c, vf_load((const float *)p + c));
    if (w->kind == FP8)
        for (; c + 16 <= stop; c += 16) {
            float scale = 256 * scale_at(w, row / 128 * w->row_scales + c / 128);
            vf_store(out + c, vf_mul(load_fp8(p + c), vf_set1(scale)));
        }
    if (w->kind == MXFP4)
        for (; c + 16 <= stop; c += 16) vf_store(out + c, load_mxfp4(p + c / 2, scale_at(w, row * w->row_scales + c / 32)));
    if (is_integer(w->kind) && !is_odd_group(w))
        for (; c + SEGMENT <= stop; c += SEGMENT) {
            float scale = scale_at(w, row * w->row_scales + c / w->group);
            vf v[4];
            load_segment(w->kind, p + c / SEGMENT * segment_bytes(w->kind), scale, v);
            for (int i = 0; i < 4; i++) vf_store(out + c + 16 * i, v[i]);
        }
    for (; c < stop; c++) {
        if (w->kind == F32) {
            out[c] = ((const float *)p)[c];
        } else if (w->kind == BF16) {
            out[c] = bits_f32((uint32_t)((const uint16_t *)p)[c] << 16);
        } else if (w->kind == F16) {
            out[c] = f16_f32(((const uint16_t *)p)[c]);
        } else if (w->kind == FP8) {
            out[c] = fp8_f32(p[c]) * scale_at(w, row / 128 * w->row_scales + c / 128);
        } else if (w->kind == MXFP4) {
            out[c] = FLOAT4[p[c / 2] >> 4 * (c % 2) & 15] * scale_at(w, row * w->row_scales + c / 32);
        } else {
            out[c] = (float)code_at(w->kind, p, c) * scale_at(w, row * w->row_scales + c / w->group);
        }
    }
    for (; c < from + count; c++) out[c] = 0.0f;
}

void gemm_float(const weight_t *w, const input_t *in, const int64_t *rows, int64_t count, int64_t row, int64_t stop,
                float *out, int64_t out_stride, float *row_floats) {
    if (count < GEMM_ROWS && !is_integer(w->kind)) {
        void (*const by_kind[])(int, const weight_t *, int64_t, int64_t, const float *const *, float *, int64_t) = {
            gemv_f32, gemv_bf16, gemv_f16, gemv_fp8, gemv_mxfp4};
        const float *x[GEMM_ROWS];
        for (int64_t i = 0; i < count; i++) x[i] = in->x + rows[i] * in->x_stride;
        for (int64_t i = 0; i < count; i += GEMV_ROWS)
            by_kind[w->kind](count - i < GEMV_ROWS ? (int)(count - i) : GEMV_ROWS, w, row, stop, x + i,
                             out + i * out_stride, out_stride);
        return;
    }
    enum { BLOCK = 2 * DOT_B, BLOCKS = (ITEM_ROWS + BLOCK - 1) / BLOCK };
    vf acc[2 * BLOCKS][FLOAT_TOKENS * DOT_B];
    int64_t padded = round_up(w->columns, 16);
    for (int64_t first = 0; first < count; first += FLOAT_TOKENS) {
        int64_t some = count - first < FLOAT_TOKENS ? count - first : FLOAT_TOKENS;
        memset(acc, 0, sizeof acc);
        for (int64_t c = 0; c < padded; c += FLOAT_COLUMNS) {
            int64_t width = padded - c < FLOAT_COLUMNS ? padded - c : FLOAT_COLUMNS;
            for (int64_t r = row, block = 0; r < stop; r += BLOCK, block += 2) {
                const float *weights[BLOCK];
                for (int i = 0; i < BLOCK; i++) { /* a row beyond the end repeats the last one */
                    weights[i] = row_floats + (r + i < stop ? i : stop - 1 - r) * FLOAT_COLUMNS;
                    if (r + i < stop) dequantize(w, r + i, c, width, row_floats + i * FLOAT_COLUMNS);
                }
                for (int64_t i = 0, A; i < some; i += A) {
                    const float *x[DOT_A];
                    A = some - i < DOT_A ? 1 : DOT_A;
                    for (int t = 0; t < A; t++) x[t] = in->x + rows[first + i + t] * in->x_stride + c;
                    for (int half = 0; half < 2; half++) {
                        vf *sums = acc[block + half] + i * DOT_B;
                        if (A == DOT_A) dot_tile(DOT_A, x, weights + half * DOT_B, width, sums);
                        else dot_tile(1, x, weights + half * DOT_B, width, sums);
                    }
                }
            }
        }
        for (int64_t i = 0; i < some; i++)
            for (int64_t r = row; r < stop; r += DOT_B) {
                float sums[1][4];
                dot_sums(1, acc[(r - row) / DOT_B] + i * DOT_B, sums);
                memcpy(out + (first + i) * out_stride + r, sums, (size_t)(4 * (stop - r < DOT_B ? stop - r : DOT_B)));
            }
    }
}
