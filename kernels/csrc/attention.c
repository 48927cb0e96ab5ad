/* Attention over a KV cache. Scores first, then a softmax over a whole row, then the weighted sum of value rows.
 *
 * Cache rows are copied to a block of floats that stays in the L1 or L2 cache, once for all token rows and heads of a work
 * item; where these are few, rows of floats are read where they lie. Many token rows: an item is a few of them and some heads, from scores to sums. Few: the scores are split over
 * positions and the sums over columns, so that all threads work and each cache row is read twice in all. The order of every
 * sum is the same: a score as of dot_tile, the sum over positions ascending. */

#include <stdlib.h>

#include "attention.h"

#define FEW_TOKENS 8
#define ITEM_TOKEN_HEADS 64        /* token rows times heads of an item */
#define ITEM_HEADS 16
#define ITEM_SCORES (1 << 20)      /* floats; an item has fewer token rows before it has more */
#define FEW_SCORES (16 << 20)
#define KEYS_AT_ONCE (2 * DOT_B)
#define VALUES_AT_ONCE 32
#define IN_PLACE_ROWS 16           /* token rows times heads from which on a copy of cache rows pays */
#define IN_PLACE_VALUES 8          /* more of them, 2^n bytes apart, would evict each other */
#define POSITIONS_EACH 16          /* of an item that computes scores */
#define SOFTMAX_HEADS 4

/* Softmax without its last division: p [visible scores, padded to 16] -> e^(p - largest), 0 beyond; returns 1 / their sum.
 * A sink is one more score. */
static float softmax_scale(float *p, int64_t visible, const float *sink) {
    int64_t padded = round_up(visible, 16);
    vf most = vf_set1(p[0]), sum = vf_zero(), bad = vf_zero();
    for (int64_t s = visible; s < padded; s++) p[s] = p[0]; /* counts for the maximum only */
    for (int64_t s = 0; s < padded; s += 16) {
        vf x = vf_load(p + s);
        most = vf_max(x, most), bad = vf_add(bad, vf_sub(x, x));
    }
    float top = vf_max_of(most), first[16], rest = 0;
    if (sink) top = *sink > top ? *sink : top;
    for (int64_t s = 0; s < padded; s += 16) vf_store(p + s, vf_exp_negative(vf_sub(vf_load(p + s), vf_set1(top))));
    for (int64_t s = visible; s < padded; s++) p[s] = 0;
    for (int64_t s = 0; s < padded; s += 16) sum = vf_add(sum, vf_load(p + s));
    if (sink) {
        vf_store(first, vf_exp_negative(vf_set1(*sink - top)));
        rest = first[0];
    }
    return vf_sum(bad) == 0 ? 1 / (vf_sum(sum) + rest) : NAN; /* NaN and infinity spread to the output */
}

/* Some token rows and heads of a group, and their scores: those of token row t and head h begin at
 * scores + (t - first) * token_stride + (h - head) * head_stride with the position `base`, the first that any of them sees.
 * With a selection it is one token row, and positions count its selected ones. */
typedef struct {
    const attention_t *a;
    const int64_t *selected;
    int64_t first, last, group, head, heads;
    int64_t base, end;
    float *scores, *scratch;
    int64_t token_stride, head_stride;
} rows_t;

/* The positions from .. to that token row t sees. */
INLINE int64_t seen_from(const rows_t *r, int64_t t) {
    int64_t to = r->a->position + t + 1;
    return !r->selected && r->a->window && to > r->a->window ? to - r->a->window : 0;
}
INLINE int64_t seen_to(const rows_t *r, int64_t t) { return r->selected ? r->end : r->a->position + t + 1; }

static void set_range(rows_t *r) {
    const attention_t *a = r->a;
    if (a->selection) {
        r->selected = a->selection + r->first * a->topk;
        for (int64_t low = 0, high = a->topk; low < high || (r->end = low, 0);) { /* the first -1 */
            int64_t middle = (low + high) / 2;
            if (r->selected[middle] < 0) high = middle;
            else low = middle + 1;
        }
    } else {
        r->base = seen_from(r, r->first), r->end = seen_to(r, r->last - 1);
    }
}

