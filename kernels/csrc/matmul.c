/* Matrix products in any format: activations as the weights want them, and `linear`. */
#include <stdlib.h>

#include "matmul.h"

/* -------------------------------------------------------------------------------------------------------------------
 * Activations, rounded to 8 bits in groups of 64 (kernels/reference.round_activations)
 *
 * For rows one at a time the codes of a block of 1,024 columns lie as the bytes of a weight block are unpacked (`streams`);
 * for many rows together segment after segment (`tiles`). Both hold the same numbers. */

/* A segment as weights are unpacked: of `parts` columns side by side the first ones, then the second ones, ... */
INLINE void part(int parts, const int8_t *codes, int8_t *out) {
    for (int p = 0; p < parts; p++)
        for (int i = 0; i < SEGMENT / parts; i++) out[p * (SEGMENT / parts) + i] = codes[i * parts + p];
}
/* Parted segment `s` to its place: weight bytes that hold several segments give the same part of all of them together. */
INLINE void put_stream(int together, const int8_t *parted, int64_t s, int8_t *row) {
    int64_t width = SEGMENT / together;
    int8_t *to = row + s / together * together * SEGMENT + s % together * width;
    for (int p = 0; p < together; p++) memcpy(to + p * SEGMENT, parted + p * width, (size_t)width);
}

/* One row: codes, scales, sums. A group with a NaN or an infinity gets the scale NaN, which spoils its products. */
static void round_row(const acts_t *a, int64_t row, const float *x) {
    int64_t segments = a->padded / SEGMENT;
    for (int64_t s = 0; s < segments; s++) {
        int64_t at = s * SEGMENT, n = a->columns - at;
        vf v[4], bad = vf_zero(), most = vf_zero();
        for (int i = 0; i < 4; i++) {
            int64_t left = n - 16 * i;
            v[i] = left >= 16 ? vf_load(x + at + 16 * i) : left > 0 ? vf_load_n(x + at + 16 * i, left) : vf_zero();
            bad = vf_add(bad, vf_sub(v[i], v[i]));
            most = vf_max(vf_abs(v[i]), most);
        }
        float scale = vf_max_of(most) / 127.0f;
        if (scale < FLT_MIN) scale = 0; /* too small to divide by */
        int broken = !(vf_sum(bad) == 0.0f);
        vf divisor = vf_set1(scale > 0 ? scale : 1.0f);
        int8_t codes[SEGMENT];
        int32_t sum = 0;
        for (int i = 0; i < 4; i++)
            vi_store_i8(codes + 16 * i, broken ? vi_zero() : vi_round(vf_div(v[i], divisor)));
        for (int i = 0; i < SEGMENT; i++) sum += codes[i];
        a->scales[row * segments + s] = broken ? NAN : scale;
        a->sums[row * segments + s] = sum * offset_of(a->kind);
        if (a->plain) memcpy(a->plain + row * a->padded + at, codes, SEGMENT);
        int8_t parted[SEGMENT];
        if (a->kind == INT4) part(2, codes, parted);
        else if (a->kind == INT8) memcpy(parted, codes, SEGMENT);
        else part(4, codes, parted);
        if (a->tiles) memcpy(a->tiles + row * a->padded + at, parted, SEGMENT);
        if (a->streams) {
            int8_t *to = a->streams + row * a->padded;
            if (a->kind == INT4) put_stream(2, parted, s, to);
            else if (a->kind == INT2) put_stream(4, parted, s, to);
            else put_stream(1, parted, s, to);
        }
    }
}

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

int prepare_for(inputs_t *inputs, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts) {
    int sort = sort_of(w);
    if (inputs->made[sort]) return 0;
    inputs->made[sort] = 1;
    return prepare(&inputs->sorts[sort], w, x, count, x_stride, layouts);
}
int blocks_for(inputs_t *inputs, const int64_t *rows, const int64_t *starts, int64_t groups) {
    int failed = 0;
    for (int i = 0; i < SORTS && !failed; i++)
        if (inputs->made[i]) failed = make_blocks(inputs->sorts + i, rows, starts, groups);
    return failed;
}
void free_inputs(inputs_t *inputs) {
    for (int i = 0; i < SORTS; i++)
        if (inputs->made[i]) free_prepared(inputs->sorts + i);
    memset(inputs, 0, sizeof *inputs);
}

void times(const weight_t *w, const input_t *in, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
           int64_t out_stride, uint8_t *scratch) {
    const acts_t *a = &in->acts;
    if (!is_integer(w->kind) || w->exact) gemm_float(w, in, rows, count, row, stop, out, out_stride, (float *)scratch);
    else if (count < FEW_CODES || is_odd_group(w)) gemv_int(w, a, rows, count, row, stop, out, out_stride);
    else gemm_int(w, a, rows, count, row, stop, out, out_stride, scratch);
}

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

int linear(const linear_t *c) {
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
