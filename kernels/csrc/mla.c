/* Absorbed MLA: attention over the cached latents.
 *
 * kv_b holds for each head N key rows Wk and V value rows Wv over L latent columns. Queries are projected into the latent space
 * (q Wk), attend over the cached latents, and the weighted latents are projected to values (Wv l). The activations stay
 * float32 whatever the format of kv_b. The order of every sum is independent of other token rows: over key rows and over
 * positions ascending, over columns as in gemm_float.c.
 *
 * A bfloat16 cache is converted a few rows at a time, once for all heads of a work item: about a tenth less time than for
 * each pair of heads (GLM-5.2's widths, AVX-512). */

#include <stdlib.h>

#include "attention.h"

#define BLOCK_QUERIES 64  /* token rows whose latent queries are held at once */

/* Few queries and integer weights: a segment is dequantized in registers and used at once. The arithmetic is that of
 * add_rows and of gemm_float, with less memory traffic. */

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
#if defined(AVX2)
#define VALUE_ROWS 2 /* as many as fit its registers */
#else
#define VALUE_ROWS 4
#endif
INLINE void value_rows(int kind, const weight_t *w, int64_t row, const float *x, const float *scales, float *out) {
    vf acc[VALUE_ROWS][2];
    UNROLL
    for (int i = 0; i < VALUE_ROWS; i++) acc[i][0] = acc[i][1] = vf_zero();
    for (int64_t s = 0; s < w->columns / SEGMENT; s++)
        UNROLL
        for (int i = 0; i < VALUE_ROWS; i++) {
            vf v[4];
            load_segment(kind, w->data + (row + i) * w->row_bytes + s * segment_bytes(kind),
                         scales[i * groups_of(w) + s * SEGMENT / w->group], v);
            UNROLL
            for (int j = 0; j < 4; j++) acc[i][j % 2] = vf_fma(v[j], vf_load(x + s * SEGMENT + 16 * j), acc[i][j % 2]);
        }
    for (int i = 0; i < VALUE_ROWS; i++) out[i] = vf_sum(vf_add(acc[i][0], acc[i][1]));
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
    int64_t latent, key;  /* L and L + R, each part padded to 32 columns */
    float *queries;       /* [count, heads, key]: latent part, rotary part */
    float *mixed;         /* [count, heads, latent] */
    weight_t latents, rope_keys; /* the KV cache; where its rows are floats and no whole steps of 32, a padded copy */
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
        const float *row[ROWS_AT_ONCE];
        if (job->in_registers) {
            int64_t first = head * (N + c->value) + n;
            scales_of_rows(&job->kv_b, first, rows, row_floats);
            for (int64_t t = 0; t < job->count; t++)
                absorb_rows_of(&job->kv_b, first, rows, c->queries + ((job->first + t) * c->heads + head) * Q + n, row_floats,
                               job->queries + (t * c->heads + head) * job->key);
            continue;
        }
        for (int i = 0; i < rows; i++) {
            dequantize(&job->kv_b, head * (N + c->value) + n + i, 0, job->latent, row_floats + i * job->latent);
            row[i] = row_floats + i * job->latent;
        }
        for (int64_t t = 0; t < job->count; t++)
            add_rows(rows, job->queries + (t * c->heads + head) * job->key,
                     c->queries + ((job->first + t) * c->heads + head) * Q + n, row, job->latent);
    }
    return 0;
}