INLINE int64_t item_scratch(const attention_t *a) { /* floats */
    int64_t keys = KEYS_AT_ONCE * a->width, values = VALUES_AT_ONCE * a->value;
    return keys > values ? keys : values;
}
INLINE int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }

/* True if rows of the matrix are read where they lie. */
INLINE int is_in_place(const rows_t *r, const weight_t *w, int64_t padded) {
    return w->kind == F32 && w->columns == padded && (r->last - r->first) * r->heads < IN_PLACE_ROWS;
}
INLINE const float *floats_at(const weight_t *w, int64_t row) { return (const float *)(w->data + row * w->row_bytes); }

/* Scores of positions from .. to. */
static void add_scores(const rows_t *r, int64_t from, int64_t to) {
    const attention_t *a = r->a;
    int64_t second = round_up(a->keys[1].columns, 16), first_width = a->width - second;
    int in_place = is_in_place(r, &a->keys[0], a->width);
    const float *keys[KEYS_AT_ONCE];
    for (int64_t s = from; s < to; s += KEYS_AT_ONCE) {
        int64_t n = lower(to - s, KEYS_AT_ONCE);
        for (int64_t i = 0; i < n; i++) {
            int64_t row = (r->selected ? r->selected[s + i] : s + i) * a->groups + r->group;
            keys[i] = in_place ? floats_at(&a->keys[0], row) : r->scratch + i * a->width;
            if (in_place) continue;
            dequantize(&a->keys[0], row, 0, first_width, r->scratch + i * a->width);
            if (second) dequantize(&a->keys[1], row, 0, second, r->scratch + i * a->width + first_width);
        }
        for (int64_t t = r->first; t < r->last; t++) {
            if (seen_from(r, t) >= s + n || seen_to(r, t) <= s) continue;
            const float *queries = a->queries + ((t * a->groups + r->group) * a->heads + r->head) * a->width;
            dot_rows(r->heads, queries, a->width, lower(seen_to(r, t) - s, n), keys, a->width, a->scale,
                     r->scores + (t - r->first) * r->token_stride + s - r->base, r->head_stride);
        }
    }
}

/* Scores -> e^(score - largest); 1 / their sum goes behind the last score of a row. */
static void soften(const rows_t *r, int64_t t, int64_t heads_from, int64_t heads_to) {
    int64_t from = seen_from(r, t), visible = seen_to(r, t) - from;
    for (int64_t h = heads_from; h < heads_to; h++) {
        float *p = r->scores + (t - r->first) * r->token_stride + h * r->head_stride;
        const float *sink = r->a->sinks ? r->a->sinks + r->group * r->a->heads + r->head + h : NULL;
        p[r->head_stride - 1] = softmax_scale(p + from - r->base, visible, sink);
    }
}

/* Columns from .. to of the weighted sums. */
static void add_values(const rows_t *r, int64_t from, int64_t to) {
    const attention_t *a = r->a;
    int64_t stride = a->value, strips = (to - from) / STRIP;
    for (int64_t t = r->first; t < r->last; t++)
        for (int64_t h = 0; h < r->heads; h++)
            memset(a->mixed + ((t * a->groups + r->group) * a->heads + r->head + h) * stride + from, 0, (size_t)(4 * (to - from)));
    int in_place = is_in_place(r, &a->values, a->value) && !r->selected;
    int64_t at_once = in_place ? IN_PLACE_VALUES : VALUES_AT_ONCE;
    int64_t row_stride = in_place ? a->groups * a->value : STRIP, strip_stride = in_place ? STRIP : VALUES_AT_ONCE * STRIP;
    for (int64_t s = r->base; s < r->end; s += at_once) {
        int64_t n = lower(r->end - s, at_once);
        const float *values = in_place ? floats_at(&a->values, s * a->groups + r->group) + from : r->scratch;
        for (int64_t i = 0; i < n && !in_place; i++)
            put_in_strips(&a->values, (r->selected ? r->selected[s + i] : s + i) * a->groups + r->group, from, strips,
                          strip_stride, r->scratch + i * STRIP);
        for (int64_t t = r->first; t < r->last; t++) {
            int64_t start = higher(seen_from(r, t), s), stop = lower(seen_to(r, t), s + n);
            if (start < stop)
                sum_rows(r->heads, r->scores + (t - r->first) * r->token_stride + start - r->base, r->head_stride, stop - start,
                         values + (start - s) * row_stride, row_stride, strips, strip_stride,
                         a->mixed + ((t * a->groups + r->group) * a->heads + r->head) * stride + from, stride);
        }
    }
    for (int64_t t = r->first; t < r->last; t++)
        for (int64_t h = 0; h < r->heads; h++) {
            float *m = a->mixed + ((t * a->groups + r->group) * a->heads + r->head + h) * stride;
            vf by = vf_set1(r->scores[(t - r->first) * r->token_stride + (h + 1) * r->head_stride - 1]);
            for (int64_t c = from; c < to; c += 16) vf_store(m + c, vf_mul(vf_load(m + c), by));
        }
}

