/* Tiles of float32 products whose sums stay in registers: dot products of rows, and weighted sums of rows.
 *
 * Each sum has one order, whatever the number of rows beside it. A dot product: 16 lanes, columns ascending, then vf_sum. A
 * weighted sum: rows ascending. */
#pragma once
#include "formats.h"

#if defined(AVX512VNNI) || defined(AVX512)
#define DOT_A 4      /* rows of either side in a tile of dot products */
#define DOT_B 4
#define SUM_ROWS 8   /* weighted sums in a tile */
#define STRIP 32     /* their columns */
#else
#define DOT_A 2
#define DOT_B 3
#define SUM_ROWS 6
#define STRIP 16
#endif
#define LANES_EACH (16 / REGISTERS)
#define STRIP_REGISTERS (STRIP / LANES_EACH)

/* sums [A][DOT_B] += the products of A rows a and DOT_B rows b in `width` columns, a multiple of 16. */
INLINE void dot_tile(int A, const float *const *a, const float *const *b, int64_t width, vf *sums) {
    vr acc[DOT_A][DOT_B][REGISTERS];
    UNROLL
    for (int i = 0; i < A; i++)
        UNROLL
        for (int j = 0; j < DOT_B; j++) memcpy(acc[i][j], &sums[i * DOT_B + j], 64);
    for (int64_t c = 0; c < width; c += 16)
        UNROLL
        for (int r = 0; r < REGISTERS; r++) {
            vr x[DOT_A];
            UNROLL
            for (int i = 0; i < A; i++) x[i] = vr_load(a[i] + c + r * LANES_EACH);
            UNROLL
            for (int j = 0; j < DOT_B; j++) {
                vr y = vr_load(b[j] + c + r * LANES_EACH);
                IN_REGISTER(y); /* not loaded again for each product: there are fewer load ports than that */
                UNROLL
                for (int i = 0; i < A; i++) acc[i][j][r] = vr_fma(x[i], y, acc[i][j][r]);
            }
        }
    UNROLL
    for (int i = 0; i < A; i++)
        UNROLL
        for (int j = 0; j < DOT_B; j++) memcpy(&sums[i * DOT_B + j], acc[i][j], 64);
}

/* The sums over the lanes of sums [A][DOT_B] -> out [A][4], the first DOT_B of each. */
INLINE void dot_sums(int A, const vf *sums, float out[][4]) {
    UNROLL
    for (int i = 0; i < A; i++) {
        vf row[4];
        UNROLL
        for (int j = 0; j < 4; j++) row[j] = sums[i * DOT_B + (j < DOT_B ? j : DOT_B - 1)];
        vf_sums4(row, out[i]);
    }
}

/* out[i * out_stride + j] = scale * (row i of a . b[j]): rows of `width` floats, those of a a_stride apart. The rows b should
 * fit into the L1 cache. */
static void dot_rows(int64_t rows, const float *a, int64_t a_stride, int64_t others, const float *const *b, int64_t width,
                     float scale, float *out, int64_t out_stride) {
    for (int64_t i = 0; i < rows;) {
        int A = rows - i < DOT_A ? 1 : DOT_A;
        const float *x[DOT_A];
        for (int k = 0; k < A; k++) x[k] = a + (i + k) * a_stride;
        for (int64_t j = 0; j < others; j += DOT_B) {
            const float *y[DOT_B];
            int n = others - j < DOT_B ? (int)(others - j) : DOT_B;
            for (int k = 0; k < DOT_B; k++) y[k] = b[j + (k < n ? k : n - 1)];
            vf sums[DOT_A * DOT_B];
            float dots[DOT_A][4];
            UNROLL
            for (int k = 0; k < DOT_A * DOT_B; k++) sums[k] = vf_zero();
            if (A == DOT_A) dot_tile(DOT_A, x, y, width, sums), dot_sums(DOT_A, sums, dots);
            else dot_tile(1, x, y, width, sums), dot_sums(1, sums, dots);
            for (int k = 0; k < A; k++)
                for (int l = 0; l < n; l++) out[(i + k) * out_stride + j + l] = dots[k][l] * scale;
        }
        i += A;
    }
}

/* acc [M][STRIP] += weights [M][n] times n rows. */
INLINE void sum_tile(int M, const float *weights, int64_t weights_stride, int64_t n, const float *rows, int64_t row_stride,
                     float *acc, int64_t acc_stride) {
    vr s[SUM_ROWS][STRIP_REGISTERS];
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
        for (int r = 0; r < STRIP_REGISTERS; r++) s[m][r] = vr_load(acc + m * acc_stride + r * LANES_EACH);
    for (int64_t i = 0; i < n; i++) {
        vr x[STRIP_REGISTERS];
        UNROLL
        for (int r = 0; r < STRIP_REGISTERS; r++) x[r] = vr_load(rows + i * row_stride + r * LANES_EACH);
        UNROLL
        for (int m = 0; m < M; m++) {
            vr by = vr_set1(weights[m * weights_stride + i]);
            UNROLL
            for (int r = 0; r < STRIP_REGISTERS; r++) s[m][r] = vr_fma(by, x[r], s[m][r]);
        }
    }
    UNROLL
    for (int m = 0; m < M; m++)
        UNROLL
        for (int r = 0; r < STRIP_REGISTERS; r++) vr_store(acc + m * acc_stride + r * LANES_EACH, s[m][r]);
}

/* acc [count][strips * STRIP] += weights [count][n] times n rows, row_stride apart, whose strips are strip_stride apart. */
static void sum_rows(int64_t count, const float *weights, int64_t weights_stride, int64_t n, const float *rows,
                     int64_t row_stride, int64_t strips, int64_t strip_stride, float *acc, int64_t acc_stride) {
    for (int64_t s = 0; s < strips; s++, rows += strip_stride, acc += STRIP) {
        const float *p = weights;
        float *sums = acc;
        int64_t m = count;
        for (; m >= SUM_ROWS; m -= SUM_ROWS, p += SUM_ROWS * weights_stride, sums += SUM_ROWS * acc_stride)
            sum_tile(SUM_ROWS, p, weights_stride, n, rows, row_stride, sums, acc_stride);
        for (; m >= 2; m -= 2, p += 2 * weights_stride, sums += 2 * acc_stride)
            sum_tile(2, p, weights_stride, n, rows, row_stride, sums, acc_stride);
        if (m) sum_tile(1, p, weights_stride, n, rows, row_stride, sums, acc_stride);
    }
}

/* Columns from .. from + strips * STRIP of a row, zero beyond its end -> strips that are strip_stride apart. */
static void put_in_strips(const weight_t *w, int64_t row, int64_t from, int64_t strips, int64_t strip_stride, float *out) {
    float some[SEGMENT];
    for (int64_t s = 0; s < strips; s += SEGMENT / STRIP) {
        int64_t n = strips - s < SEGMENT / STRIP ? strips - s : SEGMENT / STRIP;
        dequantize(w, row, from + s * STRIP, n * STRIP, some);
        for (int64_t k = 0; k < n; k++, out += strip_stride)
            for (int c = 0; c < STRIP; c += 16) vf_store(out + c, vf_load(some + k * STRIP + c));
    }
}
