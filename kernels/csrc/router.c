/* The router: the top-k experts of each token row and their weights.
 *
 * Ties go to the lowest index. NaN counts as the largest, so that it is selected and noticed. */
#include "formats.h"
#include "pool.h"

/* -------------------------------------------------------------------------------------------------------------------
 * The router */

/* 1 / (1 + e^-x) of n values: e^-|x| is at most 1, so nothing overflows. NaN stays NaN. */
static void sigmoid(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        int64_t left = n - i < 16 ? n - i : 16;
        vf v = vf_load_n(x + i, left), e = vf_exp_negative(vf_sub(vf_zero(), vf_abs(v)));
        vf low = vf_div(vf_set1(1), vf_add(vf_set1(1), e)); /* of |x| */
        float a[16], b[16], c[16];
        vf_store(a, v), vf_store(b, low), vf_store(c, vf_mul(e, low));
        for (int64_t j = 0; j < left; j++) out[i + j] = a[j] >= 0 ? b[j] : a[j] < 0 ? c[j] : a[j];
    }
}

/* e^(x - largest) / their sum; all NaN where one value is. */
static void softmax(const float *x, float *out, int64_t n) {
    float most = x[0];
    for (int64_t i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    vf sum = vf_zero(), bad = vf_zero();
    for (int64_t i = 0; i < n; i += 16) {
        int64_t left = n - i < 16 ? n - i : 16;
        vf v = vf_load_n(x + i, left);
        bad = vf_add(bad, vf_sub(v, v));
        vf_store_n(out + i, vf_exp_negative(vf_sub(v, vf_set1(most))), left);
        sum = vf_add(sum, vf_load_n(out + i, left));
    }
    float total = vf_sum(bad) == 0 ? vf_sum(sum) : NAN;
    for (int64_t i = 0; i < n; i++) out[i] /= total;
}

/* Indices of the k largest of n values, the largest first. */
static void top_k(const float *values, int64_t n, int64_t k, int64_t *ids) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        float value = nan_as_infinity(values[i]);
        if (count == k && !(value > nan_as_infinity(values[ids[k - 1]]))) continue;
        int64_t at = count < k ? count++ : k - 1;
        for (; at && value > nan_as_infinity(values[ids[at - 1]]); at--) ids[at] = ids[at - 1];
        ids[at] = i;
    }
}

static void sort(int64_t *ids, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        int64_t id = ids[i], at = i;
        for (; at && ids[at - 1] > id; at--) ids[at] = ids[at - 1];
        ids[at] = id;
    }
}

/* Mask the experts outside of the top groups with -inf; a group scores the sum of its two best. */
static void mask_groups(const route_t *c, float *choice, float *scores, int64_t *ids) {
    int64_t size = c->experts / c->groups;
    for (int64_t g = 0; g < c->groups; g++) {
        top_k(choice + g * size, size, size < 2 ? size : 2, ids);
        scores[g] = 0;
        for (int64_t i = 0; i < (size < 2 ? size : 2); i++) scores[g] += choice[g * size + ids[i]];
    }
    top_k(scores, c->groups, c->active_groups, ids);
    sort(ids, c->active_groups);
    for (int64_t g = 0, open = 0; g < c->groups; g++) {
        if (open < c->active_groups && ids[open] == g) open++;
        else
            for (int64_t i = 0; i < size; i++) choice[g * size + i] = -INFINITY;
    }
}

/* In descending order, zero the weights after the first ones that reach the share `mass` of their sum. */
static void drop_below_mass(float mass, float *weights, int64_t count, int64_t *order) {
    float sum = 0, before = 0;
    top_k(weights, count, count, order);
    for (int64_t i = 0; i < count; i++) sum += weights[order[i]];
    for (int64_t i = 0; i < count; i++) {
        float weight = weights[order[i]];
        if (i && before >= mass * sum) weights[order[i]] = 0;
        before += weight;
    }
}

static int route_row(const void *call, int64_t row) {
    const route_t *c = call;
    int64_t E = c->experts, A = c->active, indices = A + c->groups + 2, *ids = c->topk_ids + row * A;
    int64_t *order = thread_scratch(8 * indices + 4 * (2 * E + c->groups));
    if (!order) return 1;
    float *scores = (float *)(order + indices), *choice = scores + E, *weights = c->weights + row * A, sum = 0;
    if (c->bias) {
        sigmoid(c->logits + row * E, scores, E);
        for (int64_t e = 0; e < E; e++) choice[e] = scores[e] + c->bias[e];
        if (c->groups > 1) mask_groups(c, choice, choice + E, order);
        top_k(choice, E, A, ids);
    } else {
        softmax(c->logits + row * E, scores, E);
        top_k(c->logits + row * E, E, A, ids);
    }
    sort(ids, A);
    for (int64_t i = 0; i < A; i++) weights[i] = scores[ids[i]];
    if (c->mass > 0 && c->mass < 1) drop_below_mass((float)c->mass, weights, A, order);
    for (int64_t i = 0; i < A; i++) sum += weights[i];
    for (int64_t i = 0; i < A; i++) weights[i] = (c->normalize ? weights[i] / (sum + 1e-20f) : weights[i]) * c->scaling;
    return 0;
}

int route(const route_t *c) { return each_row(route_row, c, c->rows, 16 * c->experts); }
