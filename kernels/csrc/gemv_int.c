/* GEMV of quantized activations (dynamic int8) with integer weights: one weight row times one to a few token rows.
 *
 * Columns go in segments of 64, one for each scale of the activations. A segment's products are whole numbers, so they may
 * be added in any order. Its sum is multiplied with both scales and added to one of 16 chains, the segment's number modulo
 * 16, in ascending order. At the end the chains are added in the order of vf_sum. That order depends neither on the number
 * of token rows nor on threads, so the bits of the result do not either.
 *
 * Groups that do not consist of whole segments (16, 32, 48, 96 columns) have shorter segments and a plain loop. */

#include "matmul.h"

/* 64 bytes of a whole block, with prefetch, or the first n of them. */
INLINE vb load_codes(int is_whole, const uint8_t *p, int64_t n) {
    if (!is_whole) return vb_load_n(p, n);
    __builtin_prefetch(p + PAGE_AHEAD);
    return vb_load(p);
}

/* The 1,024 codes of a block, unsigned, in the order of `gemv_codes`. Of the last block of a row, which is not whole, there
 * are `n` bytes: the missing codes meet activations that are zero. */
INLINE void unpack_block(int kind, int is_whole, const uint8_t *p, int64_t n, vb *u) {
    if (kind == INT8)
        UNROLL
        for (int i = 0; i < 16; i++) u[i] = vb_xor(load_codes(is_whole, p + 64 * i, n - 64 * i), INT8_OFFSET);
    if (kind == INT4)
        UNROLL
        for (int i = 0; i < 8; i++) {
            vb d = load_codes(is_whole, p + 64 * i, n - 64 * i);
            u[2 * i] = vb_and(d, 15), u[2 * i + 1] = vb_upper(d);
        }
    if (kind == INT3 && is_whole)
        UNROLL
        for (int i = 0; i < 16; i++) {
            if (i % 2 == 0) __builtin_prefetch(p + PAGE_AHEAD + 24 * i);
            u[i] = unpack_int3(p + 24 * i);
        }
    if (kind == INT3 && !is_whole)
        for (int i = 0; i < 16; i++) {
            uint8_t group[24] = {0};
            if (24 * i < n) memcpy(group, p + 24 * i, 24);
            u[i] = unpack_int3(group);
        }
    if (kind == INT2)
        UNROLL
        for (int i = 0; i < 4; i++) {
            vb d = load_codes(is_whole, p + 64 * i, n - 64 * i);
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
        const vb first = vb_load(x + 64 * i * each);
        vi p = kind == INT8 ? dot(vi_zero(), u[i], first) : dot15_first(u[i * each], first);
        UNROLL
        for (int j = i * each + 1; j < i * each + each; j++)
            p = kind == INT8 ? dot(p, u[j], vb_load(x + 64 * j)) : dot15(p, u[j], vb_load(x + 64 * j));
        v[i] = kind == INT8 ? p : dot15_end(vi_zero(), p);
    }
    return kind == INT4 ? vi_half_sums(v) : kind == INT2 ? vi_quarter_sums(v) : vi_sums(v, kind == INT3);
}

/* acc + one block of codes u times activations: their codes, their sums (times the offset of u) and their scales. */
INLINE vf add_block(int kind, const vb *u, vf scales, const int8_t *codes, const int32_t *offsets, const float *x_scales,
                      vf acc) {
    vi sums = vi_sub(block_sums(kind, u, codes), vi_load(offsets));
    return vf_fma(vf_of(sums), vf_mul(scales, vf_load(x_scales)), acc);
}

/* acc[t] += products of the last columns of a weight row, fewer than a block, with any number of token rows. */
INLINE void add_tail(int kind, int n, const weight_t *w, int64_t row, const quantized_t *a, const int64_t *rows, vf *acc) {
    int64_t at = a->padded - BLOCK_COLUMNS, done = at / BLOCK_COLUMNS * block_bytes(kind);
    vb u[16];
    unpack_block(kind, 0, w->data + row * w->row_bytes + done, packed_row_bytes(kind, w->columns) - done, u);
    vf scales = block_scales(w, row, at / BLOCK_COLUMNS);
    for (int t = 0; t < n; t++) {
        int64_t segment = (rows[t] * a->padded + at) / SEGMENT;
        acc[t] = add_block(kind, u, scales, a->gemv_codes + segment * SEGMENT, a->sums + segment, a->scales + segment, acc[t]);
    }
}
typedef void tail_t(int n, const weight_t *w, int64_t row, const quantized_t *a, const int64_t *rows, vf *acc);
#ifdef AVX2
#define TAIL_CALLS 1 /* for two token rows and more: inlined tails would take half of this file's compile time */
#else
#define TAIL_CALLS !SPECIAL
#endif

/* Dot products of one weight row with `n` token rows, at most GEMV_ROWS. The common cases have code of their own: whole
 * blocks; a scale for the row, or a 16-bit scale for each segment. */
