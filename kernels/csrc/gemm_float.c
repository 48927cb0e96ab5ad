/* GEMV and GEMM of float32 activations with float weights, and with `exact` integer weights, which are dequantized first.
 *
 * Columns go in steps of 32 to two accumulators of 16 lanes, ascending, whatever the number of token rows. */

#include "matmul.h"

#define FLOAT_TOKENS 3    /* token rows whose sums stay in registers, beside four weight rows */
#define FLOAT_ROWS 24    /* token rows that a block of weights is dequantized for */

/* acc [4][N][2] += four float32 weight rows times N token rows, over some steps of 32 columns. */
INLINE void float_tile(int N, const float *w, int64_t stride, const float *const *x, int64_t steps, vf *acc) {
    vf a[4][FLOAT_TOKENS][2];
    UNROLL
    for (int i = 0; i < 4; i++)
        UNROLL
        for (int t = 0; t < N; t++) a[i][t][0] = acc[(i * N + t) * 2], a[i][t][1] = acc[(i * N + t) * 2 + 1];
    for (int64_t c = 0; c < 32 * steps; c += 32)
        UNROLL
        for (int j = 0; j < 2; j++) {
            vf v[FLOAT_TOKENS];
            UNROLL
            for (int t = 0; t < N; t++) v[t] = vf_load(x[t] + c + 16 * j);
            UNROLL
            for (int i = 0; i < 4; i++) {
                vf u = vf_load(w + i * stride + c + 16 * j);
                UNROLL
                for (int t = 0; t < N; t++) a[i][t][j] = vf_fma(u, v[t], a[i][t][j]);
            }
        }
    UNROLL
    for (int i = 0; i < 4; i++)
        UNROLL
        for (int t = 0; t < N; t++) acc[(i * N + t) * 2] = a[i][t][0], acc[(i * N + t) * 2 + 1] = a[i][t][1];
}
static void float_tile_n(int N, const float *w, int64_t stride, const float *const *x, int64_t steps, vf *acc) {
    if (SPECIAL && N == 3) float_tile(3, w, stride, x, steps, acc);
    else if (SPECIAL && N == 2) float_tile(2, w, stride, x, steps, acc);
    else float_tile(SPECIAL ? 1 : N, w, stride, x, steps, acc);
}

