/* Grouped-query attention: some heads share a key and a value. The order
 * of every sum is independent of other token rows: over positions ascending, over columns as in gemm_float.c. */

#include "attention.h"

typedef struct {
    const gqa_t *call;
    weight_t keys, values; /* as matrices of positions * groups rows, for `dequantize` */
    int64_t width, value;  /* padded to 32 columns */
} gqa_job_t;

/* One token row, up to HEADS_AT_ONCE heads of one group. */
static int gqa_item(void *context, int64_t item) {
    gqa_job_t *job = context;
    const gqa_t *c = job->call;
    int64_t group_heads = c->heads / c->groups, parts = (group_heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    int64_t t = item / (c->groups * parts), group = item / parts % c->groups, first = item % parts * HEADS_AT_ONCE;
    int heads = group_heads - first < HEADS_AT_ONCE ? (int)(group_heads - first) : HEADS_AT_ONCE;
    int64_t head = group * group_heads + first, stop = c->position + t + 1;
    int64_t start = c->window && stop > c->window ? stop - c->window : 0, visible = stop - start, padded = round_up(visible, 16);
    int64_t floats = heads * (padded + job->width + job->value) + ROWS_AT_ONCE * (job->width + job->value);
    float *scores = thread_scratch(4 * floats);
    if (!scores) return 1;
    float *queries = scores + heads * padded, *mixed = queries + heads * job->width, *row_floats = mixed + heads * job->value;
    memset(queries, 0, (size_t)(4 * heads * (job->width + job->value)));
    for (int h = 0; h < heads; h++)
        memcpy(queries + h * job->width, c->queries + (t * c->heads + head + h) * c->width, (size_t)(4 * c->width));

    for (int64_t s = 0; s < visible; s += 4) {
        const float *key[4];
        int n = visible - s < 4 ? (int)(visible - s) : 4;
        for (int i = 0; i < 4; i++)
            key[i] = cached_row(&job->keys, (start + s + (i < n ? i : n - 1)) * c->groups + group, job->width, row_floats + i * job->width);
        for (int h = 0; h < heads; h += 2) {
            int m = heads - h < 2 ? 1 : 2;
            const float *query[2] = {queries + h * job->width, queries + (h + m - 1) * job->width};
            vf acc[2][4][2];
            float sums[2][4];
            clear_products(2, acc);
            add_products(2, query, key, 0, job->width, acc);
            sum_products(2, acc, sums);
            for (int j = 0; j < m; j++)
                for (int i = 0; i < n; i++) scores[(h + j) * padded + s + i] = sums[j][i] * c->scale;
        }
    }
    float weights[HEADS_AT_ONCE];
    for (int h = 0; h < heads; h++)
        weights[h] = softmax_scale(scores + h * padded, visible, c->sinks ? c->sinks + head + h : NULL);
    for (int64_t s = 0; s < visible; s += ROWS_AT_ONCE) {
        int n = visible - s < ROWS_AT_ONCE ? (int)(visible - s) : ROWS_AT_ONCE;
        const float *row[ROWS_AT_ONCE];
        for (int i = 0; i < n; i++)
            row[i] = cached_row(&job->values, (start + s + i) * c->groups + group, job->value, row_floats + i * job->value);
        for (int h = 0; h < heads; h++) add_rows(n, mixed + h * job->value, scores + h * padded + s, row, job->value);
    }
    for (int h = 0; h < heads; h++) {
        float *out = c->out + (t * c->heads + head + h) * c->value;
        for (int64_t k = 0; k < c->value; k++) out[k] = mixed[h * job->value + k] * weights[h];
    }
    return 0;
}

int gqa(const gqa_t *c) {
    int64_t parts = (c->heads / c->groups + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    gqa_job_t job = {.call = c, .width = round_up(c->width, 32), .value = round_up(c->value, 32)};
    job.keys = cached(c->keys, c->kind, c->width), job.values = cached(c->values, c->kind, c->value);
    return run_items(gqa_item, &job, c->count * c->groups * parts);
}
