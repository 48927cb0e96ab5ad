/* RMSNorm, LayerNorm, RoPE and the check for finite values. */
#include "formats.h"
#include "pool.h"

/* -------------------------------------------------------------------------------------------------------------------
 * RMSNorm and LayerNorm: sums go to 16 lanes, ascending */

/* x / sqrt(mean(x^2) + eps) * weight, of x + added. */
static int rms_norm_row(const void *call, int64_t row) {
    const norm_t *c = call;
    int64_t n = c->columns, i = 0;
    float *x = c->x + row * c->x_stride, *out = c->out + row * n;
    const float *weight = c->weight;
    if (c->added) {
        const float *added = c->added + row * n;
        for (int64_t j = 0; j < n; j++) x[j] += added[j];
    }
    vf squares = vf_zero();
    for (; i + 16 <= n; i += 16) squares = vf_fma(vf_load(x + i), vf_load(x + i), squares);
    if (i < n) {
        vf last = vf_load_n(x + i, n - i);
        squares = vf_fma(last, last, squares);
    }
    vf scale = vf_set1(1.0f / sqrtf(vf_sum(squares) / (float)n + c->eps));
    for (i = 0; i + 16 <= n; i += 16) vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_load(weight + i)));
    if (i < n) vf_store_n(out + i, vf_mul(vf_mul(vf_load_n(x + i, n - i), scale), vf_load_n(weight + i, n - i)), n - i);
    return 0;
}

int rms_norm(const norm_t *c) { return each_row(rms_norm_row, c, c->rows, c->columns); }

/* (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias. */
static int layer_norm_row(const void *call, int64_t row) {
    const norm_t *c = call;
    int64_t n = c->columns, whole = n / 16 * 16;
    const float *x = c->x + row * c->x_stride;
    float *out = c->out + row * n, last[16];
    vf sum = vf_zero(), squares = vf_zero();
    for (int64_t i = 0; i < whole; i += 16) sum = vf_add(sum, vf_load(x + i));
    if (whole < n) sum = vf_add(sum, vf_load_n(x + whole, n - whole));
    vf mean = vf_set1(vf_sum(sum) / (float)n);
    for (int64_t i = 0; i < whole; i += 16) {
        vf d = vf_sub(vf_load(x + i), mean);
        squares = vf_fma(d, d, squares);
        vf_store(out + i, d);
    }
    if (whole < n) {
        vf_store(last, vf_sub(vf_load_n(x + whole, n - whole), mean));
        vf d = vf_load_n(last, n - whole); /* lanes beyond the end are zero again */
        squares = vf_fma(d, d, squares);
        vf_store_n(out + whole, d, n - whole);
    }
    float scale = 1.0f / sqrtf(vf_sum(squares) / (float)n + c->eps);
    for (int64_t i = 0; i < n; i++) out[i] = fmaf(out[i] * scale, c->weight[i], c->bias[i]);
    return 0;
}

int layer_norm(const norm_t *c) { return each_row(layer_norm_row, c, c->rows, c->columns); }

/* -------------------------------------------------------------------------------------------------------------------
 * RoPE: pairs (x[2j], x[2j + 1]) are rotated and stored as all first halves, all second halves, which is where the pairs
 * (x[j], x[half + j]) of the other kind are from the start */

static int rope_row_of_x(const void *call, int64_t row) {
    const rope_t *c = call;
    int64_t half = c->rotary / 2;
    const float *cos = c->cos + row * half, *sin = c->sin + row * half;
    float *pairs = thread_scratch(8 * half), *x = c->x + row * c->heads * c->width + c->first;
    if (!pairs) return 1;
    for (int64_t head = 0; head < c->heads; head++, x += c->width) {
        memcpy(pairs, x, (size_t)(8 * half));
        for (int64_t j = 0; j < half; j++) {
            float a = c->halves ? pairs[j] : pairs[2 * j], b = c->halves ? pairs[half + j] : pairs[2 * j + 1];
            x[j] = a * cos[j] - b * sin[j], x[half + j] = b * cos[j] + a * sin[j];
        }
    }
    return 0;
}

int rope(const rope_t *c) { return each_row(rope_row_of_x, c, c->rows, c->heads * c->rotary); }

/* -------------------------------------------------------------------------------------------------------------------
 * all_finite: x - x is zero, or NaN */

static int has_bad_value(const void *call, int64_t block) { /* 1 if one is not finite */
    const values_t *c = call;
    int64_t i = block * ITEM_VALUES, stop = i + ITEM_VALUES < c->count ? i + ITEM_VALUES : c->count;
    vf a = vf_zero(), b = vf_zero();
    for (; i + 32 <= stop; i += 32) {
        vf x = vf_load(c->values + i), y = vf_load(c->values + i + 16);
        a = vf_add(a, vf_sub(x, x)), b = vf_add(b, vf_sub(y, y));
    }
    float rest = 0;
    for (; i < stop; i++) rest += c->values[i] - c->values[i];
    return vf_sum(vf_add(a, b)) + rest != 0;
}

int all_finite(const values_t *c) {
    return !each_row(has_bad_value, c, (c->count + ITEM_VALUES - 1) / ITEM_VALUES, ITEM_VALUES);
}
