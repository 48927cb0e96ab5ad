/* Products of rounded activations with integer weights.
 *
 * Columns go in segments of 64, one for each scale of the activations. A segment's products are whole numbers, so they may
 * be added in any order; its sum is multiplied with both scales and added to one of 16 chains, the segment's number modulo
 * 16, in ascending order; at the end the chains are added in the order of vf_sum. That order does not depend on how many
 * rows or threads there are, so neither does a bit of the result.
 *
 * Groups that do not consist of whole segments (16, 32, 48, 96 columns) have shorter segments and a plain loop. */

#include "matmul.h"

/* The 1,024 codes of a block, unsigned, in the order of `streams`; what is read next is fetched. */
INLINE void block_codes(int kind, const uint8_t *p, const uint8_t *ahead, vb *u) {
    if (kind == INT8)
        UNROLL
        for (int i = 0; i < 16; i++) {
            __builtin_prefetch(ahead + 64 * i);
            u[i] = vb_xor(vb_load(p + 64 * i), 128);
        }
    if (kind == INT4)
        UNROLL
        for (int i = 0; i < 8; i++) {
            __builtin_prefetch(ahead + 64 * i);
            vb d = vb_load(p + 64 * i);
            u[2 * i] = vb_and(d, 15), u[2 * i + 1] = vb_upper(d);
        }
    if (kind == INT3)
        UNROLL
        for (int i = 0; i < 16; i++) {
            if (i % 2 == 0) __builtin_prefetch(ahead + 24 * i);
            u[i] = codes_of_int3(p + 24 * i);
        }
    if (kind == INT2)
        UNROLL
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(ahead + 64 * i);
            vb d = vb_load(p + 64 * i);
            u[4 * i] = vb_and(d, 3), u[4 * i + 1] = vb_and(vb_shift(d, 2), 3);
            u[4 * i + 2] = vb_and(vb_shift(d, 4), 3), u[4 * i + 3] = vb_and(vb_shift(d, 6), 3);
        }
}

/* The same of the last `n` bytes of a row, fewer than a block: what is missing meets activations that are zero. */
INLINE void last_codes(int kind, const uint8_t *p, int64_t n, vb *u) {
    if (kind == INT8)
        UNROLL
        for (int i = 0; i < 16; i++) u[i] = vb_xor(vb_load_n(p + 64 * i, n - 64 * i), 128);
    if (kind == INT4)
        UNROLL
        for (int i = 0; i < 8; i++) {
            vb d = vb_load_n(p + 64 * i, n - 64 * i);
            u[2 * i] = vb_and(d, 15), u[2 * i + 1] = vb_upper(d);
        }
    if (kind == INT3)
        for (int i = 0; i < 16; i++) {
            uint8_t group[24] = {0};
            if (24 * i < n) memcpy(group, p + 24 * i, 24);
            u[i] = codes_of_int3(group);
        }
    if (kind == INT2)
        UNROLL
        for (int i = 0; i < 4; i++) {
            vb d = vb_load_n(p + 64 * i, n - 64 * i);
            u[4 * i] = vb_and(d, 3), u[4 * i + 1] = vb_and(vb_shift(d, 2), 3);
            u[4 * i + 2] = vb_and(vb_shift(d, 4), 3), u[4 * i + 3] = vb_and(vb_shift(d, 6), 3);
        }
}

/* Sums of the 16 segments of a block. */
INLINE vi block_sums(int kind, const vb *u, const int8_t *codes) {
    const int each = kind == INT4 ? 2 : kind == INT2 ? 4 : 1; /* vectors that hold parts of the same segments */
    const uint8_t *x = (const uint8_t *)codes;
    vi v[16];
    UNROLL
    for (int i = 0; i < 16 / each; i++) {
        vi p = vi_zero();
        UNROLL
        for (int j = i * each; j < i * each + each; j++)
            p = kind == INT8 ? dot(p, u[j], vb_load(x + 64 * j)) : dot15(p, u[j], vb_load(x + 64 * j));
        v[i] = kind == INT8 ? p : dot15_end(vi_zero(), p);
    }
    return kind == INT4 ? vi_half_sums(v) : kind == INT2 ? vi_quarter_sums(v) : vi_sums(v, kind == INT3);
}