INLINE void dot_products(int kind, int n, tail_t *tail, const weight_t *w, int64_t row, const quantized_t *a, const int64_t *rows,
                      float *out) {
    const uint8_t *p = w->data + row * w->row_bytes;
    int64_t segments = a->padded / SEGMENT, bytes = block_bytes(kind);
    int64_t packed = packed_row_bytes(kind, w->columns), whole = packed / bytes;
    int has_row_scale = w->group >= w->columns, has_f16_scales = w->group == SEGMENT && w->scale_kind == F16;
    const uint16_t *f16_scales = (const uint16_t *)w->scales + row * w->row_scales;
    vf row_scale = has_row_scale ? vf_set1(scale_at(w, row * w->row_scales)) : vf_zero(), acc[GEMV_ROWS];
    const int8_t *codes[GEMV_ROWS];
    const int32_t *offsets[GEMV_ROWS];
    const float *x_scales[GEMV_ROWS];
    UNROLL
    for (int t = 0; t < n; t++) {
        acc[t] = vf_zero();
        codes[t] = a->gemv_codes + rows[t] * a->padded;
        offsets[t] = a->sums + rows[t] * segments, x_scales[t] = a->scales + rows[t] * segments;
    }
    for (int64_t b = 0; b < whole; b++) {
        vb u[16];
        vf scales = row_scale;
        unpack_block(kind, 1, p + b * bytes, bytes, u);
        if (has_f16_scales) {
            __builtin_prefetch((const uint8_t *)(f16_scales + 16 * b) + SCALES_AHEAD);
            scales = vf_load_f16(f16_scales + 16 * b);
        } else if (!has_row_scale) scales = block_scales(w, row, b);
        UNROLL
        for (int t = 0; t < n; t++)
            acc[t] = add_block(kind, u, scales, codes[t] + b * BLOCK_COLUMNS, offsets[t] + b * 16, x_scales[t] + b * 16, acc[t]);
    }
    int has_tail = whole * BLOCK_COLUMNS < a->padded;
    if (has_tail && (n == 1 || !TAIL_CALLS)) {
        vb u[16];
        unpack_block(kind, 0, p + whole * bytes, packed - whole * bytes, u);
        vf scales = has_row_scale ? row_scale : block_scales(w, row, whole);
        UNROLL
        for (int t = 0; t < n; t++)
            acc[t] = add_block(kind, u, scales, codes[t] + whole * BLOCK_COLUMNS, offsets[t] + whole * 16,
                                 x_scales[t] + whole * 16, acc[t]);
    }
    vf total[GEMV_ROWS]; /* a copy, so that acc stays in registers though the tail may be a call */
    UNROLL
    for (int t = 0; t < n; t++) total[t] = acc[t];
    if (has_tail && n > 1 && TAIL_CALLS) tail(n, w, row, a, rows, total);
    UNROLL
    for (int t = 0; t < n; t++) out[t] = vf_sum(total[t]);
}

#define BY_COUNT(kind, n, ...)                                                                                          \
    switch (SPECIAL ? n : 0) {                                                                                          \
    case 1: dot_products(kind, 1, __VA_ARGS__); break;                                                                     \
    case 2: dot_products(kind, 2, __VA_ARGS__); break;                                                                     \
    case 3: dot_products(kind, 3, __VA_ARGS__); break;                                                                     \
    case 4: dot_products(kind, 4, __VA_ARGS__); break;                                                                     \
    default: if (!SPECIAL) dot_products(kind, n, __VA_ARGS__);                                                                           \
    }
#define GEMV_KERNEL(name, kind)                                                                                          \
    static __attribute__((noinline, noclone)) void name##_tail(int n, const weight_t *w, int64_t row, const quantized_t *a,           \
                                                      const int64_t *rows, vf *acc) {                                   \
        add_tail(kind, n, w, row, a, rows, acc);                                                                      \
    }                                                                                                                   \
    static void name(int n, const weight_t *w, int64_t row, const quantized_t *a, const int64_t *rows, float *out) {         \
        BY_COUNT(kind, n, name##_tail, w, row, a, rows, out)                                                            \
    }
GEMV_KERNEL(gemv_int8, INT8)
GEMV_KERNEL(gemv_int4, INT4)
GEMV_KERNEL(gemv_int3, INT3)
GEMV_KERNEL(gemv_int2, INT2)

/* -------------------------------------------------------------------------------------------------------------------
 * Groups that cut segments: shorter ones, a plain loop, the same chains */

static int shared_divisor(int a, int b) { return b ? shared_divisor(b, a % b) : a; }

static float odd_group_product(const weight_t *w, int64_t row, const quantized_t *a, int64_t r) {
    const uint8_t *p = w->data + row * w->row_bytes;
    int step = shared_divisor(w->group, SEGMENT);
    float chains[16] = {0};
    for (int64_t at = 0, s = 0; at < w->columns; at += step, s++) {
        int32_t sum = 0;
        for (int64_t c = at; c < at + step && c < w->columns; c++)
            sum += code_at(w->kind, p, c) * a->row_codes[r * a->padded + c];
        float scale = scale_at(w, row * w->row_scales + at / w->group) * a->scales[r * (a->padded / SEGMENT) + at / SEGMENT];
        chains[s % 16] = fmaf((float)sum, scale, chains[s % 16]);
    }
    return vf_sum(vf_load(chains));
}


static void (*const BY_KIND[])(int, const weight_t *, int64_t, const quantized_t *, const int64_t *, float *) = {
    gemv_int8, gemv_int4, gemv_int3, gemv_int2};

void gemv_int(const weight_t *w, const quantized_t *a, const int64_t *rows, int64_t count, int64_t row, int64_t stop, float *out,
              int64_t out_stride) {
    if (is_odd_group(w)) {
        for (int64_t r = row; r < stop; r++)
            for (int64_t i = 0; i < count; i++) out[i * out_stride + r] = odd_group_product(w, r, a, rows[i]);
        return;
    }
    float sums[GEMV_ROWS];
    for (int64_t i = 0; i < count; i += GEMV_ROWS) {
        int n = count - i < GEMV_ROWS ? (int)(count - i) : GEMV_ROWS;
        for (int64_t r = row; r < stop; r++) {
            BY_KIND[w->kind - INT8](n, w, r, a, rows + i, sums);
            for (int t = 0; t < n; t++) out[(i + t) * out_stride + r] = sums[t];
        }
    }
}
