/*
 * A thin vector layer: VL floats a register, for whichever instruction set this file is compiled.
 * Arithmetic is the compiler's own on vector types; only what C cannot say (fused multiply-add,
 * partial loads, conversions, reductions) differs by instruction set.
 *
 * A tail of n < VL elements goes through the same operations as a full vector, with zeros in the
 * unused lanes: an element's bits do not depend on where the tail begins.
 */
#ifndef BML_BACKEND_CPU_KERNELS_VEC_H
#define BML_BACKEND_CPU_KERNELS_VEC_H

#include "base/dtype.h"

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define VL 8
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif
#define VL 4
#endif

/* A loop that must vanish: its arrays are registers. */
#ifdef __clang__
#define FOR_EACH(index, n)                                                                         \
    _Pragma("clang loop unroll(full)") for (size_t index = 0; index < (n); index++)
#else
#define FOR_EACH(index, n) _Pragma("GCC unroll 16") for (size_t index = 0; index < (n); index++)
#endif

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef int16_t vs __attribute__((vector_size(4 * VL)));
typedef uint16_t vus __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));

static inline vf vf_set1(float x)
{
    return x - (vf){0};
}

static inline vf vf_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void vf_store(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

static inline vh vh_load(const uint16_t *p)
{
    vh v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The first n < VL elements, zeros behind them. */
static inline vf vf_load_n(const float *p, int n)
{
#if VL == 16
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif VL == 8
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return (vf)_mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
#else
    vf v = {0};
    memcpy(&v, p, 4 * (size_t)n);
    return v;
#endif
}

static inline void vf_store_n(float *p, vf v, int n)
{
#if VL == 16
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#elif VL == 8
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane), (__m256)v);
#else
    memcpy(p, &v, 4 * (size_t)n);
#endif
}

static inline vh vh_load_n(const uint16_t *p, int n)
{
    vh v = {0};
    memcpy(&v, p, 2 * (size_t)n);
    return v;
}