typedef struct {
    const attention_t *a;
    int64_t tokens, heads, head_items; /* of an item; items that the heads of a group are split into */
    int64_t positions, columns;        /* few token rows: of an item */
    int64_t head_stride;               /* few token rows: floats of the scores of a head */
    float *scores;
} attention_job_t;

INLINE int64_t stride_of(int64_t positions) { return round_up(positions, 16) + 16; }

static int many_item(void *context, int64_t item) {
    attention_job_t *job = context;
    const attention_t *a = job->a;
    int64_t part = item % (a->groups * job->head_items), head = part % job->head_items * job->heads;
    rows_t r = {.a = a, .group = part / job->head_items, .head = head, .heads = lower(job->heads, a->heads - head)};
    r.first = item / (a->groups * job->head_items) * job->tokens, r.last = lower(r.first + job->tokens, a->count);
    set_range(&r);
    r.head_stride = stride_of(r.end - r.base), r.token_stride = r.heads * r.head_stride;
    r.scratch = thread_scratch(4 * (item_scratch(a) + (r.last - r.first) * r.token_stride));
    if (!r.scratch) return 1;
    r.scores = r.scratch + item_scratch(a);
    add_scores(&r, r.base, r.end);
    for (int64_t t = r.first; t < r.last; t++) soften(&r, t, 0, r.heads);
    add_values(&r, 0, a->value);
    return 0;
}

/* All heads of a group of few token rows; with a selection of one of them. */
static rows_t few_rows(const attention_job_t *job, int64_t part) {
    const attention_t *a = job->a;
    rows_t r = {.a = a, .group = part % a->groups, .heads = a->heads, .last = a->count, .head_stride = job->head_stride};
    r.token_stride = a->groups * a->heads * job->head_stride;
    if (a->selection) r.first = part / a->groups, r.last = r.first + 1;
    set_range(&r);
    r.scores = job->scores + r.first * r.token_stride + r.group * a->heads * job->head_stride;
    return r;
}

static int scores_item(void *context, int64_t item) {
    attention_job_t *job = context;
    int64_t parts = job->a->groups * (job->a->selection ? job->a->count : 1);
    rows_t r = few_rows(job, item % parts);
    int64_t from = r.base + item / parts * job->positions;
    r.scratch = thread_scratch(4 * item_scratch(job->a));
    if (!r.scratch) return 1;
    add_scores(&r, from, lower(from + job->positions, r.end));
    return 0;
}

static int softmax_item(void *context, int64_t item) {
    attention_job_t *job = context;
    const attention_t *a = job->a;
    int64_t t = item / (a->groups * job->head_items), part = item % (a->groups * job->head_items);
    rows_t r = few_rows(job, part / job->head_items + (a->selection ? t * a->groups : 0));
    int64_t head = part % job->head_items * SOFTMAX_HEADS;
    soften(&r, t, head, lower(head + SOFTMAX_HEADS, a->heads));
    return 0;
}

