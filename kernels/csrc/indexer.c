/* The lightning indexer (DSA): scores of all positions, and the top-k of them. */
#include <stdlib.h>

#include "attention.h"

/* -------------------------------------------------------------------------------------------------------------------
 * Scores: out[t][s] = sum over heads, ascending, of weight * relu(query . key) / sqrt(width) */

#define KEYS_AT_ONCE 64

typedef struct {
    const index_t *call;
    const float *queries; /* padded to 32 columns */
    int64_t padded;
    weight_t keys;        /* float32 ones are padded */
} index_job_t;

static int index_item(void *context, int64_t item) {
    index_job_t *job = context;
    const index_t *c = job->call;
    int64_t blocks = (c->positions + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE, t = item / blocks;
    int64_t s = item % blocks * KEYS_AT_ONCE, stop = s + KEYS_AT_ONCE < c->positions ? s + KEYS_AT_ONCE : c->positions;
    float root = 1.0f / sqrtf((float)c->width), *row_floats = thread_scratch(4 * 4 * job->padded);
    if (!row_floats) return 1;
    for (; s < stop; s += 4) {
        int n = stop - s < 4 ? (int)(stop - s) : 4;
        const float *key[4];
        for (int i = 0; i < 4; i++)
            key[i] = cached_row(&job->keys, s + (i < n ? i : n - 1), job->padded, row_floats + i * job->padded);
        float sums[4] = {0};
        for (int64_t h = 0; h < c->heads; h++) {
            const float *q = job->queries + (t * c->heads + h) * job->padded;
            vf acc[1][4][2];
            float dots[1][4];
            clear_products(1, acc);
            add_products(1, &q, key, 0, job->padded, acc);
            sum_products(1, acc, dots);
            for (int i = 0; i < n; i++)
                if (!(dots[0][i] < 0)) sums[i] = fmaf(c->weights[t * c->heads + h], dots[0][i] * root, sums[i]);
        }
        for (int i = 0; i < n; i++) c->out[t * c->positions + s + i] = sums[i];
    }
    return 0;
}

int index_scores(const index_t *c) {
    int64_t padded = round_up(c->width, 32), rows = c->count * c->heads, filled = c->kind == F32 ? c->positions : 0;
    index_job_t job = {c, c->queries, padded, cached(c->keys, c->kind, c->width)};
    float *memory = NULL;
    if (padded != c->width) {
        memory = calloc((size_t)((rows + filled) * padded), 4);
        if (!memory) return 1;
        float *keys = memory + rows * padded;
        for (int64_t i = 0; i < rows; i++) memcpy(memory + i * padded, c->queries + i * c->width, (size_t)(4 * c->width));
        for (int64_t i = 0; i < filled; i++)
            memcpy(keys + i * padded, (const float *)c->keys + i * c->width, (size_t)(4 * c->width));
        job.queries = memory;
        if (filled) job.keys = cached(keys, F32, padded);
    }
    int failed = run_items(index_item, &job, c->count * ((c->positions + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE));
    free(memory);
    return failed;
}

/* -------------------------------------------------------------------------------------------------------------------
 * The top-k positions: a radix select finds the k-th largest score, without sorting */

/* Larger for a larger float; -0 is 0. */
INLINE uint32_t rank_of(float x) {
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The k-th largest rank of n scores, n > k, and how many scores of that rank are among the top k. */
static uint32_t kth_largest(const float *scores, int64_t n, int64_t k, int64_t *room) {
    uint64_t found = 0;
    for (int shift = 22; shift >= 0; shift -= 11) { /* 10 bits, 11 and 11 */
        int64_t counts[2048] = {0}, digit = 2047;
        for (int64_t i = 0; i < n; i++) {
            uint64_t rank = rank_of(scores[i]);
            if ((rank ^ found) >> shift < 2048) counts[rank >> shift & 2047]++;
        }
        for (; counts[digit] < k; digit--) k -= counts[digit];
        found |= (uint64_t)digit << shift;
    }
    *room = k;
    return (uint32_t)found;
}

static int top_k_row(const void *call, int64_t row) {
    const top_k_t *c = call;
    const float *scores = c->scores + row * c->positions;
    int64_t *out = c->selected + row * c->topk, visible = c->first + row + 1, at = 0;
    int is_nan = 0;
    for (int64_t s = 0; s < visible; s++) is_nan |= scores[s] != scores[s];
    if (!is_nan && visible <= c->topk)
        for (; at < visible; at++) out[at] = at;
    else if (!is_nan) {
        int64_t room;
        uint32_t smallest = kth_largest(scores, visible, c->topk, &room);
        for (int64_t s = 0; s < visible && at < c->topk; s++) {
            uint32_t rank = rank_of(scores[s]);
            if (rank > smallest || (rank == smallest && room-- > 0)) out[at++] = s;
        }
    }
    for (; at < c->topk; at++) out[at] = -1;
    return 0;
}

int top_k_positions(const top_k_t *c) { return each_row(top_k_row, c, c->rows, c->positions); }
