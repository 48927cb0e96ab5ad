/* Matrix products in any format: what the files that compute them share. */
#pragma once
#include "formats.h"
#include "pool.h"

#define FEW 16 /* rows of activations below which weights are read row by row; of integer weights: */
#define FEW_CODES (MATRICES ? 8 : FEW)
#define MAX_TOGETHER 4
#define PIECE_ROWS 32
#define MANY 128 /* ... and from which on more rows of integer weights are unpacked at once, to read x less often */
#define MANY_PIECE_ROWS 128
#define TILE_ROWS 32
#ifdef AVX512AMX
#define MATRICES 1
#else
#define MATRICES 0
#endif
#define FLOAT_COLUMNS 1024
#define BLOCK_ROWS 16

typedef struct {
    int kind;
    int64_t count, columns, padded; /* padded: whole blocks */
    int8_t *streams, *tiles, *plain; /* [count, padded]; those that are not needed are NULL */
    float *scales;                  /* [count, padded / 64] */
    int8_t *blocks;                 /* with MATRICES, of 16 rows: [blocks, padded / 64, 16 times 4 columns, 16 rows, 4] */
    float *block_scales;            /* [blocks, padded / 64, 16 rows] */
    int32_t *sums;                  /* of the codes of each segment, times the offset of the weights' codes */
} acts_t;

/* What products with weights of one kind need of x. */
typedef struct {
    acts_t acts;
    const float *x; /* [count, columns padded to 32]: float weights read it */
    int64_t x_stride;
} input_t;

/* The same, blocks of activations from one of them on. */
INLINE input_t from_block(const input_t *in, int64_t block) {
    input_t out = *in;
    if (out.acts.blocks) {
        out.acts.blocks += block * BLOCK_ROWS * out.acts.padded;
        out.acts.block_scales += block * BLOCK_ROWS * (out.acts.padded / SEGMENT);
    }
    return out;
}

INLINE int64_t tile_stride(int64_t columns) { return up_to(columns, BLOCK_COLUMNS) + 64; } /* bytes of a row of a tile */
INLINE int64_t tile_bytes(int64_t columns) { /* with its scales */
    return (tile_stride(columns) + 4 * up_to(columns, BLOCK_COLUMNS) / SEGMENT) * TILE_ROWS;
}


/* Bytes of `scratch` for weights of so many columns. */
INLINE int64_t scratch_bytes(int64_t columns) { return tile_bytes(columns) * MANY_PIECE_ROWS / TILE_ROWS; }
INLINE int64_t work_bytes(const weight_t *w) {
    int64_t wide = 4 * 4 * FLOAT_COLUMNS, tile = scratch_bytes(w->columns);
    return wide > tile ? wide : tile;
}

/* rows[i] of the input times rows row .. stop of the weight -> out(i, row): i * out_stride + row. At most PIECE_ROWS, with
 * tiles MANY_PIECE_ROWS. */
void times(const weight_t *w, const input_t *in, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
           int64_t out_stride, uint8_t *scratch);
void gemv_int(const weight_t *w, const acts_t *a, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
              int64_t out_stride);
void gemm_int(const weight_t *w, const acts_t *a, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
              int64_t out_stride, uint8_t *scratch);
void gemm_float(const weight_t *w, const input_t *in, const int64_t *rows, int64_t count, int64_t row, int64_t stop,
                float *out, int64_t out_stride, float *wide);

enum { STREAMS = 1, TILES = 2 };

typedef struct {
    input_t in;
    void *memory, *blocks;
} prepared_t;

INLINE int64_t blocks_of(const int64_t *starts, int64_t group) {
    int64_t count = starts[group + 1] - starts[group];
    return count < FEW_CODES ? 0 : (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
}
INLINE int64_t blocks_before(const int64_t *starts, int64_t group) {
    int64_t blocks = 0;
    for (int64_t g = 0; g < group; g++) blocks += blocks_of(starts, g);
    return blocks;
}

/* The same x for weights of several kinds: what each of them wants, made when the first of its kind asks. */
#define SORTS 32
typedef struct {
    prepared_t sorts[SORTS];
    int made[SORTS];
} inputs_t;

INLINE int sort_of(const weight_t *w) {
    int rounds = is_integer(w->kind) && !w->exact;
    return rounds ? w->kind + 8 * is_odd_group(w) : 0; /* floats all want the same */
}

int prepare_for(inputs_t *inputs, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts);
int blocks_for(inputs_t *inputs, const int64_t *rows, const int64_t *starts, int64_t groups);
void free_inputs(inputs_t *inputs);
INLINE const input_t *input_for(const inputs_t *inputs, const weight_t *w) { return &inputs->sorts[sort_of(w)].in; }
