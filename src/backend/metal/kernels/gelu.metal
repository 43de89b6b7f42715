/* gelu: the config's activation in place. NaN stays NaN; nothing else is ever infinite or NaN on
 * the way, so that it does not matter what a compiler makes of such values. */
#pragma once

#include "common.metal"

/*
 * x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3) is x / (1 + exp(-2u)): no tanh to
 * overflow. Beyond 10 the result is x or, to float32, 0.
 */
static inline float gelu_tanh(float x)
{
    float near = clamp(x, -10.0f, 10.0f);
    float u = 0.7978845608f * (near + 0.044715f * near * near * near);
    return x < -10 ? 0 : x / (1 + exp(-2 * u));
}

/* x/2 erfc(-x / sqrt(2)) by Abramowitz and Stegun 7.1.26: erf within 1.5e-7. */
static inline float gelu_erf(float x)
{
    float z = min(abs(x) * 0.70710678f, 9.0f), t = 1 / (1 + 0.3275911f * z);
    float series =
        ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t +
         0.254829592f) *
        t;
    float tail = 0.5f * series * exp(-z * z); /* erfc(z) / 2 */
    if (x < -12)
        return 0;
    return x < 0 ? x * tail : x * (1 - tail);
}

static inline float activate(float x, uint activation)
{
    if (activation == GELU_TANH)
        return gelu_tanh(x);
    if (activation == GELU_ERF)
        return gelu_erf(x);
    return x < 0 ? 0 : x;
}

kernel void gelu(device float *x [[buffer(0)]], constant elements_args &args [[buffer(1)]],
                 uint index [[thread_position_in_grid]])
{
    if (index < args.n)
        x[index] = activate(x[index], args.activation);
}
