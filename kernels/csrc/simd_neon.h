/* The vectors of simd.h for AArch64: four registers of four lanes. Included by simd.h.
 *
 * NEON uses what every such processor has, NEONDOT also the instruction that multiplies bytes and adds four products.
 */
#pragma once
#include <arm_neon.h>

typedef struct { float32x4_t a, b, c, d; } vf;
typedef struct { int32x4_t a, b, c, d; } vi;
typedef struct { uint8x16_t a, b, c, d; } vb;

typedef float32x4_t vr;
#define REGISTERS 4
INLINE vr vr_load(const float *p) { return vld1q_f32(p); }
INLINE void vr_store(float *p, vr x) { vst1q_f32(p, x); }
INLINE vr vr_set1(float x) { return vdupq_n_f32(x); }
INLINE vr vr_fma(vr a, vr b, vr c) { return vfmaq_f32(c, a, b); }

#define FOUR(T, f, x) ((T){f((x).a), f((x).b), f((x).c), f((x).d)})
#define FOUR2(T, f, x, y) ((T){f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)})
#define FOUR_FROM(T, f, p, step) ((T){f(p), f((p) + (step)), f((p) + 2 * (step)), f((p) + 3 * (step))})
#define FOUR_TO(f, p, step, x) \
    f(p, (x).a), f((p) + (step), (x).b), f((p) + 2 * (step), (x).c), f((p) + 3 * (step), (x).d)
#define FOUR_SAME(T, x) ((T){x, x, x, x})

INLINE vf vf_zero(void) { return FOUR_SAME(vf, vdupq_n_f32(0)); }
INLINE vf vf_set1(float x) { return FOUR_SAME(vf, vdupq_n_f32(x)); }
INLINE vf vf_load(const float *p) { return FOUR_FROM(vf, vld1q_f32, p, 4); }
INLINE void vf_store(float *p, vf x) { FOUR_TO(vst1q_f32, p, 4, x); }
INLINE vf vf_add(vf x, vf y) { return FOUR2(vf, vaddq_f32, x, y); }
INLINE vf vf_sub(vf x, vf y) { return FOUR2(vf, vsubq_f32, x, y); }
INLINE vf vf_mul(vf x, vf y) { return FOUR2(vf, vmulq_f32, x, y); }
INLINE vf vf_div(vf x, vf y) { return FOUR2(vf, vdivq_f32, x, y); }
INLINE vf vf_fma(vf x, vf y, vf z) {
    return (vf){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
/* Not vmaxq_f32, which gives NaN where either is NaN: the others give y then. */
INLINE float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE vf vf_max(vf x, vf y) { return FOUR2(vf, max4, x, y); }
INLINE vf vf_abs(vf x) { return FOUR(vf, vabsq_f32, x); }
INLINE float32x4_t f16x4(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE vf vf_load_f16(const uint16_t *p) { return FOUR_FROM(vf, f16x4, p, 4); }
INLINE float32x4_t bf16x4(const uint16_t *p) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16));
}
INLINE vf vf_load_bf16(const uint16_t *p) { return FOUR_FROM(vf, bf16x4, p, 4); }
INLINE vf vf_of(vi x) { return FOUR(vf, vcvtq_f32_s32, x); }
INLINE vf vf_load_i8(const int8_t *p) {
    int8x16_t bytes = vld1q_s8(p);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    vi x = {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
    return vf_of(x);
}
INLINE vi vi_round(vf x) { return FOUR(vi, vcvtnq_s32_f32, x); } /* half to even */
INLINE vf vf_bits(vi x) { return FOUR(vf, vreinterpretq_f32_s32, x); }

INLINE vi vi_zero(void) { return FOUR_SAME(vi, vdupq_n_s32(0)); }
INLINE vi vi_set1(int32_t x) { return FOUR_SAME(vi, vdupq_n_s32(x)); }
INLINE vi vi_load(const int32_t *p) { return FOUR_FROM(vi, vld1q_s32, p, 4); }
INLINE void vi_store(int32_t *p, vi x) { FOUR_TO(vst1q_s32, p, 4, x); }
INLINE vi vi_add(vi x, vi y) { return FOUR2(vi, vaddq_s32, x, y); }
INLINE vi vi_sub(vi x, vi y) { return FOUR2(vi, vsubq_s32, x, y); }
INLINE void vi_store_i8(int8_t *p, vi x) { /* the low byte of each lane */
    int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b)), high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

INLINE vb vb_load(const uint8_t *p) { return FOUR_FROM(vb, vld1q_u8, p, 16); }
INLINE void vb_store(uint8_t *p, vb x) { FOUR_TO(vst1q_u8, p, 16, x); }
INLINE vb vb_and(vb x, uint8_t mask) {
    const vb m = FOUR_SAME(vb, vdupq_n_u8(mask));
    return FOUR2(vb, vandq_u8, x, m);
}
INLINE vb vb_xor(vb x, uint8_t mask) {
    const vb m = FOUR_SAME(vb, vdupq_n_u8(mask));
    return FOUR2(vb, veorq_u8, x, m);
}
#define vb_shift(x, n) ((vb){vshrq_n_u8((x).a, n), vshrq_n_u8((x).b, n), vshrq_n_u8((x).c, n), vshrq_n_u8((x).d, n)})

/* Four lanes of dot and dot15. Unsigned bytes become signed ones by taking 128 away: u s = (u - 128) s + 128 s. Where
 * many u meet the same s, the compiler makes the sum of s once. */
