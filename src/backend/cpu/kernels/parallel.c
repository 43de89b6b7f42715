#include "backend/cpu/kernels/kernels.h"

typedef struct range_job {
    bml_range_fn *body;
    const void *context;
    size_t n, grain;
} range_job;

static void run_part(void *context, int part, int n_parts)
{
    const range_job *job = context;
    size_t begin, end;
    bml_split(job->n, job->grain, part, n_parts, &begin, &end);
    if (begin < end)
        job->body(job->context, begin, end);
}

void KERNEL(parallel)(bml_queue *queue, bml_range_fn *body, const void *context, size_t n,
                      size_t grain, size_t cost)
{
    /* Waking and joining the pool takes 2 to 10 us: as long as 16k elements of simple work. */
    if (n <= grain || n * cost < 16384) {
        body(context, 0, n);
        return;
    }
    range_job job = {body, context, n, grain};
    bml_pool_run(queue->pool, run_part, &job);
}
