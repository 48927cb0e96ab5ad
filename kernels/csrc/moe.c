/* Mixture of experts: the SwiGLU MLPs of a layer's experts, or one alone; assignments of tokens grouped by expert. */
#include <stdlib.h>

#include "matmul.h"

#define MOE_ROWS 1024 /* token rows of experts whose hidden values are held at once */

typedef struct {
    const experts_t *call;
    int64_t first, stop;       /* experts of this round */
    inputs_t in;               /* x, for gate and up */
    inputs_t hidden_in;        /* hidden, for down */
    const int64_t *ids;        /* 0, 1, 2 ...: rows of hidden */
    float *hidden, *up;        /* [rows of this round, width] */
} experts_job_t;

/* Token rows of x from place `start` of the assignments on. */
INLINE const int64_t *rows_of(const experts_job_t *job, int64_t start) {
    return (job->call->rows ? job->call->rows : job->ids) + start;
}

static int gate_up_item(void *context, int64_t item) {
    experts_job_t *job = context;
    const experts_t *c = job->call;
    int64_t per_expert = (c->width + ITEM_ROWS - 1) / ITEM_ROWS, e = job->first + item / per_expert;
    int64_t row = item % per_expert * ITEM_ROWS, stop = row + ITEM_ROWS < c->width ? row + ITEM_ROWS : c->width;
    int64_t start = c->starts[e], count = c->starts[e + 1] - start, at = start - c->starts[job->first];
    const weight_t *gate = c->matrices + 3 * e, *up = gate + 1;
    uint8_t *scratch = thread_scratch(work_bytes(gate));
    if (!scratch) return 1;
    float *g = job->hidden + at * c->width, *u = job->up + at * c->width;
    int64_t block = amx_blocks_before(c->starts + job->first, e - job->first);
    input_t for_gate = from_block(input_for(&job->in, gate), block), for_up = from_block(input_for(&job->in, up), block);
    matmul(gate, &for_gate, rows_of(job, start), count, row, stop, g, c->width, scratch);
    matmul(up, &for_up, rows_of(job, start), count, row, stop, u, c->width, scratch);
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = row; r < stop; r += 16) {
            float *a = g + i * c->width + r, *b = u + i * c->width + r;
            int64_t left = stop - r < 16 ? stop - r : 16, bias = e * c->width + r;
            vf x = vf_load_n(a, left), y = vf_load_n(b, left);
            if (c->gate_bias)
                x = clamped_swiglu(vf_add(x, vf_load_n(c->gate_bias + bias, left)), vf_add(y, vf_load_n(c->up_bias + bias, left)),
                                  c->limit, c->alpha);
            else x = swiglu(x, y);
            vf_store_n(a, x, left);
        }
    return 0;
}

static int down_item(void *context, int64_t item) {
    experts_job_t *job = context;
    const experts_t *c = job->call;
    int64_t row = item * ITEM_ROWS, stop = row + ITEM_ROWS < c->hidden ? row + ITEM_ROWS : c->hidden, most = 0;
    int64_t base = c->starts[job->first];
    for (int64_t e = job->first; e < job->stop; e++)
        most = c->starts[e + 1] - c->starts[e] > most ? c->starts[e + 1] - c->starts[e] : most;
    int64_t work = round_up(work_bytes(c->matrices + 2), 64);
    uint8_t *scratch = thread_scratch(work + 4 * most * ITEM_ROWS);
    if (!scratch) return 1;
    float *y = (float *)(scratch + work);
    for (int64_t e = job->first, block = 0; e < job->stop; block += amx_blocks_of(c->starts, e), e++) {
        int64_t start = c->starts[e], count = c->starts[e + 1] - start;
        const weight_t *down = c->matrices + 3 * e + 2;
        input_t in = from_block(input_for(&job->hidden_in, down), block);
        matmul(down, &in, job->ids + start - base, count, row, stop, y - row, ITEM_ROWS, scratch);
        for (int64_t i = 0; i < count; i++) {
            float *sum = y + i * ITEM_ROWS - row;
            for (int64_t r = row; c->down_bias && r < stop; r++) sum[r] += c->down_bias[e * c->hidden + r];
            int64_t at = c->topk_weights ? rows_of(job, start)[i] : c->out_rows ? c->out_rows[start + i] : start + i;
            float *out = c->out + at * c->hidden;
            if (c->topk_weights)
                for (int64_t r = row; r < stop; r++) out[r] = fmaf(c->topk_weights[start + i], sum[r], out[r]);
            else memcpy(out + row, sum + row, (size_t)(4 * (stop - row)));
        }
    }
    return 0;
}