/* acc + one block of codes u times activations: their codes, their sums (times the offset of u) and their scales. */
INLINE vf block_times(int kind, const vb *u, vf scales, const int8_t *codes, const int32_t *offsets, const float *x_scales,
                      vf acc) {
    vi sums = vi_sub(block_sums(kind, u, codes), vi_load(offsets));
    return vf_fma(vf_of(sums), vf_mul(scales, vf_load(x_scales)), acc);
}

/* The last columns of a row, fewer than a block: acc[t] += their products, for any number of rows of activations. */
INLINE void tail_times(int kind, int n, const weight_t *w, int64_t row, const acts_t *a, const int64_t *rows, vf *acc) {
    int64_t at = a->padded - BLOCK_COLUMNS, done = at / BLOCK_COLUMNS * block_bytes(kind);
    vb u[16];
    last_codes(kind, w->data + row * w->row_bytes + done, own_bytes(kind, w->columns) - done, u);
    vf scales = block_scales(w, row, at / BLOCK_COLUMNS);
    for (int t = 0; t < n; t++) {
        int64_t segment = (rows[t] * a->padded + at) / SEGMENT;
        acc[t] = block_times(kind, u, scales, a->streams + segment * SEGMENT, a->sums + segment, a->scales + segment, acc[t]);
    }
}
typedef void tail_t(int n, const weight_t *w, int64_t row, const acts_t *a, const int64_t *rows, vf *acc);
#ifdef AVX2
#define TAIL_CALLS 1 /* two rows and more: half of this file's compile time would go into tails */
#else
#define TAIL_CALLS !SPECIAL
#endif

/* `n` rows of activations, at most MAX_TOGETHER, with one row of weights. What most weights have is kept apart from what
 * is rare: whole blocks; a scale for the row, or 16 bits of one for each segment. */
INLINE void row_times(int kind, int n, tail_t *tail, const weight_t *w, int64_t row, const acts_t *a, const int64_t *rows,
                      float *out) {
    const uint8_t *p = w->data + row * w->row_bytes;
    int64_t segments = a->padded / SEGMENT, bytes = block_bytes(kind);
    int64_t own = own_bytes(kind, w->columns), whole = own / bytes;
    int is_same = w->group >= w->columns, are_halves = w->group == SEGMENT && w->scale_kind == F16;
    const uint16_t *halves = (const uint16_t *)w->scales + row * w->row_scales;
    vf same = is_same ? vf_set1(scale_at(w, row * w->row_scales)) : vf_zero(), acc[MAX_TOGETHER];
    const int8_t *codes[MAX_TOGETHER];
    const int32_t *offsets[MAX_TOGETHER];
    const float *x_scales[MAX_TOGETHER];
    UNROLL
    for (int t = 0; t < n; t++) {
        acc[t] = vf_zero();
        codes[t] = a->streams + rows[t] * a->padded;
        offsets[t] = a->sums + rows[t] * segments, x_scales[t] = a->scales + rows[t] * segments;
    }
    for (int64_t b = 0; b < whole; b++) {
        vb u[16];
        vf scales = same;
        const uint8_t *from = p + b * bytes;
        block_codes(kind, from, from + PAGE_AHEAD, u);
        if (are_halves) {
            __builtin_prefetch((const uint8_t *)(halves + 16 * b) + SCALES_AHEAD);
            scales = vf_load_f16(halves + 16 * b);
        } else if (!is_same) scales = block_scales(w, row, b);
        UNROLL
        for (int t = 0; t < n; t++)
            acc[t] = block_times(kind, u, scales, codes[t] + b * BLOCK_COLUMNS, offsets[t] + b * 16, x_scales[t] + b * 16, acc[t]);
    }
    int has_tail = whole * BLOCK_COLUMNS < a->padded;
    if (has_tail && (n == 1 || !TAIL_CALLS)) {
        vb u[16];
        last_codes(kind, p + whole * bytes, own - whole * bytes, u);
        vf scales = is_same ? same : block_scales(w, row, whole);
        UNROLL
        for (int t = 0; t < n; t++)
            acc[t] = block_times(kind, u, scales, codes[t] + whole * BLOCK_COLUMNS, offsets[t] + whole * 16,
                                 x_scales[t] + whole * 16, acc[t]);
    }
    vf total[MAX_TOGETHER]; /* a copy, so that acc stays in registers though the tail may be a call */
    UNROLL
    for (int t = 0; t < n; t++) total[t] = acc[t];
    if (has_tail && n > 1 && TAIL_CALLS) tail(n, w, row, a, rows, total);
    UNROLL
    for (int t = 0; t < n; t++) out[t] = vf_sum(total[t]);
}

