/* The element types of weights and caches, and their conversions to and from float32. */
#ifndef BML_BASE_DTYPE_H
#define BML_BASE_DTYPE_H

#include "bml.h"

#include <string.h>

static inline size_t bml_dtype_size(bml_dtype dtype)
{
    return dtype == BML_F64 ? 8 : dtype == BML_F32 ? 4 : 2;
}

/* "f32", "f16", "bf16", "f64" */
static inline const char *bml_dtype_name(bml_dtype dtype)
{
    static const char *const names[] = {"f32", "f16", "bf16", "f64"};
    return names[dtype];
}

static inline float bml_float_from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t bml_float_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* bfloat16 is the upper half of a float32. */
static inline float bml_bf16_to_f32(uint16_t h)
{
    return bml_float_from_bits((uint32_t)h << 16);
}

/* To nearest, ties to even; NaN stays NaN. */
static inline uint16_t bml_f32_to_bf16(float f)
{
    uint32_t bits = bml_float_bits(f);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* IEEE 754 binary16, subnormals included. */
static inline float bml_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) /* infinity and NaN */
        return bml_float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude < 0x400) { /* zero and subnormals: magnitude * 2^-24, exact in float32 */
        float f = (float)magnitude * 0x1p-24f;
        return sign ? -f : f;
    }
    return bml_float_from_bits(sign | ((magnitude << 13) + ((127 - 15) << 23)));
}

/* To nearest, ties to even; overflow gives infinity, NaN stays NaN. */
static inline uint16_t bml_f32_to_f16(float f)
{
    uint32_t bits = bml_float_bits(f), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) /* rounds to 65520 or more */
        return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* below 2^-14: let float addition round to a multiple of 2^-24 */
        float rounded = bml_float_from_bits(bits) + 0.5f;
        return (uint16_t)(sign | (bml_float_bits(rounded) - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits - ((127 - 15) << 23)) >> 13));
}

#endif
