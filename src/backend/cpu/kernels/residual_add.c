/* residual_add: x += y */
#include "backend/cpu/kernels/kernels.h"

typedef struct job {
    float *x;
    const float *y;
} job;

static void range(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    for (size_t i = begin; i < end; i++)
        j->x[i] += j->y[i];
}

void KERNEL(residual_add)(bml_queue *queue, bml_buffer *x, const bml_buffer *y, size_t n)
{
    job j = {x->data, y->data};
    KERNEL(parallel)(queue, range, &j, n, 1024, 1);
}