/* a * b + c, fused where the instruction set can; never fused halfway. */
static inline vf vf_fma(vf a, vf b, vf c)
{
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline vf vf_from_bf16(vh h)
{
#if VL == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif VL == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
    return (vf)(__builtin_convertvector(h, vi) << 16);
#endif
}

static inline vf vf_from_f16(vh h)
{
#if VL == 16
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif VL == 8
    return (vf)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16((float16x4_t)h);
#else
    vf v;
    for (int i = 0; i < VL; i++)
        v[i] = bml_f16_to_f32(h[i]);
    return v;
#endif
}

/* a where the mask (all ones or all zeros a lane) is set, else b */
static inline vf vf_select(vi mask, vf a, vf b)
{
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}

/* Of a NaN in b the result is b, of a NaN in a also b. */
static inline vf vf_max(vf a, vf b)
{
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

static inline vf vf_min(vf a, vf b)
{
#if VL == 16
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vf_select(a < b, a, b);
#endif
}

/* v in the first n lanes, FILL in the others. */
static inline vf vf_first_n(vf v, int n, float fill)
{
#if VL == 16
    return (vf)_mm512_mask_mov_ps(_mm512_set1_ps(fill), (__mmask16)((1u << n) - 1), (__m512)v);
#else
    vi lane;
    for (int i = 0; i < VL; i++)
        lane[i] = i;
    return vf_select(lane < n, v, vf_set1(fill));
#endif
}

static inline vf vf_abs(vf v)
{
    return (vf)((vi)v & 0x7fffffff);
}

/* Halves are added to halves, so that the order is the same everywhere and the tree is shallow. */
static inline float vf_sum(vf v)
{
#if VL == 16
    __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
#else
    float lane[VL];
    vf_store(lane, v);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] += lane[i + width];
    return lane[0];
#endif
}

/*
 * The sums of VL vectors at once: lane i of the result is vf_sum(v[i]), to the bit. Each step adds
 * the halves of two vectors' groups and puts the results side by side.
 */
static inline vf vf_sum_all(const vf v[VL])
{
#define ADD_HALVES(x, y, low, high)                                                                \
    (__builtin_shufflevector(x, y, low) + __builtin_shufflevector(x, y, high))
#if VL == 16
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
    vf eights[8], fours[4], twos[2];
    for (int i = 0; i < 8; i++)
        eights[i] = ADD_HALVES(v[i], v[i + 8], LOW_8, HIGH_8);
    for (int i = 0; i < 4; i++)
        fours[i] = ADD_HALVES(eights[i], eights[i + 4], LOW_4, HIGH_4);
    for (int i = 0; i < 2; i++)
        twos[i] = ADD_HALVES(fours[i], fours[i + 2], LOW_2, HIGH_2);
    return ADD_HALVES(twos[0], twos[1], LOW_1, HIGH_1);
#elif VL == 8
#define LOW_4 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_4 4, 5, 6, 7, 12, 13, 14, 15
#define LOW_2 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_2 2, 3, 10, 11, 6, 7, 14, 15
#define LOW_1 0, 8, 2, 10, 4, 12, 6, 14
#define HIGH_1 1, 9, 3, 11, 5, 13, 7, 15
    vf fours[4], twos[2];
    for (int i = 0; i < 4; i++)
        fours[i] = ADD_HALVES(v[i], v[i + 4], LOW_4, HIGH_4);
    for (int i = 0; i < 2; i++)
        twos[i] = ADD_HALVES(fours[i], fours[i + 2], LOW_2, HIGH_2);
    return ADD_HALVES(twos[0], twos[1], LOW_1, HIGH_1);
#else
#define LOW_2 0, 1, 4, 5
#define HIGH_2 2, 3, 6, 7
#define LOW_1 0, 4, 2, 6
#define HIGH_1 1, 5, 3, 7
    vf twos[2];
    for (int i = 0; i < 2; i++)
        twos[i] = ADD_HALVES(v[i], v[i + 2], LOW_2, HIGH_2);
    return ADD_HALVES(twos[0], twos[1], LOW_1, HIGH_1);
#endif
}

/* The largest lane; lanes with NaN may or may not count. */
static inline float vf_hmax(vf v)
{
#if VL == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float max = v[0];
    for (int i = 1; i < VL; i++)
        max = v[i] > max ? v[i] : max;
    return max;
#endif
}

static inline vi vi_max(vi a, vi b)
{
#if VL == 16
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    vi greater = a > b;
    return (a & greater) | (b & ~greater);
#endif
}

static inline int32_t vi_hmax(vi v)
{
#if VL == 16
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t max = v[0];
    for (int i = 1; i < VL; i++)
        max = v[i] > max ? v[i] : max;
    return max;
#endif
}

static inline int32_t vi_sum(vi v)
{
#if VL == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < VL; i++)
        sum += v[i];
    return sum;
#endif
}

/* The lanes, which must fit, as int8. */
static inline void vi_store_int8(int8_t *p, vi v)
{
#if VL == 16
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
    typedef int8_t vb __attribute__((vector_size(VL)));
    vb narrow = __builtin_convertvector(v, vb);
    memcpy(p, &narrow, sizeof narrow);
#endif
}

static inline vi vi_load(const void *p)
{
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline vf vf_from_int8(const int8_t *p)
{
#if VL == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif VL == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    typedef int8_t vb __attribute__((vector_size(VL)));
    vb narrow;
    memcpy(&narrow, p, sizeof narrow);
    return __builtin_convertvector(narrow, vf);
#endif
}

/*
 * Integer dot products: every lane of ACC gains the sum of four products, weight bytes (unsigned)
 * times four int8, the I-th of a block of 64. vi_dot4_start(correction) is what a sum starts
 * from, correction being -128 times the sum of the int8 values: the total is then the product with
 * (byte - 128).
 */
#if defined(__aarch64__) || defined(__AVX512VNNI__)
typedef struct fours {
    const int8_t *q;
} fours;

static inline fours fours_of(const int8_t q[64])
{
    return (fours){q};
}

static inline int32_t four(const fours *x, size_t i)
{
    int32_t x4;
    memcpy(&x4, x->q + 4 * i, sizeof x4);
    return x4;
}
#else
/* No instruction for bytes that cannot overflow: even and odd ones apart, as 16-bit numbers. */
typedef struct fours {
    int32_t even[16], odd[16];
} fours;

static inline fours fours_of(const int8_t q[64])
{
    fours x;
    FOR_EACH (i, 16 / VL) {
        vs bytes;
        memcpy(&bytes, q + i * sizeof bytes, sizeof bytes);
        vs even = (vs)(bytes << 8) >> 8, odd = bytes >> 8;
        memcpy(x.even + i * VL, &even, sizeof even);
        memcpy(x.odd + i * VL, &odd, sizeof odd);
    }
    return x;
}

/* The sums of two products each. */
static inline vi vi_dot2(vs w, int32_t x2)
{
#if VL == 16
    return (vi)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x2));
#elif VL == 8
    return (vi)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x2));
#elif defined(__SSE2__)
    return (vi)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(x2));
#else
    vi sum;
    vs x = (vs)(x2 - (vi){0});
    for (int i = 0; i < VL; i++)
        sum[i] = w[2 * i] * x[2 * i] + w[2 * i + 1] * x[2 * i + 1];
    return sum;
#endif
}
#endif

