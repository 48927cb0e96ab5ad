/* Shared by MLA, GQA and the indexer: weighted sums of rows, softmax, the KV cache as a matrix. */
#pragma once
#include "matmul.h"

#define ROWS_AT_ONCE 8    /* cache rows whose weighted sum is built together */
#define HEADS_AT_ONCE 8   /* heads of one token row in one work item */

/* acc[0 .. n) += sum over i < rows of weights[i] * row[i], i ascending. n is a multiple of 16. */
INLINE void add_rows_n(int rows, float *acc, const float *weights, const float *const *row, int64_t n) {
    vf s[ROWS_AT_ONCE];
    UNROLL
    for (int i = 0; i < rows; i++) s[i] = vf_set1(weights[i]);
    for (int64_t c = 0; c < n; c += 16) {
        vf a = vf_load(acc + c);
        UNROLL
        for (int i = 0; i < rows; i++) a = vf_fma(s[i], vf_load(row[i] + c), a);
        vf_store(acc + c, a);
    }
}
static void add_rows(int rows, float *acc, const float *weights, const float *const *row, int64_t n) {
    if (rows == ROWS_AT_ONCE) {
        add_rows_n(ROWS_AT_ONCE, acc, weights, row, n);
    } else {
        for (int i = 0; i < rows; i++) add_rows_n(1, acc, weights + i, row + i, n);
    }
}

/* Rows of a KV cache as a matrix, for `dequantize`. */
INLINE weight_t cached(const void *rows, int kind, int64_t width) {
    return (weight_t){.data = rows, .columns = width, .row_bytes = (kind == BF16 ? 2 : 4) * width, .kind = kind};
}

/* A row of a KV cache as floats, padded to 32 columns: in place, or converted into `row_floats`. */
INLINE const float *cached_row(const weight_t *w, int64_t row, int64_t padded, float *row_floats) {
    if (w->kind == F32 && padded == w->columns) return (const float *)(w->data + row * w->row_bytes);
    dequantize(w, row, 0, padded, row_floats);
    return row_floats;
}

/* acc[j][i] += query j . key i of 4 keys and `queries` (1 or 2) queries; columns from .. from + width of the queries, those
 * from 0 of the keys. */
INLINE void clear_products(int queries, vf acc[][4][2]) {
    UNROLL
    for (int j = 0; j < queries; j++)
        UNROLL
        for (int i = 0; i < 4; i++) acc[j][i][0] = acc[j][i][1] = vf_zero();
}
INLINE void add_products(int queries, const float *const *query, const float *const *key, int64_t from, int64_t width,
                         vf acc[][4][2]) {
    for (int64_t k = 0; k < width; k += 32)
        UNROLL
        for (int half = 0; half < 2; half++) {
            vf q[2];
            UNROLL
            for (int j = 0; j < queries; j++) q[j] = vf_load(query[j] + from + k + 16 * half);
            UNROLL
            for (int i = 0; i < 4; i++) {
                vf u = vf_load(key[i] + k + 16 * half);
                UNROLL
                for (int j = 0; j < queries; j++) acc[j][i][half] = vf_fma(u, q[j], acc[j][i][half]);
            }
        }
}
INLINE void sum_products(int queries, vf acc[][4][2], float sums[][4]) {
    UNROLL
    for (int j = 0; j < queries; j++)
        UNROLL
        for (int i = 0; i < 4; i++) sums[j][i] = vf_sum(vf_add(acc[j][i][0], acc[j][i][1]));
}

/* Softmax without its last division: p [visible scores, padded to 16] -> e^(p - largest), 0 beyond; returns 1 / their sum.
 * A sink is one more score. */
static float softmax_scale(float *p, int64_t visible, const float *sink) {
    int64_t padded = round_up(visible, 16);
    vf most = vf_set1(p[0]), sum = vf_zero(), bad = vf_zero();
    for (int64_t s = visible; s < padded; s++) p[s] = p[0]; /* for the maximum only */
    for (int64_t s = 0; s < padded; s += 16) {
        vf x = vf_load(p + s);
        most = vf_max(x, most), bad = vf_add(bad, vf_sub(x, x));
    }
    float top = vf_max_of(most), first[16], rest = 0;
    if (sink) top = *sink > top ? *sink : top;
    for (int64_t s = 0; s < padded; s += 16) vf_store(p + s, vf_exp_negative(vf_sub(vf_load(p + s), vf_set1(top))));
    for (int64_t s = visible; s < padded; s++) p[s] = 0;
    for (int64_t s = 0; s < padded; s += 16) sum = vf_add(sum, vf_load(p + s));
    if (sink) {
        vf_store(first, vf_exp_negative(vf_set1(*sink - top)));
        rest = first[0];
    }
    return vf_sum(bad) == 0 ? 1 / (vf_sum(sum) + rest) : NAN; /* NaN and infinity spread to the output */
}
