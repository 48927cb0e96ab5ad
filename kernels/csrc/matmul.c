/* Products of activations with a weight matrix in any format: activation quantization, GEMV or GEMM, and `linear`. */
#include <stdlib.h>

#include "matmul.h"

/* A segment in the order in which weights unpack: of `parts` neighboring columns all first ones, all second ones, ... */
INLINE void deinterleave(int parts, const int8_t *codes, int8_t *out) {
    for (int p = 0; p < parts; p++)
        for (int i = 0; i < SEGMENT / parts; i++) out[p * (SEGMENT / parts) + i] = codes[i * parts + p];
}
/* Store segment `s` for GEMV: weight bytes that hold `together` segments unpack to the same part of all of them. */
INLINE void put_gemv_codes(int together, const int8_t *deinterleaved, int64_t s, int8_t *row) {
    int64_t width = SEGMENT / together;
    int8_t *to = row + s / together * together * SEGMENT + s % together * width;
    for (int p = 0; p < together; p++) memcpy(to + p * SEGMENT, deinterleaved + p * width, (size_t)width);
}

/* Quantize one token row: codes, scales, sums. A group with a NaN or an infinity gets the scale NaN, so that every product
 * with it is NaN. */
static void quantize_row(const quantized_t *a, int64_t row, const float *x) {
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
        if (a->row_codes) memcpy(a->row_codes + row * a->padded + at, codes, SEGMENT);
        int8_t deinterleaved[SEGMENT];
        if (a->kind == INT4) deinterleave(2, codes, deinterleaved);
        else if (a->kind == INT8) memcpy(deinterleaved, codes, SEGMENT);
        else deinterleave(4, codes, deinterleaved);
        if (a->gemm_codes) memcpy(a->gemm_codes + row * a->padded + at, deinterleaved, SEGMENT);
        if (a->gemv_codes) {
            int8_t *to = a->gemv_codes + row * a->padded;
            if (a->kind == INT4) put_gemv_codes(2, deinterleaved, s, to);
            else if (a->kind == INT2) put_gemv_codes(4, deinterleaved, s, to);
            else put_gemv_codes(1, deinterleaved, s, to);
        }
    }
}

typedef struct {
    input_t *in;
    int64_t x_stride;
    const float *x;
    float *padded;
} prepare_t;

static int prepare_row(void *context, int64_t row) {
    prepare_t *p = context;
    const float *x = p->x + row * p->x_stride;
    if (p->in->quantized.scales) quantize_row(&p->in->quantized, row, x);
    if (p->padded) {
        float *to = p->padded + row * p->in->x_stride;
        int64_t n = p->in->quantized.columns;
        memcpy(to, x, (size_t)(4 * n));
        memset(to + n, 0, (size_t)(4 * (p->in->x_stride - n)));
    }
    return 0;
}

static void free_prepared(prepared_t *p) {
    free(p->memory);
    free(p->amx_memory);
}

/* Make of x [count, columns] the input for weights like `w`. Returns 1 out of memory. */
static int prepare(prepared_t *out, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts) {
    int64_t columns = w->columns, padded = round_up(columns, BLOCK_COLUMNS), segments = padded / SEGMENT;
    int quantizes = is_integer(w->kind) && !w->exact, pads = !quantizes && columns % 32;
    input_t *in = &out->in;
    memset(in, 0, sizeof *in);
    in->quantized.kind = w->kind, in->quantized.count = count, in->quantized.columns = columns, in->quantized.padded = padded;
    in->x = x, in->x_stride = x_stride;
    out->memory = out->amx_memory = NULL;
    if (!quantizes && !pads) return 0;
    int is_odd = is_odd_group(w), for_gemv = !is_odd && layouts & FOR_GEMV, for_gemm = !is_odd && layouts & FOR_GEMM;
    int64_t codes = count * padded;
    int64_t bytes = pads ? 4 * count * round_up(columns, 32) : (is_odd + !!for_gemv + !!for_gemm) * codes + 8 * count * segments;
    if (posix_memalign(&out->memory, 64, (size_t)bytes)) return 1;
    prepare_t job = {in, x_stride, x, NULL};
    if (pads) {
        job.padded = out->memory, in->x = out->memory, in->x_stride = round_up(columns, 32);
    } else {
        int8_t *at = out->memory;
        if (is_odd) in->quantized.row_codes = at, at += codes;
        if (for_gemv) in->quantized.gemv_codes = at, at += codes;
        if (for_gemm) in->quantized.gemm_codes = at, at += codes;
        in->quantized.scales = (float *)at;
        in->quantized.sums = (int32_t *)(in->quantized.scales + count * segments);
    }
    return run_items(prepare_row, &job, count);
}

/* AMX: token rows rows[starts[g]] .. rows[starts[g + 1]] of each group in blocks, where they are GEMM_INT_ROWS or more. */
typedef struct {
    quantized_t *quantized;
    const int64_t *rows, *starts;
    int64_t groups;
} amx_job_t;

