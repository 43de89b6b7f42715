/* matmul: c = a b, the textbook product with the loops in the order that streams b and c. */
#include "backend/cpu/kernels/kernels.h"

typedef struct job {
    float *c;
    const float *a, *b;
    size_t n, k;
} job;

static void rows(const void *context, size_t begin, size_t end)
{
    const job *j = context;
    size_t n = j->n;
    for (size_t row = begin; row < end; row++) {
        float *c = j->c + row * n;
        memset(c, 0, n * sizeof *c);
        for (size_t i = 0; i < j->k; i++) {
            vf a = vf_set1(j->a[row * j->k + i]);
            const float *b = j->b + i * n;
            size_t col = 0;
            for (; col + VL <= n; col += VL)
                vf_store(c + col, vf_fma(a, vf_load(b + col), vf_load(c + col)));
            int tail = (int)(n - col);
            if (tail)
                vf_store_n(c + col, vf_fma(a, vf_load_n(b + col, tail), vf_load_n(c + col, tail)),
                           tail);
        }
    }
}

void KERNEL(matmul)(bml_queue *queue, bml_buffer *c, const bml_buffer *a, const bml_buffer *b,
                    int m, int n, int k)
{
    job j = {c->data, a->data, b->data, (size_t)n, (size_t)k};
    KERNEL(parallel)(queue, rows, &j, (size_t)m, 1, (size_t)n * (size_t)k);
}
