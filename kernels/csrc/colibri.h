/* The C API: the structs that kernels are called with, and the table of the kernels. kernels/structs.py parses this file. */
#pragma once
#include <stdint.h>

enum { F32, BF16, F16, FP8, MXFP4, INT8, INT4, INT3, INT2 };
enum { E8M0 = 3 }; /* another kind of scales: a power of two, its exponent + 127 */

/* A matrix [rows, columns] as kernels/formats.py describes it. */
typedef struct {
    const uint8_t *data;
    const void *scales;
    int64_t rows, columns, row_bytes;
    int64_t row_scales; /* stride of the scales of a row */
    int32_t kind;       /* one of the above */
    int32_t group;      /* columns that share a scale; for a scale a row, all of them */
    int32_t scale_kind; /* F32, F16, BF16 or E8M0 */
    int32_t exact;      /* activations stay float32 */
} weight_t;

/* out [count, rows] = x [count, columns] times weight, + bias. Strides in floats. Returns 0, or 1 out of memory. */
typedef struct {
    const weight_t *weight;
    const float *x, *bias;
    float *out;
    int64_t count, x_stride, out_stride;
} linear_t;

/* Expert e computes down(silu(gate x[row]) * up x[row]) for each of its token rows. With `topk_weights` the result times its
 * weight is added to out[row], experts ascending; without, it is written to out[out_row]. */
typedef struct {
    const weight_t *matrices; /* gate, up, down of each expert */
    const int64_t *starts;    /* [experts + 1]: where an expert begins in `rows`, `topk_weights` and `out_rows` */
    const int64_t *rows;      /* rows of x, ascending within an expert; NULL: one after the other */
    const float *topk_weights;
    const float *x;           /* [count, hidden] */
    float *out;
    int64_t experts, count, hidden, width;
    const int64_t *out_rows;    /* NULL: one after the other */
    /* Clamped SwiGLU: down((u + 1) g / (1 + e^(-alpha g))), g at most `limit`, u between -limit and limit; the biases of
     * each expert [experts, width], [experts, width] and [experts, hidden]. NULL: silu, without biases. */
    const float *gate_bias, *up_bias, *down_bias;
    float limit, alpha;
} experts_t;

/* out [count, out columns] = down(silu(gate x) * up x), x [count, columns]. */
typedef struct {
    const weight_t *gate, *up, *down;
    const float *x;
    float *out;
    int64_t count;
} mlp_t;

/* out[rows[i]] += topk_weights[i] * outputs[i], i ascending, of `count` rows. */
typedef struct {
    const float *outputs, *topk_weights;
    const int64_t *rows;
    float *out;
    int64_t count, columns;
} add_weighted_t;

/* x [rows, width] -> rows of a KV cache in 8 bits: codes, padded to an even number, then a BF16 scale for every 64 columns. A
 * group that holds NaN or infinity gets the scale NaN. */
typedef struct {
    const float *x;
    uint8_t *out;
    int64_t rows, width;
} kv_rows_t;

/* Absorbed MLA of one sequence: `count` token rows after `position` known positions; their own keys are in the cache already.
 * queries [count, heads, nope + rope], RoPE applied; latents [positions, latent] and rope_keys
 * [positions, rope], F32, BF16 or INT8 as of kv_rows_t; selection [count, topk] positions ascending, padded with -1, or NULL: all up to its own.
 * out [count, heads, value]. */
typedef struct {
    const weight_t *kv_b; /* [heads * (nope + value), latent] */
    const float *queries;
    const void *latents, *rope_keys;
    const int64_t *selection;
    float *out;
    int64_t count, position, topk, heads, nope, rope, value, latent;
    float scale;
    int32_t kind; /* of latents and rope_keys */
} mla_t;

/* GQA of one sequence, as of mla_t: queries [count, heads, width]; keys [positions, groups, width] and values [positions, groups,
 * value], heads / groups of the heads share one. A row attends to the last `window` positions up to its own, 0: all of them.
 * sinks [heads], one more score of each head in the softmax, or NULL. out [count, heads, value]. */
typedef struct {
    const float *queries;
    const void *keys, *values;
    const float *sinks;
    float *out;
    int64_t count, position, window, heads, groups, width, value;
    float scale;
    int32_t kind; /* of keys and values */
} gqa_t;

