/* Absorbed MLA: attention over the cached latents.
 *
 * kv_b holds for each head N key rows Wk and V value rows Wv over L latent columns. Queries are projected into the latent space
 * (q Wk), attend over the cached latents, which all heads share, and the weighted latents are projected to values (Wv l).
 * The activations stay float32 whatever the format of kv_b. The order of every sum is independent of other token rows: over
 * key rows ascending, over columns as in gemm_float.c. */

#include <stdlib.h>

#include "attention.h"

#define BLOCK_QUERIES 64  /* token rows whose latent queries are held at once */
#define ROWS_AT_ONCE 32   /* key rows of kv_b that are absorbed together */

/* Few queries and integer weights: a segment is dequantized in registers and used at once. The arithmetic is that of
 * sum_rows and of gemm_float, with less memory traffic. */

#define FEW_QUERIES 2

/* Scales of `rows` weight rows from `row` as float32 [rows, groups]. */
INLINE void scales_of_rows(const weight_t *w, int64_t row, int rows, float *out) {
    int64_t n = rows * groups_of(w), from = row * w->row_scales, i = 0;
    if (w->scale_kind == F16)
        for (; i + 16 <= n; i += 16) vf_store(out + i, vf_load_f16((const uint16_t *)w->scales + from + i));
    for (; i < n; i++) out[i] = scale_at(w, from + i);
}

/* acc[columns] += sum over i < rows of weights[i] * row i, i ascending. */
INLINE void absorb_rows(int kind, const weight_t *w, int64_t row, int rows, const float *weights, const float *scales,
                        float *acc) {
    for (int64_t s = 0; s < w->columns / SEGMENT; s++) {
        vf a[4];
        UNROLL
        for (int j = 0; j < 4; j++) a[j] = vf_load(acc + s * SEGMENT + 16 * j);
        for (int i = 0; i < rows; i++) {
            vf v[4], by = vf_set1(weights[i]);
            load_segment(kind, w->data + (row + i) * w->row_bytes + s * segment_bytes(kind),
                         scales[i * groups_of(w) + s * SEGMENT / w->group], v);
            UNROLL
            for (int j = 0; j < 4; j++) a[j] = vf_fma(by, v[j], a[j]);
        }
        UNROLL
        for (int j = 0; j < 4; j++) vf_store(acc + s * SEGMENT + 16 * j, a[j]);
    }
}

/* out[i] = weight row i times x, for VALUE_ROWS rows. */
#define VALUE_ROWS 4
INLINE void value_rows(int kind, const weight_t *w, int64_t row, const float *x, const float *scales, float *out) {
    vf acc[VALUE_ROWS];
    UNROLL
    for (int i = 0; i < VALUE_ROWS; i++) acc[i] = vf_zero();
    for (int64_t s = 0; s < w->columns / SEGMENT; s++)
        UNROLL
        for (int i = 0; i < VALUE_ROWS; i++) {
            vf v[4];
            load_segment(kind, w->data + (row + i) * w->row_bytes + s * segment_bytes(kind),
                         scales[i * groups_of(w) + s * SEGMENT / w->group], v);
            UNROLL
            for (int j = 0; j < 4; j++) acc[i] = vf_fma(v[j], vf_load(x + s * SEGMENT + 16 * j), acc[i]);
        }
    vf_sums4(acc, out);
}

/* The same for any integer format, specialized for the most common one. */
static void absorb_rows_of(const weight_t *w, int64_t row, int rows, const float *weights, const float *scales, float *acc) {
    if (SPECIAL && w->kind == INT4) absorb_rows(INT4, w, row, rows, weights, scales, acc);
    else absorb_rows(w->kind, w, row, rows, weights, scales, acc);
}
static void value_rows_of(const weight_t *w, int64_t row, const float *x, const float *scales, float *out) {
    if (SPECIAL && w->kind == INT4) value_rows(INT4, w, row, x, scales, out);
    else value_rows(w->kind, w, row, x, scales, out);
}

typedef struct {
    const mla_t *call;
    int64_t first, count; /* token rows of this block */
    int64_t latent, key;  /* L padded to STRIP columns, with R padded to 16 */
    float *queries;       /* [count, heads, key]: latent part, rotary part */
    float *mixed;         /* [count, heads, latent] */
    weight_t kv_b;        /* exact */
    int in_registers;     /* few queries and whole segments: see absorb_rows */
} mla_job_t;