/* One token row, some heads: scores, softmax, weighted latents. */
static int attend_item(void *context, int64_t item) {
    mla_job_t *job = context;
    const mla_t *c = job->call;
    int64_t per_row = (c->heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE, t = item / per_row;
    int64_t head = item % per_row * HEADS_AT_ONCE;
    int heads = c->heads - head < HEADS_AT_ONCE ? (int)(c->heads - head) : HEADS_AT_ONCE;
    int64_t visible = c->position + job->first + t + 1; /* keys this row may attend to */
    const int64_t *selected = NULL;
    if (c->selection) {
        selected = c->selection + (job->first + t) * c->topk;
        for (visible = 0; visible < c->topk && selected[visible] >= 0;) visible++;
    }
    int64_t padded = round_up(visible, 16);
    int64_t some = HEADS_AT_ONCE * (padded + 16); /* never zero: a row may attend to no key at all */
    float *scores = thread_scratch(4 * (some + (c->kind == BF16 ? ROWS_AT_ONCE * job->key : 0)));
    if (!scores) return 1;
    float *row_floats = scores + some;
    const float *queries = job->queries + (t * c->heads + head) * job->key;
    for (int64_t s = 0; s < visible; s += 4) {
        const float *latent[4], *rope[4];
        int n = visible - s < 4 ? (int)(visible - s) : 4;
        for (int i = 0; i < 4; i++) {
            int64_t at = s + (i < n ? i : n - 1);
            if (selected) at = selected[at];
            latent[i] = cached_row(&job->latents, at, job->latent, row_floats + i * job->key);
            rope[i] = cached_row(&job->rope_keys, at, job->key - job->latent, row_floats + i * job->key + job->latent);
        }
        for (int h = 0; h < heads; h += 2) {
            int m = heads - h < 2 ? 1 : 2;
            const float *q[2] = {queries + h * job->key, queries + (h + m - 1) * job->key};
            vf acc[2][4][2];
            float sums[2][4];
            clear_products(2, acc);
            add_products(2, q, latent, 0, job->latent, acc);
            add_products(2, q, rope, job->latent, job->key - job->latent, acc);
            sum_products(2, acc, sums);
            for (int j = 0; j < m; j++)
                for (int i = 0; i < n; i++) scores[(h + j) * padded + s + i] = sums[j][i] * c->scale;
        }
    }
    float weights[HEADS_AT_ONCE];
    for (int h = 0; h < heads; h++) {
        weights[h] = softmax_scale(scores + h * padded, visible, NULL);
        memset(job->mixed + (t * c->heads + head + h) * job->latent, 0, (size_t)(4 * job->latent));
    }
    for (int64_t s = 0; s < visible; s += ROWS_AT_ONCE) {
        int n = visible - s < ROWS_AT_ONCE ? (int)(visible - s) : ROWS_AT_ONCE;
        const float *row[ROWS_AT_ONCE];
        for (int i = 0; i < n; i++) {
            int64_t at = selected ? selected[s + i] : s + i;
            row[i] = cached_row(&job->latents, at, job->latent, row_floats + i * job->key);
        }
        for (int h = 0; h < heads; h++)
            add_rows(n, job->mixed + (t * c->heads + head + h) * job->latent, scores + h * padded + s, row, job->latent);
    }
    for (int h = 0; h < heads; h++) {
        float *m = job->mixed + (t * c->heads + head + h) * job->latent;
        for (int64_t k = 0; k < job->latent; k += 16) vf_store(m + k, vf_mul(vf_load(m + k), vf_set1(weights[h])));
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
    int64_t latent = round_up(c->latent, 32), key = latent + round_up(c->rope, 32);
    int64_t block = c->count < BLOCK_QUERIES ? c->count : BLOCK_QUERIES, known = c->position + c->count;
    int pads = c->kind == F32 && (latent != c->latent || key - latent != c->rope);
    int64_t floats = block * c->heads * (key + latent) + (pads ? known * key : 0);
    void *memory;
    if (posix_memalign(&memory, 64, (size_t)(4 * floats))) return 1;
    mla_job_t job = {.call = c, .latent = latent, .key = key, .queries = memory, .kv_b = *c->kv_b};
    job.mixed = job.queries + block * c->heads * key;
    job.latents = cached(c->latents, c->kind, c->latent);
    job.rope_keys = cached(c->rope_keys, c->kind, c->rope);
    job.kv_b.exact = 1;
    job.in_registers = block <= FEW_QUERIES && is_integer(c->kv_b->kind) && !is_odd_group(c->kv_b) &&
                       c->latent % SEGMENT == 0;
    if (pads) {
        float *keys = job.mixed + block * c->heads * latent;
        memset(keys, 0, (size_t)(4 * known * key));
        for (int64_t s = 0; s < known; s++) {
            memcpy(keys + s * key, (const float *)c->latents + s * c->latent, (size_t)(4 * c->latent));
            memcpy(keys + s * key + latent, (const float *)c->rope_keys + s * c->rope, (size_t)(4 * c->rope));
        }
        job.latents = (weight_t){.data = (uint8_t *)keys, .columns = latent, .row_bytes = 4 * key, .kind = F32};
        job.rope_keys = (weight_t){.data = (uint8_t *)(keys + latent), .columns = key - latent, .row_bytes = 4 * key, .kind = F32};
    }
    int failed = 0;
    for (job.first = 0; job.first < c->count && !failed; job.first += block) {
        job.count = c->count - job.first < block ? c->count - job.first : block;
        failed |= run_items(absorb_item, &job, c->heads);
        failed |= run_items(attend_item, &job, job.count * ((c->heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE));
        failed |= run_items(value_item, &job, c->heads);
    }
    free(memory);
    return failed;
}
