/* The lightning indexer (DSA): scores of all positions, and the top-k of them. */
#include <stdlib.h>

#include "attention.h"

/* -------------------------------------------------------------------------------------------------------------------
 * Scores: out[t][s] = sum over heads, ascending, of weight * relu(query . key) / sqrt(width) */

#define INDEX_KEYS 64   /* positions of a work item */
#define INDEX_TOKENS 8
#define INDEX_BLOCK (2 * DOT_B)

typedef struct {
    const index_t *call;
    const float *queries; /* padded to 16 columns */
    int64_t padded, blocks;
    weight_t keys;
} index_job_t;

static int index_item(void *context, int64_t item) {
    index_job_t *job = context;
    const index_t *c = job->call;
    int64_t first = item / job->blocks * INDEX_TOKENS, last = first + INDEX_TOKENS < c->count ? first + INDEX_TOKENS : c->count;
    int64_t s = item % job->blocks * INDEX_KEYS, stop = s + INDEX_KEYS < c->positions ? s + INDEX_KEYS : c->positions;
    float root = 1.0f / sqrtf((float)c->width), *keys = thread_scratch(4 * (INDEX_BLOCK * job->padded + c->heads * INDEX_BLOCK));
    if (!keys) return 1;
    float *dots = keys + INDEX_BLOCK * job->padded;
    const float *key[INDEX_BLOCK];
    for (int i = 0; i < INDEX_BLOCK; i++) key[i] = keys + i * job->padded;
    for (; s < stop; s += INDEX_BLOCK) {
        int64_t n = stop - s < INDEX_BLOCK ? stop - s : INDEX_BLOCK;
        for (int64_t i = 0; i < n; i++) dequantize(&job->keys, s + i, 0, job->padded, keys + i * job->padded);
        for (int64_t t = first; t < last; t++) {
            float sums[INDEX_BLOCK] = {0};
            dot_rows(c->heads, job->queries + t * c->heads * job->padded, job->padded, n, key, job->padded, root, dots, INDEX_BLOCK);
            for (int64_t h = 0; h < c->heads; h++) {
                float weight = c->weights[t * c->heads + h];
                for (int64_t i = 0; i < n; i++) {
                    float dot = dots[h * INDEX_BLOCK + i];
                    sums[i] = fmaf(weight, dot < 0 ? 0 : dot, sums[i]); /* NaN stays */
                }
            }
            memcpy(c->out + t * c->positions + s, sums, (size_t)(4 * n));
        }
    }
    return 0;
}

int index_scores(const index_t *c) {
    int64_t padded = round_up(c->width, 16), rows = c->count * c->heads;
    index_job_t job = {c, c->queries, padded, (c->positions + INDEX_KEYS - 1) / INDEX_KEYS, cached(c->keys, c->kind, c->width)};
    float *memory = NULL;
    if (padded != c->width) {
        memory = calloc((size_t)(rows * padded), 4);
        if (!memory) return 1;
        for (int64_t i = 0; i < rows; i++) memcpy(memory + i * padded, c->queries + i * c->width, (size_t)(4 * c->width));
        job.queries = memory;
    }
    int failed = run_items(index_item, &job, (c->count + INDEX_TOKENS - 1) / INDEX_TOKENS * job.blocks);
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
