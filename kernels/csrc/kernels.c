/* The kernels for one set of instructions: compiled with NAME and one of AVX512VNNI, AVX512, AVX2 defined, or none. */
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

/* x [count, columns] as weights like `w` want it. Free in->memory. Returns 1 when there is no memory. */
typedef struct {
    input_t in;
    void *memory;
} prepared_t;

static int prepare(prepared_t *out, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts) {
    int64_t columns = w->columns, padded = up_to(columns, BLOCK_COLUMNS), segments = padded / SEGMENT;
    int rounds = is_integer(w->kind) && !w->exact, pads = !rounds && columns % 32;
    input_t *in = &out->in;
    memset(in, 0, sizeof *in);
    in->acts.kind = w->kind, in->acts.count = count, in->acts.columns = columns, in->acts.padded = padded;
    in->x = x, in->x_stride = x_stride;
    out->memory = NULL;
    if (!rounds && !pads) return 0;
    int64_t codes = count * padded, bytes = pads ? 4 * count * up_to(columns, 32) : 3 * codes + 8 * count * segments;
    if (posix_memalign(&out->memory, 64, (size_t)bytes)) return 1;
    prepare_t job = {in, x_stride, x, NULL};
    if (pads) {
        job.padded = out->memory, in->x = out->memory, in->x_stride = up_to(columns, 32);
    } else {
        int8_t *at = out->memory;
        if (is_odd_group(w)) in->acts.plain = at;
        else {
            if (layouts & STREAMS) in->acts.streams = at;
            if (layouts & TILES) in->acts.tiles = at + codes;
        }
        in->acts.scales = (float *)(at + 3 * codes);
        in->acts.sums = (int32_t *)(in->acts.scales + count * segments);
    }
    run_pieces(prepare_row, &job, count);
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
    return rounds ? w->kind + 8 * is_odd_group(w) : 16; /* floats all want the same */
}
static int prepare_for(inputs_t *inputs, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts) {
    int sort = sort_of(w);
    if (inputs->made[sort]) return 0;
    inputs->made[sort] = 1;
    return prepare(&inputs->sorts[sort], w, x, count, x_stride, layouts);
}
INLINE const input_t *input_for(const inputs_t *inputs, const weight_t *w) { return &inputs->sorts[sort_of(w)].in; }
static void free_inputs(inputs_t *inputs) {
    for (int i = 0; i < SORTS; i++)
        if (inputs->made[i]) free(inputs->sorts[i].memory);
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
    int failed;
} linear_job_t;

static void linear_piece(void *context, int64_t piece) {
    linear_job_t *job = context;
    const linear_t *c = job->call;
    const weight_t *w = c->weight;
    int64_t row = piece * PIECE_ROWS, stop = row + PIECE_ROWS < w->rows ? row + PIECE_ROWS : w->rows;
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
    if (prepare(&p, c->weight, c->x, c->count, c->x_stride, c->count < FEW ? STREAMS : TILES)) return 1;
    int64_t few[FEW], *rows = c->count <= FEW ? few : malloc((size_t)(8 * c->count));
    if (!rows) {
        free(p.memory);
        return 1;
    }
    for (int64_t i = 0; i < c->count; i++) rows[i] = i;
    linear_job_t job = {c, &p.in, rows, 0};
    run_pieces(linear_piece, &job, (c->weight->rows + PIECE_ROWS - 1) / PIECE_ROWS);
    if (rows != few) free(rows);
    free(p.memory);
    return job.failed;
}

/* -------------------------------------------------------------------------------------------------------------------
 * experts */

#define TOGETHER 1024 /* rows of experts whose hidden values are held at once */

typedef struct {
    const experts_t *call;
    int64_t first, stop;       /* experts of this round */
    inputs_t in;               /* x, for gate and up */
    inputs_t hidden_in;        /* hidden, for down */
    const int64_t *ids;        /* 0, 1, 2 ...: rows of hidden */
    float *hidden, *up;        /* [rows of this round, width] */
    int failed;
} experts_job_t;

static void up_piece(void *context, int64_t piece) {
    experts_job_t *job = context;
    const experts_t *c = job->call;
    int64_t per_expert = (c->width + PIECE_ROWS - 1) / PIECE_ROWS, e = job->first + piece / per_expert;
    int64_t row = piece % per_expert * PIECE_ROWS, stop = row + PIECE_ROWS < c->width ? row + PIECE_ROWS : c->width;
    int64_t start = c->starts[e], count = c->starts[e + 1] - start, at = start - c->starts[job->first];
    const weight_t *gate = c->matrices + 3 * e, *up = gate + 1;
    uint8_t *scratch = thread_scratch(work_bytes(gate));
    if (!scratch) {
        job->failed = 1;
        return;
    }
    float *g = job->hidden + at * c->width, *u = job->up + at * c->width;
    times(gate, input_for(&job->in, gate), c->rows + start, count, row, stop, g, c->width, scratch);
    times(up, input_for(&job->in, up), c->rows + start, count, row, stop, u, c->width, scratch);
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = row; r < stop; r += 16) {
            float *a = g + i * c->width + r, *b = u + i * c->width + r;
            if (stop - r >= 16) vf_store(a, silu_times(vf_load(a), vf_load(b)));
            else vf_store_n(a, silu_times(vf_load_n(a, stop - r), vf_load_n(b, stop - r)), stop - r);
        }
}

