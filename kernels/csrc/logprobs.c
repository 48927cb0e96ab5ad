/* Log-probabilities in float64, without libm, whose last bits differ between machines. */
#include "formats.h"
#include "pool.h"

/* e^x for -700 <= x <= 0: 2^n times a Taylor series; error below 1e-15. */
INLINE double exp_negative(double x) {
    const double shift = 0x1.8p52; /* adding it rounds to a whole number, which the lowest bits then hold */
    double whole = x * 0x1.71547652b82fep0 + shift, n = whole - shift, p = 1.0 / 479001600;
    double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    p = p * r + 1.0 / 39916800, p = p * r + 1.0 / 3628800, p = p * r + 1.0 / 362880, p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040, p = p * r + 1.0 / 720, p = p * r + 1.0 / 120, p = p * r + 1.0 / 24, p = p * r + 1.0 / 6;
    p = p * r + 0.5, p = p * r + 1, p = p * r + 1;
    uint64_t bits;
    memcpy(&bits, &whole, 8);
    bits = (bits + 1023) << 52;
    double power;
    memcpy(&power, &bits, 8);
    return p * power;
}

/* ln x for x >= 1; NaN for NaN. m in [0.7, 1.4): ln m = 2 atanh((m - 1) / (m + 1)). */
static double log_of(double x) {
    if (!(x >= 1 && x < INFINITY)) return NAN;
    uint64_t bits;
    memcpy(&bits, &x, 8);
    double n = (double)(int64_t)(bits >> 52) - 1023, m;
    bits = (bits & 0xfffffffffffff) | 1023ull << 52;
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) m /= 2, n += 1;
    double s = (m - 1) / (m + 1), square = s * s, sum = 0;
    for (int k = 23; k > 0; k -= 2) sum = sum * square + 1.0 / k;
    return n * 0x1.62e42fefa39efp-1 + 2 * s * sum;
}

#define EXP_BLOCK 256

static double sum_of_exp(const float *x, int64_t n, double top) { /* of x - top, in 8 lanes, ascending */
    double lanes[8] = {0}, e[EXP_BLOCK];
    for (int64_t i = 0; i < n; i += EXP_BLOCK) {
        int64_t some = n - i < EXP_BLOCK ? n - i : EXP_BLOCK;
        /* Two loops, for compilers make vectors of each, but not of both together. e^-700 is as good as 0. */
        for (int64_t j = 0; j < some; j++) e[j] = x[i + j] - top < -700 ? -700 : x[i + j] - top;
        for (int64_t j = 0; j < some; j++) e[j] = exp_negative(e[j]);
        for (int64_t j = some; j < round_up(some, 8); j++) e[j] = 0;
        for (int64_t j = 0; j < some; j += 8)
            for (int k = 0; k < 8; k++) lanes[k] += e[j + k];
    }
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

static int logprobs_row(const void *call, int64_t row) {
    const logprobs_t *c = call;
    const float *x = c->logits + row * c->vocab;
    int64_t best = 0, i = 0;
    vf most = vf_set1(-INFINITY);
    for (; i + 16 <= c->vocab; i += 16) most = vf_max(vf_load(x + i), most); /* passes over NaN */
    float top = vf_max_of(most);
    for (; i < c->vocab; i++) top = x[i] > top ? x[i] : top;
    double sum = sum_of_exp(x, c->vocab, top);
    if (sum == sum) while (x[best] != top) best++;
    else
        for (int64_t j = 1; j < c->vocab; j++)
            if (nan_as_infinity(x[j]) > nan_as_infinity(x[best])) best = j;
    c->best[row] = best;
    c->logprobs[row] = (double)x[c->targets[row]] - (top + log_of(sum));
    return 0;
}

/* 2 where a target is outside of the vocabulary. */
int logprobs(const logprobs_t *c) {
    for (int64_t i = 0; i < c->rows; i++)
        if (c->targets[i] < 0 || c->targets[i] >= c->vocab) return 2;
    return each_row(logprobs_row, c, c->rows, 8 * c->vocab);
}
