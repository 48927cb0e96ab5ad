/* gemm_int.c's tiles with AMX: one instruction gives the sums of a segment for 16 weight rows and 16 token rows. */

#define TILE_TOKENS BLOCK_ROWS
#define AHEAD 8

typedef struct { /* tile configuration, in the processor's layout */
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes_t;

typedef int32_t sums_t[16][TILE_TOKENS] __attribute__((aligned(64)));

/* Whole segments of a weight row as signed bytes, with prefetch. */
INLINE void unpack_signed(int kind, const uint8_t *from, int64_t segments, uint8_t *to) {
    const vb offset = _mm512_set1_epi8((char)offset_of(kind));
    int64_t s = 0;
    if (kind == INT4) /* two at a time: the lower halves of both codes, then the upper ones */
        for (; s + 2 <= segments; s += 2) {
            const uint8_t *p = from + s * segment_bytes(kind);
            __builtin_prefetch(p + PAGE_AHEAD);
            vb d = vb_load(p), low = _mm512_sub_epi8(vb_and(d, 15), offset), high = _mm512_sub_epi8(vb_upper(d), offset);
            vb_store(to + s * SEGMENT, _mm512_shuffle_i64x2(low, high, 0x44));
            vb_store(to + s * SEGMENT + SEGMENT, _mm512_shuffle_i64x2(low, high, 0xee));
        }
    for (; s < segments; s++) {
        const uint8_t *p = from + s * segment_bytes(kind);
        __builtin_prefetch(p + PAGE_AHEAD);
        vb_store(to + s * SEGMENT, _mm512_sub_epi8(unpack_segment(kind, p), offset));
    }
}

/* 32 weight rows from `row` as signed bytes, spaced so that they do not fall into the same cache sets; scales as of
 * unpack_tile_scales. */
INLINE void unpack_tile(int kind, const weight_t *w, int64_t row, int64_t blocks, uint8_t *tile, float *scales) {
    int64_t segments = (w->columns + SEGMENT - 1) / SEGMENT, stride = tile_stride(w->columns);
    int64_t whole = packed_row_bytes(kind, w->columns) / segment_bytes(kind);
    const vb offset = _mm512_set1_epi8((char)offset_of(kind));
    for (int64_t i = 0; i < TILE_ROWS; i++) {
        uint8_t *to = tile + i * stride;
        if (row + i >= w->rows) {
            memset(to, 0, (size_t)(segments * SEGMENT));
            continue;
        }
        unpack_signed(kind, w->data + (row + i) * w->row_bytes, whole, to);
        if (whole < segments)
            vb_store(to + whole * SEGMENT, _mm512_sub_epi8(unpack_row_segment(kind, w, row + i, whole), offset));
    }
    unpack_tile_scales(w, row, blocks, scales);
}

INLINE void segment_sums(const uint8_t *weights, int64_t stride, const int8_t *x, sums_t sums) {
    _tile_zero(0);
    _tile_loadd(1, weights, (size_t)stride);
    _tile_loadd(2, x, 64);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, sums, 64);
}

/* A block of 16 token rows (see quantized_t) times a tile -> out [16][32]. The sums of one chain stay in registers, so
 * segments go chain after chain, ascending within a chain as everywhere. AMX results pass through the cache before they can
 * be read, so AMX works some segments ahead. */
INLINE void multiply_tile(int kind, int n, const uint8_t *tile, const float *scales, int64_t columns, const quantized_t *a,
                       const int64_t *rows, int64_t first, float out[][TILE_ROWS]) {
    (void)kind, (void)n, (void)rows;
    int64_t segments = (columns + SEGMENT - 1) / SEGMENT, block = first / TILE_TOKENS, stride = tile_stride(columns);
    const int8_t *x = a->amx_codes + block * TILE_TOKENS * a->padded;
    const float *x_scales = a->amx_scales + block * TILE_TOKENS * (a->padded / SEGMENT);
    const tile_shapes_t shapes = {.palette = 1, .bytes = {64, 64, 64}, .rows = {16, 16, 16}};
    _tile_loadconfig(&shapes);
    for (int half = 0; half < 2; half++) {
        float chains[16][16][TILE_TOKENS] __attribute__((aligned(64)));
        sums_t ring[AHEAD];
        const uint8_t *rows_of_half = tile + 16 * half * stride;
        int64_t next = 0, made = 0, used = 0; /* the segment whose sums are made next; how many were made and used */
        for (int64_t c = 0; c < 16; c++) {
            vf acc[16];
            UNROLL
            for (int r = 0; r < 16; r++) acc[r] = vf_zero();
            for (int64_t s = c; s < segments; s += 16, used++) {
                for (; made < segments && made < used + AHEAD; made++) {
                    segment_sums(rows_of_half + next * SEGMENT, stride, x + next * 1024, ring[made % AHEAD]);
                    next = next + 16 < segments ? next + 16 : next % 16 + 1;
                }
                vf by = vf_load(x_scales + s * TILE_TOKENS);
                const float *of_rows = scales + s * TILE_ROWS + 16 * half;
                UNROLL
                for (int r = 0; r < 16; r++)
                    acc[r] = vf_fma(vf_of(vi_load(ring[used % AHEAD][r])), vf_mul(by, vf_set1(of_rows[r])), acc[r]);
            }
            UNROLL
            for (int r = 0; r < 16; r++) vf_store(chains[c][r], acc[r]);
        }
        vi by_token[16];
        for (int r = 0; r < 16; r++) {
            vf v[16];
            UNROLL
            for (int i = 0; i < 16; i++) v[i] = vf_load(chains[i][r]);
            UNROLL
            for (int m = 8; m; m /= 2)
                UNROLL
                for (int i = 0; i < m; i++) v[i] = vf_add(v[i], v[i + m]);
            memcpy(&by_token[r], &v[0], 64);
        }
        vi_transpose(by_token);
        for (int t = 0; t < TILE_TOKENS; t++) vi_store((int32_t *)(out[t] + 16 * half), by_token[t]);
    }
    _tile_release();
}
