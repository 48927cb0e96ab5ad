/* What the Python side hands over, and what the files of this folder share. kernels/native.py mirrors the structs. */
#pragma once
#include <stdint.h>

enum { F32, BF16, F16, FP8, MXFP4, INT8, INT4, INT3, INT2 };
enum { E8M0 = 3 }; /* another kind of scales: a power of two, its exponent + 127 */

/* A matrix [rows, columns] as kernels/formats.py describes it. */
typedef struct {
    const uint8_t *data;
    const void *scales;
    int64_t rows, columns, row_bytes;
    int64_t row_scales; /* how far the scales of two rows are apart */
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

/* Expert e gives down(silu(gate x[row]) * up x[row]) for each of its rows. With `shares` that is added to out[row] times the
 * share, experts ascending; without, it is written to out[place]. */
typedef struct {
    const weight_t *matrices; /* gate, up, down of each expert */
    const int64_t *starts;    /* [experts + 1]: where the rows of an expert begin in `rows`, `shares` and `places` */
    const int64_t *rows;      /* rows of x, ascending within an expert; NULL: one after the other */
    const float *shares;
    const float *x;           /* [count, hidden] */
    float *out;
    int64_t experts, count, hidden, width;
    const int64_t *places;    /* NULL: one after the other */
    /* Clamped gates: down((u + 1) g / (1 + e^(-alpha g))), g at most `limit`, u between -limit and limit; the biases of
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

/* out[rows[i]] += shares[i] * outputs[i], i ascending, of `count` rows. */
typedef struct {
    const float *outputs, *shares;
    const int64_t *rows;
    float *out;
    int64_t count, columns;
} add_t;

/* One sequence: `count` rows of queries behind `position` known positions (their own keys are in the cache already).
 * queries [count, heads, nope + rope], the rotary part rotated; latents [positions, latent] and rope_keys
 * [positions, rope], F32 or BF16; selection [count, topk] positions ascending, filled with -1, or NULL: all up to its own.
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

/* One sequence, as of mla_t: queries [count, heads, width]; keys [positions, groups, width] and values [positions, groups,
 * value], heads / groups of the heads share one. A row sees the last `window` positions up to its own, 0: all of them.
 * sinks [heads], one more score of each head in the softmax, or NULL. out [count, heads, value]. */
typedef struct {
    const float *queries;
    const void *keys, *values;
    const float *sinks;
    float *out;
    int64_t count, position, window, heads, groups, width, value;
    float scale;
    int32_t kind; /* of keys and values: F32 or BF16 */
} grouped_t;

/* queries [count, heads, width], weights [count, heads], keys [positions, width], F32 or BF16 -> out [count, positions]. */
typedef struct {
    const float *queries, *weights;
    const void *keys;
    float *out;
    int64_t count, heads, width, positions;
    int32_t kind; /* of keys */
} index_t;

/* scores [rows, positions], row i sees the positions up to first + i -> chosen [rows, topk]: the best it sees, ascending,
 * filled with -1. A row that sees a NaN chooses nothing: attention gives NaN then. */
typedef struct {
    const float *scores;
    int64_t *chosen;
    int64_t rows, positions, first, topk;
} top_t;

/* Rows of x, `x_stride` apart -> out [rows, columns]. `added` [rows, columns] is added to x first, or NULL. */
typedef struct {
    float *x;
    const float *added, *weight, *bias;
    float *out;
    int64_t rows, columns, x_stride;
    float eps;
} norm_t;

/* x [rows, heads, width]: columns first .. first + rotary are turned in place by cos and sin [rows, rotary / 2]. Pairs are
 * neighbours and are parted, or stand half of the columns apart. */
typedef struct {
    float *x;
    const float *cos, *sin;
    int64_t rows, heads, width, first, rotary, halves;
} rotate_t;

/* logits [rows, experts], bias [experts] -> chosen, weights [rows, active]. No bias: the softmax router, without groups. */
typedef struct {
    const float *logits, *bias;
    int64_t *chosen;
    float *weights;
    int64_t rows, experts, active, groups, active_groups;
    double mass; /* 0 < mass < 1: of the chosen only those that make up this share of their scores keep a weight */
    float scaling;
    int32_t normalize;
} route_t;

/* chosen, shares [rows, active] -> the distinct experts, where each begins, and the rows and shares of each. `experts`
 * and `starts` have one more: how many rows there are in all. */
typedef struct {
    const int64_t *chosen;
    const float *shares;
    int64_t *experts, *starts, *grouped_rows;
    float *grouped_shares;
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

/* Threads: work is cut into pieces that are handed out from a counter. */
typedef void (*piece_t)(void *context, int64_t piece);
void run_pieces(piece_t work, void *context, int64_t pieces);

/* The kernels for one set of instructions. They return 0, or 1: no memory, or what is said where they are defined. */
typedef struct {
    const char *name;
    int (*linear)(const linear_t *);
    int (*experts)(const experts_t *);
    int (*gated_mlp)(const mlp_t *);
    int (*add_weighted)(const add_t *);
    int (*mla)(const mla_t *);
    int (*grouped_attention)(const grouped_t *);
    int (*index_scores)(const index_t *);
    int (*top_positions)(const top_t *);
    int (*rms_norm)(const norm_t *);
    int (*layer_norm)(const norm_t *);
    int (*rotate)(const rotate_t *);
    int (*route)(const route_t *);
    int (*group_by_expert)(const group_t *);
    int (*logprobs)(const logprobs_t *);
    int (*all_finite)(const values_t *);
    int64_t (*read_memory)(const uint8_t *, int64_t); /* reads so many bytes; the result means nothing */
} kernels_t;

int linear(const linear_t *);
int experts(const experts_t *);
int gated_mlp(const mlp_t *);
int add_weighted(const add_t *);
int mla(const mla_t *);
int grouped_attention(const grouped_t *);
int index_scores(const index_t *);
int top_positions(const top_t *);
int rms_norm(const norm_t *);
int layer_norm(const norm_t *);
int rotate(const rotate_t *);
int route(const route_t *);
int group_by_expert(const group_t *);
int logprobs(const logprobs_t *);
int all_finite(const values_t *);
