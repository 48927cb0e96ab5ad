/* Attention of token rows over a KV cache whose rows are shared by groups of heads: what MLA and GQA have in common. */
#pragma once
#include "float_tile.h"
#include "matmul.h"

typedef struct {
    int64_t count, groups, heads; /* token rows; groups that share cache rows; heads of a group */
    int64_t position, window;     /* row t is position `position` + t; window 0: all positions up to its own */
    const int64_t *selection;     /* [count, topk]: the positions that a row attends to, ascending, then -1; or NULL */
    int64_t topk;
    const float *queries;         /* [count, groups, heads, width] */
    weight_t keys[2];             /* a key row is a row of each, padded to 16 columns; the second may have no columns */
    weight_t values;
    int64_t width, value;         /* columns of a padded key row; of a value row, padded to STRIP */
    const float *sinks;           /* [groups, heads]: one more score of each head, or NULL */
    float scale;
    float *mixed;                 /* out [count, groups, heads, value]: the weighted value rows */
} attention_t;

int attend(const attention_t *);

/* Rows of a KV cache as a matrix, for `dequantize`. */
INLINE int64_t kv_row_bytes(int64_t width) { return round_up(width, 2) + round_up(width, SEGMENT) / SEGMENT * 2; } /* INT8 */
INLINE weight_t cached(const void *rows, int kind, int64_t width) {
    if (kind != INT8) return (weight_t){.data = rows, .columns = width, .row_bytes = (kind == BF16 ? 2 : 4) * width, .kind = kind};
    const int64_t bytes = kv_row_bytes(width);
    return (weight_t){.data = rows, .scales = (const uint8_t *)rows + round_up(width, 2), .columns = width, .row_bytes = bytes,
                      .row_scales = bytes / 2, .group = SEGMENT, .kind = INT8, .scale_kind = BF16};
}