static void down_piece(void *context, int64_t piece) {
    experts_job_t *job = context;
    const experts_t *c = job->call;
    int64_t row = piece * PIECE_ROWS, stop = row + PIECE_ROWS < c->hidden ? row + PIECE_ROWS : c->hidden, most = 0;
    int64_t base = c->starts[job->first];
    for (int64_t e = job->first; e < job->stop; e++)
        most = c->starts[e + 1] - c->starts[e] > most ? c->starts[e + 1] - c->starts[e] : most;
    int64_t work = up_to(work_bytes(c->matrices + 2), 64);
    uint8_t *scratch = thread_scratch(work + 4 * most * PIECE_ROWS);
    if (!scratch) {
        job->failed = 1;
        return;
    }
    float *y = (float *)(scratch + work);
    for (int64_t e = job->first; e < job->stop; e++) {
        int64_t start = c->starts[e], count = c->starts[e + 1] - start;
        const weight_t *down = c->matrices + 3 * e + 2;
        times(down, input_for(&job->hidden_in, down), job->ids + start - base, count, row, stop, y - row, PIECE_ROWS, scratch);
        for (int64_t i = 0; i < count; i++) {
            float *out = c->out + c->rows[start + i] * c->hidden, share = c->shares[start + i];
            for (int64_t r = row; r < stop; r++) out[r] = fmaf(share, y[i * PIECE_ROWS + r - row], out[r]);
        }
    }
}

static int experts(const experts_t *c) {
    int64_t largest = 0, round = 0;
    int few = 0, many = 0;
    for (int64_t e = 0, held = 0; e < c->experts; e++) {
        int64_t count = c->starts[e + 1] - c->starts[e];
        if (count < FEW) few = STREAMS; else many = TILES;
        held = held && held + count > TOGETHER ? count : held + count;
        round = held > round ? held : round;
        largest = count > largest ? count : largest;
    }
    if (!round) return 0;
    float *hidden = malloc((size_t)(8 * round * c->width));
    int64_t *ids = malloc((size_t)(8 * round));
    experts_job_t job = {.call = c, .ids = ids, .hidden = hidden, .up = hidden ? hidden + round * c->width : NULL};
    job.failed = !hidden || !ids;
    for (int64_t i = 0; ids && i < round; i++) ids[i] = i;
    for (int64_t e = 0; e < c->experts && !job.failed; e++)
        for (int i = 0; i < 2; i++)
            job.failed |= prepare_for(&job.in, c->matrices + 3 * e + i, c->x, c->count, c->hidden, few | many);
    while (!job.failed && job.stop < c->experts) {
        job.first = job.stop++;
        while (job.stop < c->experts && c->starts[job.stop + 1] - c->starts[job.first] <= TOGETHER) job.stop++;
        int64_t rows = c->starts[job.stop] - c->starts[job.first];
        run_pieces(up_piece, &job, (job.stop - job.first) * ((c->width + PIECE_ROWS - 1) / PIECE_ROWS));
        for (int64_t e = job.first; e < job.stop && !job.failed; e++)
            job.failed |= prepare_for(&job.hidden_in, c->matrices + 3 * e + 2, hidden, rows, c->width, few | many);
        if (!job.failed) run_pieces(down_piece, &job, (c->hidden + PIECE_ROWS - 1) / PIECE_ROWS);
        free_inputs(&job.hidden_in);
    }
    free_inputs(&job.in);
    free(ids);
    free(hidden);
    return job.failed;
}

static int silu_product(const float *gate, const float *up, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) vf_store(out + i, silu_times(vf_load(gate + i), vf_load(up + i)));
    if (i < n) vf_store_n(out + i, silu_times(vf_load_n(gate + i, n - i), vf_load_n(up + i, n - i)), n - i);
    return 0;
}

/* -------------------------------------------------------------------------------------------------------------------
 * attention */

#include "attention.inc"

/* -------------------------------------------------------------------------------------------------------------------
 * Norm */

/* Rows of n columns: x / sqrt(mean(x^2) + eps) * weight; the squares go to 16 lanes, ascending. */
static int rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t n, int64_t x_stride, float eps) {
    for (int64_t r = 0; r < rows; r++, x += x_stride, out += n) {
        vf squares = vf_zero();
        int64_t c = 0;
        for (; c + 16 <= n; c += 16) squares = vf_fma(vf_load(x + c), vf_load(x + c), squares);
        if (c < n) {
            vf last = vf_load_n(x + c, n - c);
            squares = vf_fma(last, last, squares);
        }
        vf scale = vf_set1(1.0f / sqrtf(vf_sum(squares) / (float)n + eps));
        for (c = 0; c + 16 <= n; c += 16) vf_store(out + c, vf_mul(vf_mul(vf_load(x + c), scale), vf_load(weight + c)));
        if (c < n) {
            vf last = vf_mul(vf_mul(vf_load_n(x + c, n - c), scale), vf_load_n(weight + c, n - c));
            vf_store_n(out + c, last, n - c);
        }
    }
    return 0;
}

/* -------------------------------------------------------------------------------------------------------------------
 * The router's scores */

/* 1 / (1 + e^-x) of n values: e^-|x| is at most 1, so nothing overflows. NaN stays NaN. */
static int sigmoid(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        int64_t left = n - i < 16 ? n - i : 16;
        vf v = vf_load_n(x + i, left), e = vf_exp_negative(vf_sub(vf_zero(), vf_abs(v)));
        vf low = vf_div(vf_set1(1), vf_add(vf_set1(1), e)); /* of |x| */
        float a[16], b[16], c[16];
        vf_store(a, v), vf_store(b, low), vf_store(c, vf_mul(e, low));
        for (int64_t j = 0; j < left; j++) out[i + j] = a[j] >= 0 ? b[j] : a[j] < 0 ? c[j] : a[j];
    }
    return 0;
}

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
const kernels_t JOIN(kernels_, NAME) = {TEXT(NAME), linear, experts, mla, index_scores, rms_norm, sigmoid, silu_product, read_memory};