/* Dot products of one float weight row with n token rows, without a float32 copy of it. */
INLINE vf load_as(int kind, const uint8_t *p, vf scale) {
    return kind == F32   ? vf_load((const float *)p)
           : kind == F16 ? vf_load_f16((const uint16_t *)p)
           : kind == FP8 ? vf_mul(load_fp8(p), scale) : vf_load_bf16((const uint16_t *)p);
}
INLINE int64_t bytes_of(int kind, int64_t columns) {
    return kind == MXFP4 ? columns / 2 : columns * (kind == F32 ? 4 : kind == FP8 ? 1 : 2);
}
INLINE void float_row(int kind, int n, const weight_t *w, int64_t row, const float *const *x, float *out) {
    const int64_t columns = w->columns, scales = (kind == FP8 ? row / 128 : row) * w->row_scales;
    const uint8_t *p = w->data + row * w->row_bytes;
    vf acc[GEMV_ROWS][2], scale = vf_zero();
    UNROLL
    for (int t = 0; t < n; t++) acc[t][0] = acc[t][1] = vf_zero();
    int64_t c = 0;
    for (; c + 32 <= columns; c += 32) {
        const uint8_t *at = p + bytes_of(kind, c);
        __builtin_prefetch(at + PAGE_AHEAD);
        if (kind == F32) __builtin_prefetch(at + PAGE_AHEAD + 64);
        if (kind == FP8 && c % 128 == 0) scale = vf_set1(scale_at(w, scales + c / 128));
        UNROLL
        for (int j = 0; j < 2; j++) {
            vf u = kind == MXFP4 ? load_mxfp4(at + 8 * j, scale_at(w, scales + c / 32))
                                 : load_as(kind, at + bytes_of(kind, 16 * j), scale);
            UNROLL
            for (int t = 0; t < n; t++) acc[t][j] = vf_fma(u, vf_load(x[t] + c + 16 * j), acc[t][j]);
        }
    }
    if (c < columns) { /* never with MXFP4, where columns come in groups of 32 */
        uint8_t last[128] = {0};
        memcpy(last, p + bytes_of(kind, c), (size_t)bytes_of(kind, columns - c));
        if (kind == FP8) scale = vf_set1(scale_at(w, scales + c / 128));
        for (int t = 0; t < n; t++) {
            float rest[32] = {0};
            memcpy(rest, x[t] + c, (size_t)(4 * (columns - c)));
            for (int j = 0; j < 2; j++)
                acc[t][j] = vf_fma(load_as(kind, last + bytes_of(kind, 16 * j), scale), vf_load(rest + 16 * j), acc[t][j]);
        }
    }
    for (int t = 0; t < n; t++) out[t] = vf_sum(vf_add(acc[t][0], acc[t][1]));
}
#define GEMV_KERNEL(name, kind)                                                                                        \
    static void name(int n, const weight_t *w, int64_t row, const float *const *x, float *out) {                        \
        if (SPECIAL && n == 1) float_row(kind, 1, w, row, x, out);                                                      \
        else if (SPECIAL && n == 2) float_row(kind, 2, w, row, x, out);                                                 \
        else if (SPECIAL && n == 3) float_row(kind, 3, w, row, x, out);                                                 \
        else float_row(kind, SPECIAL ? GEMV_ROWS : n, w, row, x, out);                                               \
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
            float scale = scale_at(w, row / 128 * w->row_scales + c / 128);
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
    int64_t padded = round_up(w->columns, 32);
    if (count < GEMM_ROWS && !is_integer(w->kind)) {
        void (*const by_kind[])(int, const weight_t *, int64_t, const float *const *, float *) = {
            gemv_f32, gemv_bf16, gemv_f16, gemv_fp8, gemv_mxfp4};
        const float *x[GEMM_ROWS];
        float sums[GEMV_ROWS];
        for (int64_t i = 0; i < count; i++) x[i] = in->x + rows[i] * in->x_stride;
        for (int64_t i = 0; i < count; i += GEMV_ROWS) {
            int n = count - i < GEMV_ROWS ? (int)(count - i) : GEMV_ROWS;
            for (int64_t r = row; r < stop; r++) {
                by_kind[w->kind](n, w, r, x + i, sums);
                for (int t = 0; t < n; t++) out[(i + t) * out_stride + r] = sums[t];
            }
        }
        return;
    }
    vf acc[ITEM_ROWS / 4][FLOAT_ROWS / FLOAT_TOKENS][4 * FLOAT_TOKENS * 2];
    for (int64_t first = 0; first < count; first += FLOAT_ROWS) {
        int64_t some = count - first < FLOAT_ROWS ? count - first : FLOAT_ROWS;
        for (int i = 0; 4 * i < stop - row; i++)
            for (int j = 0; FLOAT_TOKENS * j < some; j++)
                for (int l = 0; l < 4 * FLOAT_TOKENS * 2; l++) acc[i][j][l] = vf_zero();
        for (int64_t c = 0; c < padded; c += FLOAT_COLUMNS) {
            int64_t width = padded - c < FLOAT_COLUMNS ? padded - c : FLOAT_COLUMNS;
            for (int64_t r = row; r < stop; r += 4) {
                for (int i = 0; i < 4; i++) /* a row beyond the end repeats the last one */
                    dequantize(w, r + i < stop ? r + i : stop - 1, c, width, row_floats + i * FLOAT_COLUMNS);
                for (int64_t i = 0; i < some; i += FLOAT_TOKENS) {
                    int N = some - i < FLOAT_TOKENS ? (int)(some - i) : FLOAT_TOKENS;
                    const float *x[FLOAT_TOKENS];
                    for (int t = 0; t < N; t++) x[t] = in->x + rows[first + i + t] * in->x_stride + c;
                    float_tile_n(N, row_floats, FLOAT_COLUMNS, x, width / 32, acc[(r - row) / 4][i / FLOAT_TOKENS]);
                }
            }
        }
        for (int64_t r = row; r < stop; r++)
            for (int64_t i = 0; i < some; i++) {
                int64_t left = some - i / FLOAT_TOKENS * FLOAT_TOKENS, N = left < FLOAT_TOKENS ? left : FLOAT_TOKENS;
                vf *a = acc[(r - row) / 4][i / FLOAT_TOKENS] + ((r - row) % 4 * N + i % FLOAT_TOKENS) * 2;
                out[(first + i) * out_stride + r] = vf_sum(vf_add(a[0], a[1]));
            }
    }
}