/* queries [count, heads, width], weights [count, heads], keys [positions, width] -> out [count, positions]. */
typedef struct {
    const float *queries, *weights;
    const void *keys;
    float *out;
    int64_t count, heads, width, positions;
    int32_t kind; /* of keys */
} index_t;

/* scores [rows, positions], row i sees the positions up to first + i -> selected [rows, topk]: its top k, ascending, padded
 * with -1. A row that sees a NaN selects nothing: attention gives NaN then. */
typedef struct {
    const float *scores;
    int64_t *selected;
    int64_t rows, positions, first, topk;
} top_k_t;

/* Rows of x, `x_stride` apart -> out [rows, columns]. `added` [rows, columns] is added to x first, or NULL. */
typedef struct {
    float *x;
    const float *added, *weight, *bias;
    float *out;
    int64_t rows, columns, x_stride;
    float eps;
} norm_t;

/* x [rows, heads, width]: RoPE of columns first .. first + rotary in place, by cos and sin [rows, rotary / 2]. Pairs are
 * neighbors, stored as halves, or half of the columns apart. */
typedef struct {
    float *x;
    const float *cos, *sin;
    int64_t rows, heads, width, first, rotary, halves;
} rope_t;

/* logits [rows, experts], bias [experts] -> topk_ids, weights [rows, active]. No bias: the softmax router, without groups. */
typedef struct {
    const float *logits, *bias;
    int64_t *topk_ids;
    float *weights;
    int64_t rows, experts, active, groups, active_groups;
    double mass; /* 0 < mass < 1: of the top-k only those that make up this share of their scores keep a weight */
    float scaling;
    int32_t normalize;
} route_t;

/* topk_ids, topk_weights [rows, active] -> the distinct experts, where each begins, and the rows and weights of each. `experts`
 * and `starts` have one more: how many rows there are in all. */
typedef struct {
    const int64_t *topk_ids;
    const float *topk_weights;
    int64_t *experts, *starts, *grouped_rows;
    float *grouped_weights;
    int64_t rows, active, num_experts;
} group_t;

/* logits [rows, vocab], targets [rows] -> log p of the targets, and the best id of each row. */
typedef struct {
    const float *logits;
    const int64_t *targets;
    double *logprobs;
    int64_t *best;
    int64_t rows, vocab;
} logprobs_t;

typedef struct {
    const float *values;
    int64_t count;
} values_t;

/* Run work items 0 .. items on the threads of the pool. Items return 0, or 1 out of memory; returns 1 if one did. */
typedef int (*item_t)(void *context, int64_t item);
int run_items(item_t work, void *context, int64_t items);

/* The kernels for one instruction set. They return 0, 1 out of memory, or what their definition says. */
typedef struct {
    const char *name;
    int (*linear)(const linear_t *);
    int (*experts)(const experts_t *);
    int (*gated_mlp)(const mlp_t *);
    int (*add_weighted)(const add_weighted_t *);
    int (*quantize_kv)(const kv_rows_t *);
    int (*mla)(const mla_t *);
    int (*gqa)(const gqa_t *);
    int (*index_scores)(const index_t *);
    int (*top_k_positions)(const top_k_t *);
    int (*rms_norm)(const norm_t *);
    int (*layer_norm)(const norm_t *);
    int (*rope)(const rope_t *);
    int (*route)(const route_t *);
    int (*group_by_expert)(const group_t *);
    int (*logprobs)(const logprobs_t *);
    int (*all_finite)(const values_t *);
    int64_t (*read_memory)(const uint8_t *, int64_t); /* for benchmarks; the result means nothing */
} kernels_t;

int linear(const linear_t *), experts(const experts_t *), gated_mlp(const mlp_t *), add_weighted(const add_weighted_t *);
int quantize_kv(const kv_rows_t *), mla(const mla_t *), gqa(const gqa_t *), index_scores(const index_t *), top_k_positions(const top_k_t *);
int rms_norm(const norm_t *), layer_norm(const norm_t *), rope(const rope_t *), route(const route_t *);
int group_by_expert(const group_t *), logprobs(const logprobs_t *), all_finite(const values_t *);