int experts(const experts_t *c) {
    int64_t top_k = 0, round = 0;
    int few = 0, many = 0;
    for (int64_t e = 0, held = 0; e < c->experts; e++) {
        int64_t count = c->starts[e + 1] - c->starts[e];
        if (count < GEMM_INT_ROWS) few = FOR_GEMV; else many = FOR_GEMM;
        held = held && held + count > MOE_ROWS ? count : held + count;
        round = held > round ? held : round;
        top_k = count > top_k ? count : top_k;
    }
    if (!round) return 0;
    float *hidden = malloc((size_t)(8 * round * c->width));
    int64_t *ids = malloc((size_t)(8 * round));
    experts_job_t job = {.call = c, .ids = ids, .hidden = hidden, .up = hidden ? hidden + round * c->width : NULL};
    int failed = !hidden || !ids;
    for (int64_t i = 0; ids && i < round; i++) ids[i] = i;
    for (int64_t e = 0; e < c->experts && !failed; e++)
        for (int i = 0; i < 2; i++)
            failed |= prepare_for(&job.in, c->matrices + 3 * e + i, c->x, c->count, c->hidden, few | many);
    while (!failed && job.stop < c->experts) {
        job.first = job.stop++;
        while (job.stop < c->experts && c->starts[job.stop + 1] - c->starts[job.first] <= MOE_ROWS) job.stop++;
        const int64_t *starts = c->starts + job.first, groups = job.stop - job.first;
        int64_t rows = c->starts[job.stop] - c->starts[job.first];
        failed = prepare_amx_for(&job.in, rows_of(&job, c->starts[job.first]), starts, groups);
        if (!failed) failed = run_items(gate_up_item, &job, (job.stop - job.first) * ((c->width + ITEM_ROWS - 1) / ITEM_ROWS));
        for (int64_t e = job.first; e < job.stop && !failed; e++)
            failed |= prepare_for(&job.hidden_in, c->matrices + 3 * e + 2, hidden, rows, c->width, few | many);
        if (!failed) failed = prepare_amx_for(&job.hidden_in, ids, starts, groups);
        if (!failed) failed = run_items(down_item, &job, (c->hidden + ITEM_ROWS - 1) / ITEM_ROWS);
        free_inputs(&job.hidden_in);
    }
    free_inputs(&job.in);
    free(ids);
    free(hidden);
    return failed;
}

/* One gated MLP on all rows. */
int gated_mlp(const mlp_t *c) {
    const weight_t matrices[] = {*c->gate, *c->up, *c->down};
    const int64_t starts[] = {0, c->count};
    experts_t call = {.matrices = matrices, .starts = starts, .x = c->x, .out = c->out, .experts = 1, .count = c->count,
                      .hidden = c->gate->columns, .width = c->gate->rows};
    return experts(&call);
}

/* -------------------------------------------------------------------------------------------------------------------
 * out[rows[i]] += topk_weights[i] * outputs[i], i ascending; a work item is some columns of all of them */

#define ADD_COLUMNS 512

static int add_columns(const void *call, int64_t block) {
    const add_weighted_t *c = call;
    int64_t from = block * ADD_COLUMNS, stop = from + ADD_COLUMNS < c->columns ? from + ADD_COLUMNS : c->columns;
    for (int64_t i = 0; i < c->count; i++) {
        const float *y = c->outputs + i * c->columns;
        float *out = c->out + c->rows[i] * c->columns;
        vf weight = vf_set1(c->topk_weights[i]);
        int64_t j = from;
        for (; j + 16 <= stop; j += 16) vf_store(out + j, vf_fma(weight, vf_load(y + j), vf_load(out + j)));
        for (; j < stop; j++) out[j] = fmaf(c->topk_weights[i], y[j], out[j]);
    }
    return 0;
}

int add_weighted(const add_weighted_t *c) {
    return each_row(add_columns, c, (c->columns + ADD_COLUMNS - 1) / ADD_COLUMNS, c->count * ADD_COLUMNS);
}

/* Assignments with a weight, grouped by expert. Returns the number of distinct experts, or -1: no memory. */
int group_by_expert(const group_t *c) {
    int64_t *at = thread_scratch(8 * c->num_experts), count = c->rows * c->active, total = 0;
    int found = 0;
    if (!at) return -1;
    memset(at, 0, (size_t)(8 * c->num_experts));
    for (int64_t i = 0; i < count; i++) at[c->topk_ids[i]] += c->topk_weights[i] != 0;
    for (int64_t e = 0; e < c->num_experts; e++) {
        int64_t some = at[e];
        at[e] = total;
        if (!some) continue;
        c->experts[found] = e, c->starts[found++] = total;
        total += some;
    }
    c->starts[found] = c->experts[found] = total;
    for (int64_t i = 0; i < count; i++) {
        if (c->topk_weights[i] == 0) continue;
        int64_t place = at[c->topk_ids[i]]++;
        c->grouped_rows[place] = i / c->active, c->grouped_weights[place] = c->topk_weights[i];
    }
    return found;
}