#if defined(__aarch64__)
static inline vi vi_dot4(vi acc, vi w, const fours *x, size_t i)
{
    int8x16_t centred = (int8x16_t)(w ^ (int32_t)0x80808080);
    int8x16_t x4 = (int8x16_t)vdupq_n_s32(four(x, i));
#if defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)acc, centred, x4);
#else
    /* A product fits 16 bits, a sum of two need not. */
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(centred), vget_low_s8(x4)));
    int32x4_t high = vpaddlq_s16(vmull_high_s8(centred, x4));
    return acc + (vi)vpaddq_s32(low, high);
#endif
}

static inline vi vi_dot4_start(int32_t correction)
{
    (void)correction;
    return (vi){0};
}
#else
static inline vi vi_dot4(vi acc, vi w, const fours *x, size_t i)
{
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(four(x, i)));
#else
    vs w_even = (vs)w & 0xff, w_odd = (vs)((vus)w >> 8);
    vu sum = (vu)acc; /* unsigned, or a sanitizer would look at every lane */
    sum += (vu)vi_dot2(w_even, x->even[i]);
    sum += (vu)vi_dot2(w_odd, x->odd[i]);
#if defined(__SSE2__)
    __asm__("" : "+v"(sum)); /* else gcc adds up a whole block's products at its end, from memory */
#endif
    return (vi)sum;
#endif
}

static inline vi vi_dot4_start(int32_t correction)
{
    return correction - (vi){0};
}
#endif

/* a * 2^-k, DOWN being k << 23: taken from the exponent, which stops at 0. For a float whose
 * lower half is zeros, and whose exponent is large enough if it is negative. */
static inline vf vf_scale_down(vf a, uint32_t down)
{
#if VL == 16
    return (vf)_mm512_subs_epu16((__m512i)a, _mm512_set1_epi32((int)down));
#elif VL == 8
    return (vf)_mm256_subs_epu16((__m256i)a, _mm256_set1_epi32((int)down));
#elif defined(__SSE2__)
    return (vf)_mm_subs_epu16((__m128i)a, _mm_set1_epi32((int)down));
#else
    vus from = (vus)a, by = (vus)((int32_t)down - (vi){0});
    return (vf)((from - by) & (vus)(from > by));
#endif
}

/* Each byte, 0 to 15, replaced by its entry in a table of 16. */
static inline vi vi_lookup16(const uint8_t table[16], vi index)
{
#if VL == 16
    __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (vi)_mm512_shuffle_epi8(t, (__m512i)index);
#elif VL == 8
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (vi)_mm256_shuffle_epi8(t, (__m256i)index);
#elif defined(__aarch64__)
    return (vi)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)index);
#else
    uint8_t bytes[4 * VL];
    memcpy(bytes, &index, sizeof bytes);
    for (int i = 0; i < 4 * VL; i++)
        bytes[i] = table[bytes[i]];
    return vi_load(bytes);
#endif
}

/* Elements of a row stored as F32, BF16 or F16, as float32. */
static inline vf vf_load_as(bml_dtype dtype, const void *row, size_t i)
{
    if (dtype == BML_F32)
        return vf_load((const float *)row + i);
    vh h = vh_load((const uint16_t *)row + i);
    return dtype == BML_BF16 ? vf_from_bf16(h) : vf_from_f16(h);
}

static inline vf vf_load_as_n(bml_dtype dtype, const void *row, size_t i, int n)
{
    if (dtype == BML_F32)
        return vf_load_n((const float *)row + i, n);
    vh h = vh_load_n((const uint16_t *)row + i, n);
    return dtype == BML_BF16 ? vf_from_bf16(h) : vf_from_f16(h);
}

/* p * 2^n for integers n from -250 to 254. */
static inline vf vf_scale_up(vf p, vf n)
{
#if VL == 16
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi e = __builtin_convertvector(n, vi), half = e >> 1; /* the halves' powers are floats */
    return p * (vf)((half + 127) << 23) * (vf)((e - half + 127) << 23);
#endif
}

/*
 * exp(x): x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for exp(r) (Cephes' expf), then 2^n.
 * Relative error below 2e-7 down to -87.34; below that the result runs out of bits, and from -104
 * on (and for -inf) it is 0. Above 88.72 it stays at the largest finite power; NaN gives NaN.
 */
static inline vf vf_exp(vf x)
{
    const vf low = vf_set1(-150), high = vf_set1(88.72f);
    vf clamped = vf_min(high, vf_max(low, x)); /* in this order NaN stays NaN */
    /* Adding and subtracting 1.5 * 2^23 rounds to an integer. */
    const vf magic = vf_set1(12582912.0f);
    vf n = vf_fma(clamped, vf_set1(1.44269504f), magic) - magic;
    vf r = vf_fma(n, vf_set1(-0.693359375f), clamped);
    r = vf_fma(n, vf_set1(2.12194440e-4f), r);
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(p, r * r, r) + 1.0f;
    return vf_scale_up(p, n);
}

#endif
