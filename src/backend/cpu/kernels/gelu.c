/* gelu: the config's activation (Hendrycks and Gimpel 2016, arXiv 1606.08415, and ReLU). */
#include "backend/cpu/kernels/activation.h"
#include "backend/cpu/kernels/kernels.h"

typedef struct job {
    float *x;
    bml_activation activation;
} job;

static void range(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    size_t i = begin;
    for (; i + VL <= end; i += VL)
        vf_store(j->x + i, bml_activate(vf_load(j->x + i), j->activation));
    int tail = (int)(end - i);
    if (tail)
        vf_store_n(j->x + i, bml_activate(vf_load_n(j->x + i, tail), j->activation), tail);
}

void KERNEL(gelu)(bml_queue *queue, bml_buffer *x, size_t n, bml_activation activation)
{
    job j = {x->data, activation};
    KERNEL(parallel)(queue, range, &j, n, 64, 8);
}