/* Absorb the key rows of one head into the queries of the block. */
static int absorb_item(void *context, int64_t head) {
    mla_job_t *job = context;
    const mla_t *c = job->call;
    int64_t N = c->nope, R = c->rope, Q = N + R;
    float *row_floats = thread_scratch(4 * ROWS_AT_ONCE * job->latent); /* weight rows, or only their scales */
    if (!row_floats) return 1;
    for (int64_t t = 0; t < job->count; t++) {
        const float *q = c->queries + ((job->first + t) * c->heads + head) * Q;
        float *to = job->queries + (t * c->heads + head) * job->key;
        memset(to, 0, (size_t)(4 * job->key));
        memcpy(to + job->latent, q + N, (size_t)(4 * R));
    }
    for (int64_t n = 0; n < N; n += ROWS_AT_ONCE) {
        int rows = N - n < ROWS_AT_ONCE ? (int)(N - n) : ROWS_AT_ONCE;
        int64_t first = head * (N + c->value) + n;
        const float *weights = c->queries + (job->first * c->heads + head) * Q + n;
        float *to = job->queries + head * job->key;
        if (job->in_registers) {
            scales_of_rows(&job->kv_b, first, rows, row_floats);
            for (int64_t t = 0; t < job->count; t++)
                absorb_rows_of(&job->kv_b, first, rows, weights + t * c->heads * Q, row_floats, to + t * c->heads * job->key);
            continue;
        }
        for (int i = 0; i < rows; i++)
            put_in_strips(&job->kv_b, first + i, 0, job->latent / STRIP, ROWS_AT_ONCE * STRIP, row_floats + i * STRIP);
        sum_rows(job->count, weights, c->heads * Q, rows, row_floats, STRIP, job->latent / STRIP, ROWS_AT_ONCE * STRIP, to,
                 c->heads * job->key);
    }
    return 0;
}

/* Project the weighted latents of one head to values, for all queries of the block. */
static int value_item(void *context, int64_t head) {
    mla_job_t *job = context;
    const mla_t *c = job->call;
    int64_t V = c->value, base = head * (c->nope + V) + c->nope, rows[BLOCK_QUERIES];
    uint8_t *scratch = thread_scratch(work_bytes(&job->kv_b));
    if (!scratch) return 1;
    for (int64_t t = 0; t < job->count; t++) rows[t] = t * c->heads + head;
    input_t in = {.x = job->mixed, .x_stride = job->latent};
    float *out = c->out + (job->first * c->heads + head) * V - base;
    int64_t r = base;
    for (; job->in_registers && r + VALUE_ROWS <= base + V; r += VALUE_ROWS) {
        float *scales = (float *)scratch, sums[VALUE_ROWS];
        scales_of_rows(&job->kv_b, r, VALUE_ROWS, scales);
        for (int64_t t = 0; t < job->count; t++) {
            value_rows_of(&job->kv_b, r, job->mixed + rows[t] * job->latent, scales, sums);
            memcpy(out + t * c->heads * V + r, sums, sizeof sums);
        }
    }
    for (; r < base + V; r += ITEM_ROWS)
        matmul(&job->kv_b, &in, rows, job->count, r, r + ITEM_ROWS < base + V ? r + ITEM_ROWS : base + V, out,
              c->heads * V, scratch);
    return 0;
}

int mla(const mla_t *c) {
    int64_t latent = round_up(c->latent, STRIP), key = latent + round_up(c->rope, 16);
    int64_t block = c->count < BLOCK_QUERIES ? c->count : BLOCK_QUERIES;
    void *memory;
    if (posix_memalign(&memory, 64, (size_t)(4 * block * c->heads * (key + latent)))) return 1;
    mla_job_t job = {.call = c, .latent = latent, .key = key, .queries = memory, .kv_b = *c->kv_b};
    job.mixed = job.queries + block * c->heads * key;
    job.kv_b.exact = 1;
    job.in_registers = block <= FEW_QUERIES && is_integer(c->kv_b->kind) && !is_odd_group(c->kv_b) &&
                       c->latent % SEGMENT == 0;
    attention_t a = {.groups = 1, .heads = c->heads, .topk = c->topk, .queries = job.queries, .width = key, .value = latent,
                     .scale = c->scale, .mixed = job.mixed};
    a.keys[0] = a.values = cached(c->latents, c->kind, c->latent), a.keys[1] = cached(c->rope_keys, c->kind, c->rope);
    int failed = 0;
    for (job.first = 0; job.first < c->count && !failed; job.first += block) {
        job.count = c->count - job.first < block ? c->count - job.first : block;
        a.count = job.count, a.position = c->position + job.first;
        a.selection = c->selection ? c->selection + job.first * c->topk : NULL;
        failed |= run_items(absorb_item, &job, c->heads);
        failed |= attend(&a);
        failed |= run_items(value_item, &job, c->heads);
    }
    free(memory);
    return failed;
}