INLINE int8x16_t signed_bytes(uint8x16_t u) { return vreinterpretq_s8_u8(veorq_u8(u, vdupq_n_u8(128))); }
#ifdef NEONDOT
INLINE int32x4_t dot4(int32x4_t acc, uint8x16_t u, int8x16_t s) {
    int32x4_t sum = vdotq_s32(vdupq_n_s32(0), s, vdupq_n_s8(1));
    return vdotq_s32(vaddq_s32(acc, vshlq_n_s32(sum, 7)), signed_bytes(u), s);
}
INLINE int32x4_t dot15x4(int32x4_t acc, uint8x16_t u, int8x16_t s) { return vdotq_s32(acc, vreinterpretq_s8_u8(u), s); }
#else
INLINE int32x4_t dot4(int32x4_t acc, uint8x16_t u, int8x16_t s) {
    int8x16_t v = signed_bytes(u);
    int16x8_t low = vmull_s8(vget_low_s8(v), vget_low_s8(s)), high = vmull_high_s8(v, s);
    int32x4_t sum = vpaddlq_s16(vpaddlq_s8(s));
    acc = vaddq_s32(acc, vshlq_n_s32(sum, 7));
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
INLINE int32x4_t dot15x4(int32x4_t acc, uint8x16_t u, int8x16_t s) { /* two products fit 16 bits */
    int8x16_t v = vreinterpretq_s8_u8(u);
    return vpadalq_s16(acc, vpaddq_s16(vmull_s8(vget_low_s8(v), vget_low_s8(s)), vmull_high_s8(v, s)));
}
#endif
#define DOT(f, deinterleave) f(acc.deinterleave, u.deinterleave, vreinterpretq_s8_u8(s.deinterleave))
INLINE vi dot(vi acc, vb u, vb s) { return (vi){DOT(dot4, a), DOT(dot4, b), DOT(dot4, c), DOT(dot4, d)}; }
INLINE vi dot15(vi acc, vb u, vb s) { return (vi){DOT(dot15x4, a), DOT(dot15x4, b), DOT(dot15x4, c), DOT(dot15x4, d)}; }
#define dot15_start(acc) (acc)
#define dot15_end(acc, p) (p)

/* The sums of four registers. */
INLINE int32x4_t sums4(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
    return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}
INLINE int32x4_t whole(vi x) { return vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d)); }
INLINE int32x4_t whole_sums(const vi *v) { return sums4(whole(v[0]), whole(v[1]), whole(v[2]), whole(v[3])); }
INLINE int32x4_t half_sums(const vi *v) {
    int32x4_t x = vaddq_s32(v[0].a, v[0].b), y = vaddq_s32(v[0].c, v[0].d);
    return sums4(x, y, vaddq_s32(v[1].a, v[1].b), vaddq_s32(v[1].c, v[1].d));
}
INLINE int32x4_t quarter_sums(const vi *v) { return sums4(v->a, v->b, v->c, v->d); }
INLINE vi vi_sums(const vi *v, int small) { (void)small; return FOUR_FROM(vi, whole_sums, v, 4); }
INLINE vi vi_half_sums(const vi *v) { return FOUR_FROM(vi, half_sums, v, 2); }
INLINE vi vi_quarter_sums(const vi *v) { return FOUR_FROM(vi, quarter_sums, v, 1); }

INLINE int32x4_t low_halves(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s64(vtrn1q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
}
INLINE int32x4_t high_halves(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s64(vtrn2q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
}
INLINE vi transposed4(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) { /* lane i of all four -> register i */
    int32x4_t even0 = vtrn1q_s32(a, b), odd0 = vtrn2q_s32(a, b), even1 = vtrn1q_s32(c, d), odd1 = vtrn2q_s32(c, d);
    return (vi){low_halves(even0, even1), low_halves(odd0, odd1), high_halves(even0, even1), high_halves(odd0, odd1)};
}
INLINE void vi_transpose(vi *r) {
    vi q[4][4]; /* blocks of 4 x 4: [columns][rows] */
    for (int i = 0; i < 4; i++) {
        const vi *x = r + 4 * i;
        q[0][i] = transposed4(x[0].a, x[1].a, x[2].a, x[3].a), q[1][i] = transposed4(x[0].b, x[1].b, x[2].b, x[3].b);
        q[2][i] = transposed4(x[0].c, x[1].c, x[2].c, x[3].c), q[3][i] = transposed4(x[0].d, x[1].d, x[2].d, x[3].d);
    }
    for (int i = 0; i < 4; i++) {
        const vi *x = q[i];
        r[4 * i] = (vi){x[0].a, x[1].a, x[2].a, x[3].a}, r[4 * i + 1] = (vi){x[0].b, x[1].b, x[2].b, x[3].b};
        r[4 * i + 2] = (vi){x[0].c, x[1].c, x[2].c, x[3].c}, r[4 * i + 3] = (vi){x[0].d, x[1].d, x[2].d, x[3].d};
    }
}
INLINE vb vb_nibbles(const uint8_t *p) {
    uint8x16_t x = vld1q_u8(p), y = vld1q_u8(p + 16);
    const uint8x16_t mask = vdupq_n_u8(15);
    return (vb){vandq_u8(x, mask), vandq_u8(y, mask), vshrq_n_u8(x, 4), vshrq_n_u8(y, 4)};
}
INLINE float vf_max_of(vf x) { return vmaxvq_f32(max4(max4(x.a, x.b), max4(x.c, x.d))); }
