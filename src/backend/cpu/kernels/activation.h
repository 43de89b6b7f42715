/* The activations, a vector at a time; the gelu kernel and the fused pass share them. */
#ifndef BML_BACKEND_CPU_KERNELS_ACTIVATION_H
#define BML_BACKEND_CPU_KERNELS_ACTIVATION_H

#include "backend/cpu/kernels/vec.h"
#include "formats/hf_config.h"

#include <math.h>

/*
 * x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3) is x / (1 + exp(-2u)): no tanh to
 * overflow, and vf_exp's clamp keeps the exponential finite for any x.
 */
static inline vf bml_gelu_tanh(vf x)
{
    vf u2 = x * vf_fma(x * x, vf_set1(2 * 0.7978845608f * 0.044715f), vf_set1(2 * 0.7978845608f));
    return x / (1.0f + vf_exp(-u2));
}

static inline vf bml_gelu_erf(vf x)
{
    for (int i = 0; i < VL; i++)
        x[i] = 0.5f * x[i] * erfcf(-0.70710678f * x[i]);
    return x;
}

static inline vf bml_activate(vf x, bml_activation activation)
{
    switch (activation) {
    case BML_ACT_GELU_TANH:
        return bml_gelu_tanh(x);
    case BML_ACT_GELU_ERF:
        return bml_gelu_erf(x);
    default:
        return vf_max((vf){0}, x); /* ReLU; in this order NaN stays NaN */
    }
}

#endif