static int amx_blocks_item(void *context, int64_t group) {
    amx_job_t *job = context;
    quantized_t *a = job->quantized;
    int64_t segments = a->padded / SEGMENT, block = amx_blocks_before(job->starts, group);
    int64_t from = job->starts[group] - job->starts[0], stop = from + job->starts[group + 1] - job->starts[group];
    for (int64_t last = block + amx_blocks_of(job->starts, group); block < last; block++, from += BLOCK_ROWS) {
        int8_t *codes = a->amx_codes + block * BLOCK_ROWS * a->padded;
        float *scales = a->amx_scales + block * BLOCK_ROWS * segments;
        const int64_t *rows = job->rows + from;
        for (int64_t s = 0; s < segments; s++) {
            vi r[BLOCK_ROWS];
            for (int64_t i = 0; i < BLOCK_ROWS; i++) {
                int is_row = from + i < stop;
                r[i] = is_row ? vi_load((const int32_t *)(a->gemm_codes + rows[i] * a->padded + s * SEGMENT)) : vi_zero();
                scales[s * BLOCK_ROWS + i] = is_row ? a->scales[rows[i] * segments + s] : 0;
            }
            vi_transpose(r);
            for (int64_t i = 0; i < BLOCK_ROWS; i++)
                vi_store((int32_t *)(codes + (s * BLOCK_ROWS + i) * SEGMENT), r[i]);
        }
    }
    return 0;
}

static int prepare_amx(prepared_t *p, const int64_t *rows, const int64_t *starts, int64_t groups) {
    quantized_t *a = &p->in.quantized;
    if (!HAS_AMX || !a->gemm_codes) return 0;
    free(p->amx_memory);
    p->amx_memory = NULL;
    int64_t count = BLOCK_ROWS * amx_blocks_before(starts, groups);
    if (posix_memalign(&p->amx_memory, 64, (size_t)(count * (a->padded + 4 * a->padded / SEGMENT)))) return 1;
    a->amx_codes = p->amx_memory, a->amx_scales = (float *)(a->amx_codes + count * a->padded);
    amx_job_t job = {a, rows, starts, groups};
    return run_items(amx_blocks_item, &job, groups);
}

int prepare_for(inputs_t *inputs, const weight_t *w, const float *x, int64_t count, int64_t x_stride, int layouts) {
    int kind = input_kind(w);
    if (inputs->made[kind]) return 0;
    inputs->made[kind] = 1;
    return prepare(&inputs->by_kind[kind], w, x, count, x_stride, layouts);
}
int prepare_amx_for(inputs_t *inputs, const int64_t *rows, const int64_t *starts, int64_t groups) {
    int failed = 0;
    for (int i = 0; i < INPUT_KINDS && !failed; i++)
        if (inputs->made[i]) failed = prepare_amx(inputs->by_kind + i, rows, starts, groups);
    return failed;
}
void free_inputs(inputs_t *inputs) {
    for (int i = 0; i < INPUT_KINDS; i++)
        if (inputs->made[i]) free_prepared(inputs->by_kind + i);
    memset(inputs, 0, sizeof *inputs);
}

void matmul(const weight_t *w, const input_t *in, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
           int64_t out_stride, uint8_t *scratch) {
    const quantized_t *a = &in->quantized;
    if (!is_integer(w->kind) || w->exact) gemm_float(w, in, rows, count, row, stop, out, out_stride, (float *)scratch);
    else if (count < GEMM_INT_ROWS || is_odd_group(w)) gemv_int(w, a, rows, count, row, stop, out, out_stride);
    else gemm_int(w, a, rows, count, row, stop, out, out_stride, scratch);
}

typedef struct {
    const linear_t *call;
    const input_t *in;
    const int64_t *rows;
    int64_t item_rows;
} linear_job_t;

static int linear_item(void *context, int64_t item) {
    linear_job_t *job = context;
    const linear_t *c = job->call;
    const weight_t *w = c->weight;
    int64_t row = item * job->item_rows, stop = row + job->item_rows < w->rows ? row + job->item_rows : w->rows;
    uint8_t *scratch = thread_scratch(work_bytes(w));
    if (!scratch) return 1;
    matmul(w, job->in, job->rows, c->count, row, stop, c->out, c->out_stride, scratch);
    if (c->bias)
        for (int64_t i = 0; i < c->count; i++)
            for (int64_t r = row; r < stop; r++) c->out[i * c->out_stride + r] += c->bias[r];
    return 0;
}

int linear(const linear_t *c) {
    prepared_t p;
    if (!c->count) return 0;
    if (prepare(&p, c->weight, c->x, c->count, c->x_stride, c->count < GEMM_INT_ROWS ? FOR_GEMV : FOR_GEMM)) return 1;
    int64_t few[GEMM_ROWS], *rows = c->count <= GEMM_ROWS ? few : malloc((size_t)(8 * c->count));
    if (!rows) {
        free_prepared(&p);
        return 1;
    }
    for (int64_t i = 0; i < c->count; i++) rows[i] = i;
    const int64_t starts[] = {0, c->count};
    int64_t each = p.in.quantized.gemm_codes && c->count >= LARGE_COUNT ? LARGE_ITEM_ROWS : ITEM_ROWS;
    linear_job_t job = {c, &p.in, rows, each};
    int failed = prepare_amx(&p, rows, starts, 1) || run_items(linear_item, &job, (c->weight->rows + each - 1) / each);
    if (rows != few) free(rows);
    free_prepared(&p);
    return failed;
}