static int values_item(void *context, int64_t item) {
    attention_job_t *job = context;
    const attention_t *a = job->a;
    int64_t parts = a->groups * (a->selection ? a->count : 1), from = item / parts * job->columns;
    rows_t r = few_rows(job, item % parts);
    r.scratch = thread_scratch(4 * item_scratch(a));
    if (!r.scratch) return 1;
    add_values(&r, from, lower(from + job->columns, a->value));
    return 0;
}

int attend(const attention_t *a) {
    attention_job_t job = {.a = a};
    rows_t all = {.a = a, .last = a->count};
    int64_t span = a->selection ? a->topk : seen_to(&all, a->count - 1) - seen_from(&all, 0);
    job.head_stride = stride_of(span);
    if (a->count <= FEW_TOKENS && a->count * a->groups * a->heads * job.head_stride <= FEW_SCORES) {
        if (posix_memalign((void **)&job.scores, 64, (size_t)(4 * a->count * a->groups * a->heads * job.head_stride))) return 1;
        int64_t parts = a->groups * (a->selection ? a->count : 1);
        job.positions = POSITIONS_EACH, job.columns = round_up(64, STRIP);
        job.head_items = (a->heads + SOFTMAX_HEADS - 1) / SOFTMAX_HEADS;
        int failed = run_items(scores_item, &job, parts * ((span + job.positions - 1) / job.positions));
        failed |= run_items(softmax_item, &job, a->count * a->groups * job.head_items);
        failed |= run_items(values_item, &job, parts * ((a->value + job.columns - 1) / job.columns));
        free(job.scores);
        return failed;
    }
    job.heads = a->selection ? lower(a->heads, ITEM_TOKEN_HEADS) : lower(a->heads, ITEM_HEADS);
    job.head_items = (a->heads + job.heads - 1) / job.heads;
    job.tokens = a->selection ? 1 : higher(1, lower(ITEM_TOKEN_HEADS, ITEM_SCORES / job.head_stride) / job.heads);
    return run_items(many_item, &job, (a->count + job.tokens - 1) / job.tokens * a->groups * job.head_items);
}

/* -------------------------------------------------------------------------------------------------------------------
 * Rows of a KV cache in 8 bits */

static int quantize_kv_row(const void *call, int64_t row) {
    const kv_rows_t *c = call;
    const float *x = c->x + row * c->width;
    int8_t *codes = (int8_t *)c->out + row * kv_row_bytes(c->width);
    uint16_t *scales = (uint16_t *)(codes + round_up(c->width, 2));
    for (int64_t at = 0; at < c->width; at += SEGMENT) {
        int64_t n = lower(c->width - at, SEGMENT);
        vf v[4], bad = vf_zero(), most = vf_zero();
        for (int i = 0; i < 4; i++) {
            int64_t left = higher(0, lower(16, n - 16 * i));
            v[i] = left == 16 ? vf_load(x + at + 16 * i) : left ? vf_load_n(x + at + 16 * i, left) : vf_zero();
            bad = vf_add(bad, vf_sub(v[i], v[i])), most = vf_max(vf_abs(v[i]), most);
        }
        float scale = vf_max_of(most) / 127.0f;
        uint32_t bits;
        memcpy(&bits, &scale, 4);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to BF16, half to even */
        scale = bits_f32(bits << 16);
        if (!(vf_sum(bad) == 0)) scale = 0, bits = 0x7fc0;
        else if (scale < FLT_MIN) scale = 0, bits = 0; /* too small to divide by */
        int8_t some[SEGMENT];
        for (int i = 0; i < 4; i++) vi_store_i8(some + 16 * i, scale > 0 ? vi_round(vf_div(v[i], vf_set1(scale))) : vi_zero());
        memcpy(codes + at, some, (size_t)n);
        scales[at / SEGMENT] = (uint16_t)bits;
    }
    if (c->width % 2) codes[c->width] = 0;
    return 0;
}

int quantize_kv(const kv_rows_t *c) { return each_row(quantize_kv_row, c, c->rows, c->width); }
