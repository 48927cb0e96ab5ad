/* The kernels for one set of instructions: compiled with NAME and one of AVX512AMX, AVX512VNNI, AVX512, AVX2 ...
 * defined, or none. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "colibri.h"
#include "pool.h"
#include "simd.h"

#include "matmul.inc"

/* -------------------------------------------------------------------------------------------------------------------
 * Input: what the products of one call share */

typedef struct {
    input_t *in;
    int64_t x_stride;
    const float *x;
    float *padded;
} prepare_t;

static void prepare_row(void *context, int64_t row) {
    prepare_t *p = context;
    const float *x = p->x + row * p->x_stride;
    if (p->in->acts.scales) round_row(&p->in->acts, row, x);
    if (p->padded) {
        float *to = p->padded + row * p->in->x_stride;
        int64_t n = p->in->acts.columns;
        memcpy(to, x, (size_t)(4 * n));
        memset(to + n, 0, (size_t)(4 * (p->in->x_stride - n)));
    }
}

enum { STREAMS = 1, TILES = 2 };

typedef struct {
    input_t in;
    void *memory, *blocks;
} prepared_t;

static void free_prepared(prepared_t *p) {
    free(p->memory);
    free(p->blocks);
}

/* x [count, columns] as weights like `w` want it. Returns 1 when there is no memory. */

static int prepare(prepared_t *out, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts) {
    int64_t columns = w->columns, padded = up_to(columns, BLOCK_COLUMNS), segments = padded / SEGMENT;
    int rounds = is_integer(w->kind) && !w->exact, pads = !rounds && columns % 32;
    input_t *in = &out->in;
    memset(in, 0, sizeof *in);
    in->acts.kind = w->kind, in->acts.count = count, in->acts.columns = columns, in->acts.padded = padded;
    in->x = x, in->x_stride = x_stride;
    out->memory = out->blocks = NULL;
    if (!rounds && !pads) return 0;
    int is_odd = is_odd_group(w), streams = !is_odd && layouts & STREAMS, tiles = !is_odd && layouts & TILES;
    int64_t codes = count * padded;
    int64_t bytes = pads ? 4 * count * up_to(columns, 32) : (is_odd + !!streams + !!tiles) * codes + 8 * count * segments;
    if (posix_memalign(&out->memory, 64, (size_t)bytes)) return 1;
    prepare_t job = {in, x_stride, x, NULL};
    if (pads) {
        job.padded = out->memory, in->x = out->memory, in->x_stride = up_to(columns, 32);
    } else {
        int8_t *at = out->memory;
        if (is_odd) in->acts.plain = at, at += codes;
        if (streams) in->acts.streams = at, at += codes;
        if (tiles) in->acts.tiles = at, at += codes;
        in->acts.scales = (float *)at;
        in->acts.sums = (int32_t *)(in->acts.scales + count * segments);
    }
    run_pieces(prepare_row, &job, count);
    return 0;
}

/* For MATRICES: rows[starts[g]] up to rows[starts[g + 1]] of each group in blocks, where there are FEW_CODES or more. */
typedef struct {
    acts_t *acts;
    const int64_t *rows, *starts;
    int64_t groups;
} blocks_job_t;

