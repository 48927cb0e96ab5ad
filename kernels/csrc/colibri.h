/* What the Python side hands over, and what the files of this folder share. kernels/native.py mirrors the structs. */
#pragma once
#include <stdint.h>

enum { F32, BF16, F16, FP8, INT8, INT4, INT3, INT2 };

/* A matrix [rows, columns] as kernels/packing.py describes it. */
typedef struct {
    const uint8_t *data;
    const void *scales;
    int64_t rows, columns, row_bytes;
    int32_t kind;       /* one of the above */
    int32_t group;      /* columns that share a scale; for a scale a row, all of them */
    int32_t scale_kind; /* F32, F16 or BF16 */
    int32_t exact;      /* activations stay float32 */
} weight_t;

/* out [count, rows] = x [count, columns] times weight, + bias. Strides in floats. Returns 0, or 1 out of memory. */
typedef struct {
    const weight_t *weight;
    const float *x, *bias;
    float *out;
    int64_t count, x_stride, out_stride;
} linear_t;

/* For each expert e, ascending: out[row] += share * down(silu(gate x[row]) * up x[row]) over its rows. */
typedef struct {
    const weight_t *matrices; /* gate, up, down of each expert */
    const int64_t *starts;    /* [experts + 1]: where the rows of an expert begin in `rows` and `shares` */
    const int64_t *rows;      /* rows of x and out, ascending within an expert */
    const float *shares;
    const float *x;
    float *out;
    int64_t experts, count, hidden, width;
} experts_t;

/* One sequence: `count` rows of queries behind `position` known positions (their own keys are in the cache already).
 * queries [count, heads, nope + rope], the rotary part rotated; latents [positions, latent], rope_keys [positions, rope];
 * selection [count, topk] positions ascending, filled with -1, or NULL: all up to its own. out [count, heads, value]. */
typedef struct {
    const weight_t *kv_b; /* [heads * (nope + value), latent] */
    const float *queries, *latents, *rope_keys;
    const int64_t *selection;
    float *out;
    int64_t count, position, topk, heads, nope, rope, value, latent;
    float scale;
} mla_t;

/* queries [count, heads, width], weights [count, heads], keys [positions, width] -> out [count, positions]. */
typedef struct {
    const float *queries, *weights, *keys;
    float *out;
    int64_t count, heads, width, positions;
} index_t;

/* Threads: work is cut into pieces that are handed out from a counter. */
typedef void (*piece_t)(void *context, int64_t piece);
void run_pieces(piece_t work, void *context, int64_t pieces);

/* The kernels for one set of instructions. */
typedef struct {
    const char *name;
    int (*linear)(const linear_t *);
    int (*experts)(const experts_t *);
    int (*mla)(const mla_t *);
    int (*index_scores)(const index_t *);
    int (*rms_norm)(const float *x, const float *weight, float *out, int64_t rows, int64_t n, int64_t x_stride, float eps);
    int (*sigmoid)(const float *x, float *out, int64_t n);
    int (*silu_product)(const float *gate, const float *up, float *out, int64_t n);
    int64_t (*read_memory)(const uint8_t *, int64_t); /* reads so many bytes; the result means nothing */
} kernels_t;
