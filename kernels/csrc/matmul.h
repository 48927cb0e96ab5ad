/* Products of activations with a weight matrix in any format: declarations shared by the GEMM and GEMV files. */
#pragma once
#include "formats.h"
#include "pool.h"

#define GEMM_ROWS 16 /* from this many token rows on GEMM, below GEMV; for integer weights: */
#if defined(AVX512AMX)
#define GEMM_INT_ROWS 8
#elif defined(AVX2)
#define GEMM_INT_ROWS 6
#else
#define GEMM_INT_ROWS GEMM_ROWS
#endif
#define GEMV_ROWS 4  /* token rows that one pass over a weight row serves */
#define ITEM_ROWS 32 /* weight rows of a work item */
#define LARGE_COUNT 128 /* from this many token rows on an item is larger, so that activations are read less often */
#define LARGE_ITEM_ROWS 128
#define TILE_ROWS 32
#ifdef AVX512AMX
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif
#define FLOAT_COLUMNS 512
#define FLOAT_ROWS 8 /* float weight rows that are dequantized together, at most */
#define BLOCK_ROWS 16

/* Quantized activations: dynamic int8, a scale for 64 columns (kernels/reference.quantize_activations). GEMV and GEMM want
 * the same codes in different orders: as the bytes of a block of 1,024 weight columns unpack, or segment after segment. */
typedef struct {
    int kind;
    int64_t count, columns, padded; /* padded: whole blocks */
    int8_t *gemv_codes, *gemm_codes, *row_codes; /* [count, padded], row_codes in column order; NULL where not needed */
    float *scales;      /* [count, padded / 64] */
    int32_t *sums;      /* [count, padded / 64]: of the codes of a segment, times the offset of the weights' codes */
    int8_t *amx_codes;  /* AMX: [blocks, padded / 64, 16 times 4 columns, 16 rows, 4] */
    float *amx_scales;  /* [blocks, padded / 64, 16 rows] */
} quantized_t;

/* Activations as weights of one kind read them. */
typedef struct {
    quantized_t quantized;
    const float *x; /* [count, columns padded to 32]: for float weights */
    int64_t x_stride;
} input_t;

/* The same input from an AMX block on. */
INLINE input_t from_block(const input_t *in, int64_t block) {
    input_t out = *in;
    if (out.quantized.amx_codes) {
        out.quantized.amx_codes += block * BLOCK_ROWS * out.quantized.padded;
        out.quantized.amx_scales += block * BLOCK_ROWS * (out.quantized.padded / SEGMENT);
    }
    return out;
}

INLINE int64_t tile_stride(int64_t columns) { return round_up(columns, BLOCK_COLUMNS) + 64; } /* bytes of a row of a tile */
INLINE int64_t tile_bytes(int64_t columns) { /* with its scales */
    return (tile_stride(columns) + 4 * round_up(columns, BLOCK_COLUMNS) / SEGMENT) * TILE_ROWS;
}

/* Bytes of `scratch` for weights of this many columns. */
INLINE int64_t scratch_bytes(int64_t columns) { return tile_bytes(columns) * LARGE_ITEM_ROWS / TILE_ROWS; }
INLINE int64_t work_bytes(const weight_t *w) {
    int64_t row_floats = 4 * FLOAT_ROWS * FLOAT_COLUMNS, tile = scratch_bytes(w->columns);
    return row_floats > tile ? row_floats : tile;
}

/* Token row rows[i] of the input times weight rows row .. stop -> out[i * out_stride + row]. At most ITEM_ROWS of them,
 * LARGE_ITEM_ROWS for gemm_int. */
void matmul(const weight_t *w, const input_t *in, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
           int64_t out_stride, uint8_t *scratch);
void gemv_int(const weight_t *w, const quantized_t *a, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
              int64_t out_stride);
void gemm_int(const weight_t *w, const quantized_t *a, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
              int64_t out_stride, uint8_t *scratch);
void gemm_float(const weight_t *w, const input_t *in, const int64_t *rows, int64_t count, int64_t row, int64_t stop,
                float *out, int64_t out_stride, float *row_floats);

enum { FOR_GEMV = 1, FOR_GEMM = 2 };

typedef struct {
    input_t in;
    void *memory, *amx_memory;
} prepared_t;

INLINE int64_t amx_blocks_of(const int64_t *starts, int64_t group) {
    int64_t count = starts[group + 1] - starts[group];
    return count < GEMM_INT_ROWS ? 0 : (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
}
INLINE int64_t amx_blocks_before(const int64_t *starts, int64_t group) {
    int64_t blocks = 0;
    for (int64_t g = 0; g < group; g++) blocks += amx_blocks_of(starts, g);
    return blocks;
}

/* The same x as each kind of weight reads it, prepared when the first weight of a kind needs it. */
#define INPUT_KINDS 32
typedef struct {
    prepared_t by_kind[INPUT_KINDS];
    int made[INPUT_KINDS];
} inputs_t;

INLINE int input_kind(const weight_t *w) {
    int quantizes = is_integer(w->kind) && !w->exact;
    return quantizes ? w->kind + 8 * is_odd_group(w) : 0; /* all float weights read the same */
}

int prepare_for(inputs_t *inputs, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts);
int prepare_amx_for(inputs_t *inputs, const int64_t *rows, const int64_t *starts, int64_t groups);
void free_inputs(inputs_t *inputs);
INLINE const input_t *input_for(const inputs_t *inputs, const weight_t *w) { return &inputs->by_kind[input_kind(w)].in; }