INLINE int64_t blocks_of(const int64_t *starts, int64_t group) {
    int64_t count = starts[group + 1] - starts[group];
    return count < FEW_CODES ? 0 : (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
}
INLINE int64_t blocks_before(const int64_t *starts, int64_t group) {
    int64_t blocks = 0;
    for (int64_t g = 0; g < group; g++) blocks += blocks_of(starts, g);
    return blocks;
}

static void group_blocks(void *context, int64_t group) {
    blocks_job_t *job = context;
    acts_t *a = job->acts;
    int64_t segments = a->padded / SEGMENT, block = blocks_before(job->starts, group);
    int64_t from = job->starts[group] - job->starts[0], stop = from + job->starts[group + 1] - job->starts[group];
    for (int64_t last = block + blocks_of(job->starts, group); block < last; block++, from += BLOCK_ROWS) {
        int8_t *codes = a->blocks + block * BLOCK_ROWS * a->padded;
        float *scales = a->block_scales + block * BLOCK_ROWS * segments;
        const int64_t *rows = job->rows + from;
        for (int64_t s = 0; s < segments; s++) {
            vi r[BLOCK_ROWS];
            for (int64_t i = 0; i < BLOCK_ROWS; i++) {
                int is_row = from + i < stop;
                r[i] = is_row ? vi_load((const int32_t *)(a->tiles + rows[i] * a->padded + s * SEGMENT)) : vi_zero();
                scales[s * BLOCK_ROWS + i] = is_row ? a->scales[rows[i] * segments + s] : 0;
            }
            vi_transpose(r);
            for (int64_t i = 0; i < BLOCK_ROWS; i++)
                vi_store((int32_t *)(codes + (s * BLOCK_ROWS + i) * SEGMENT), r[i]);
        }
    }
}

static int make_blocks(prepared_t *p, const int64_t *rows, const int64_t *starts, int64_t groups) {
    acts_t *a = &p->in.acts;
    if (!MATRICES || !a->tiles) return 0;
    free(p->blocks);
    p->blocks = NULL;
    int64_t count = BLOCK_ROWS * blocks_before(starts, groups);
    if (posix_memalign(&p->blocks, 64, (size_t)(count * (a->padded + 4 * a->padded / SEGMENT)))) return 1;
    a->blocks = p->blocks, a->block_scales = (float *)(a->blocks + count * a->padded);
    blocks_job_t job = {a, rows, starts, groups};
    run_pieces(group_blocks, &job, groups);
    return 0;
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
static int prepare_for(inputs_t *inputs, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts) {
    int sort = sort_of(w);
    if (inputs->made[sort]) return 0;
    inputs->made[sort] = 1;
    return prepare(&inputs->sorts[sort], w, x, count, x_stride, layouts);
}
INLINE const input_t *input_for(const inputs_t *inputs, const weight_t *w) { return &inputs->sorts[sort_of(w)].in; }
static int blocks_for(inputs_t *inputs, const int64_t *rows, const int64_t *starts, int64_t groups) {
    int failed = 0;
    for (int i = 0; i < SORTS && !failed; i++)
        if (inputs->made[i]) failed = make_blocks(inputs->sorts + i, rows, starts, groups);
    return failed;
}
static void free_inputs(inputs_t *inputs) {
    for (int i = 0; i < SORTS; i++)
        if (inputs->made[i]) free_prepared(inputs->sorts + i);
    memset(inputs, 0, sizeof *inputs);
}

static int64_t work_bytes(const weight_t *w) {
    int64_t wide = 4 * 4 * FLOAT_COLUMNS, tile = scratch_bytes(w->columns);
    return wide > tile ? wide : tile;
}

/* -------------------------------------------------------------------------------------------------------------------
 * linear */

typedef struct {
    const linear_t *call;
    const input_t *in;
    const int64_t *rows;
    int64_t piece_rows;
    int failed;
} linear_job_t;

static void linear_piece(void *context, int64_t piece) {
    linear_job_t *job = context;
    const linear_t *c = job->call;
    const weight_t *w = c->weight;
    int64_t row = piece * job->piece_rows, stop = row + job->piece_rows < w->rows ? row + job->piece_rows : w->rows;
    uint8_t *scratch = thread_scratch(work_bytes(w));
    if (!scratch) {
        job->failed = 1;
        return;
    }
    times(w, job->in, job->rows, c->count, row, stop, c->out, c->out_stride, scratch);
    if (c->bias)
        for (int64_t i = 0; i < c->count; i++)
            for (int64_t r = row; r < stop; r++) c->out[i * c->out_stride + r] += c->bias[r];
}

static int linear(const linear_t *c) {
    prepared_t p;
    if (!c->count) return 0;
    if (prepare(&p, c->weight, c->x, c->count, c->x_stride, c->count < FEW_CODES ? STREAMS : TILES)) return 1;
    int64_t few[FEW], *rows = c->count <= FEW ? few : malloc((size_t)(8 * c->count));
    if (!rows) {
        free_prepared(&p);
        return 1;
    }
    for (int64_t i = 0; i < c->count; i++) rows[i] = i;
    const int64_t starts[] = {0, c->count};
    int64_t each = p.in.acts.tiles && c->count >= MANY ? MANY_PIECE_ROWS : PIECE_ROWS;
    linear_job_t job = {c, &p.in, rows, each, make_blocks(&p, rows, starts, 1)};
    if (!job.failed) run_pieces(linear_piece, &job, (c->weight->rows + each - 1) / each);
    if (rows != few) free(rows);
    free_prepared(&p);
    return job.failed;
}

#include "experts.inc"
#include "attention.inc"
#include "grouped.inc"
#include "rows.inc"
#include "choose.inc"

/* -------------------------------------------------------------------------------------------------------------------
 * A plain read of memory, what everything else is measured against */

#define READ_BYTES (1 << 20)

typedef struct {
    const uint8_t *data;
    int64_t bytes;
    _Atomic int64_t sum;
} read_job_t;

static void read_piece(void *context, int64_t piece) {
    read_job_t *job = context;
    const uint8_t *p = job->data + piece * READ_BYTES;
    int64_t n = job->bytes - piece * READ_BYTES < READ_BYTES ? job->bytes - piece * READ_BYTES : READ_BYTES;
    vi a = vi_zero(), b = vi_zero();
    for (int64_t i = 0; i + 128 <= n; i += 128) {
        __builtin_prefetch(p + i + PAGE_AHEAD);
        __builtin_prefetch(p + i + PAGE_AHEAD + 64);
        a = vi_add(a, vi_load((const int32_t *)(p + i))), b = vi_add(b, vi_load((const int32_t *)(p + i + 64)));
    }
    int32_t lanes[16];
    vi_store(lanes, vi_add(a, b));
    job->sum += lanes[0] ^ lanes[7];
}

static int64_t read_memory(const uint8_t *data, int64_t bytes) {
    read_job_t job = {data, bytes, 0};
    run_pieces(read_piece, &job, (bytes + READ_BYTES - 1) / READ_BYTES);
    return job.sum;
}

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
const kernels_t JOIN(kernels_, NAME) = {
    TEXT(NAME), linear, experts, gated_mlp, add_weighted, mla, grouped_attention, index_scores, top_positions, rms_norm, layer_norm, rotate,
    route, group_by_expert, logprobs, all_finite, read_memory,
};