#define BY_COUNT(kind, n, ...)                                                                                          \
    switch (SPECIAL ? n : 0) {                                                                                          \
    case 1: row_times(kind, 1, __VA_ARGS__); break;                                                                     \
    case 2: row_times(kind, 2, __VA_ARGS__); break;                                                                     \
    case 3: row_times(kind, 3, __VA_ARGS__); break;                                                                     \
    case 4: row_times(kind, 4, __VA_ARGS__); break;                                                                     \
    default: if (!SPECIAL) row_times(kind, n, __VA_ARGS__);                                                                           \
    }
#define ROW_KERNEL(name, kind)                                                                                          \
    static __attribute__((noinline, noclone)) void name##_tail(int n, const weight_t *w, int64_t row, const acts_t *a,           \
                                                      const int64_t *rows, vf *acc) {                                   \
        tail_times(kind, n, w, row, a, rows, acc);                                                                      \
    }                                                                                                                   \
    static void name(int n, const weight_t *w, int64_t row, const acts_t *a, const int64_t *rows, float *out) {         \
        BY_COUNT(kind, n, name##_tail, w, row, a, rows, out)                                                            \
    }
ROW_KERNEL(row_int8, INT8)
ROW_KERNEL(row_int4, INT4)
ROW_KERNEL(row_int3, INT3)
ROW_KERNEL(row_int2, INT2)

/* -------------------------------------------------------------------------------------------------------------------
 * Groups that cut segments: shorter ones, a plain loop, the same chains */

static int shared_divisor(int a, int b) { return b ? shared_divisor(b, a % b) : a; }

static float odd_row(const weight_t *w, int64_t row, const acts_t *a, int64_t r) {
    const uint8_t *p = w->data + row * w->row_bytes;
    int step = shared_divisor(w->group, SEGMENT);
    float chains[16] = {0};
    for (int64_t at = 0, s = 0; at < w->columns; at += step, s++) {
        int32_t sum = 0;
        for (int64_t c = at; c < at + step && c < w->columns; c++)
            sum += code_at(w->kind, p, c) * a->plain[r * a->padded + c];
        float scale = scale_at(w, row * w->row_scales + at / w->group) * a->scales[r * (a->padded / SEGMENT) + at / SEGMENT];
        chains[s % 16] = fmaf((float)sum, scale, chains[s % 16]);
    }
    return vf_sum(vf_load(chains));
}


static void (*const BY_KIND[])(int, const weight_t *, int64_t, const acts_t *, const int64_t *, float *) = {
    row_int8, row_int4, row_int3, row_int2};

void gemv_int(const weight_t *w, const acts_t *a, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
              int64_t out_stride) {
    if (is_odd_group(w)) {
        for (int64_t r = row; r < stop; r++)
            for (int64_t i = 0; i < count; i++) out[i * out_stride + r] = odd_row(w, r, a, rows[i]);
        return;
    }
    float sums[MAX_TOGETHER];
    for (int64_t i = 0; i < count; i += MAX_TOGETHER) {
        int n = count - i < MAX_TOGETHER ? (int)(count - i) : MAX_TOGETHER;
        for (int64_t r = row; r < stop; r++) {
            BY_KIND[w->kind - INT8](n, w, r, a, rows + i, sums);
            for (int t = 0; t < n; t++) out[(i + t) * out_stride + r] = sums[t];
        }
    }
}
