/* gelu: the config's activation (Hendrycks and Gimpel 2016, arXiv 1606.08415, and ReLU). */
#include "backend/cpu/kernels/kernels.h"

#include <math.h>

/*
 * x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3) is x / (1 + exp(-2u)): no tanh to
 * overflow, and vf_exp's clamp keeps the exponential finite for any x.
 */
static vf gelu_tanh(vf x)
{
    vf u2 = x * vf_fma(x * x, vf_set1(2 * 0.7978845608f * 0.044715f), vf_set1(2 * 0.7978845608f));
    return x / (1.0f + vf_exp(-u2));
}

static vf gelu_erf(vf x)
{
    for (int i = 0; i < VL; i++)
        x[i] = 0.5f * x[i] * erfcf(-0.70710678f * x[i]);
    return x;
}

/* In this order NaN stays NaN. */
static vf relu(vf x)
{
    return vf_max((vf){0}, x);
}

typedef struct job {
    float *x;
    bml_activation activation;
} job;

static inline void apply(float *x, size_t n, vf (*f)(vf))
{
    size_t i = 0;
    for (; i + VL <= n; i += VL)
        vf_store(x + i, f(vf_load(x + i)));
    int tail = (int)(n - i);
    if (tail)
        vf_store_n(x + i, f(vf_load_n(x + i, tail)), tail);
}

static void range(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    float *x = j->x + begin;
    size_t n = end - begin;
    switch (j->activation) {
    case BML_ACT_GELU_TANH:
        apply(x, n, gelu_tanh);
        break;
    case BML_ACT_GELU_ERF:
        apply(x, n, gelu_erf);
        break;
    case BML_ACT_RELU:
        apply(x, n, relu);
        break;
    }
}

void KERNEL(gelu)(bml_queue *queue, bml_buffer *x, size_t n, bml_activation activation)
{
    job j = {x->data, activation};
    KERNEL(parallel)(queue, range, &j, n, 64, 8);
}
