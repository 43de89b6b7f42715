/* The GPU's limits, by its own clock: streaming reads of more than its caches hold, and float32
 * multiply-adds. */
#include "backend/metal/metal.h"

typedef struct trial {
    bml_metal_kernel kernel;
    const bml_buffer *out, *data; /* DATA: of measure_read */
    size_t n_groups;
} trial;

/* Seconds of one run with the argument N. */
static bml_status run_once(bml_queue *queue, const trial *t, uint32_t n, double *seconds,
                           bml_error *err)
{
    bml_status status = bml_metal_begin(queue, &(bml_batch){0}, err);
    if (status)
        return status;
    bml_metal_dispatch(queue, &(bml_metal_call){.kernel = t->kernel,
                                                .buffers = {{t->out, 0}, {t->data, 0}},
                                                .n_buffers = t->data ? 2 : 1,
                                                .args = &n,
                                                .args_bytes = sizeof n,
                                                .n_groups = t->n_groups});
    status = bml_metal_end(queue, err);
    *seconds = queue->latest;
    return status;
}

/* The best units a second, of amounts from FIRST on, doubled up to MOST or until a run is long. */
static bml_status best_rate(bml_queue *queue, const trial *t, uint32_t first, uint32_t most,
                            double units_each, double *rate, bml_error *err)
{
    enum { REPETITIONS = 5 };
    const double long_enough = 10e-3;
    double seconds = 0;
    uint32_t n = first;
    bml_status status = run_once(queue, t, n, &seconds, err);
    while (!status && seconds < long_enough && n < most)
        status = run_once(queue, t, n *= 2, &seconds, err);
    *rate = 0;
    for (int i = 0; i < REPETITIONS && !status; i++) {
        status = run_once(queue, t, n, &seconds, err);
        if (!status && seconds > 0 && n * units_each / seconds > *rate)
            *rate = n * units_each / seconds;
    }
    return status;
}

bml_status bml_metal_measure(bml_queue *queue, bml_limits *limits, bml_error *err)
{
    enum { READ_BYTES = 256 << 20, GROUPS = 128, THREADS = 256, FLOPS_A_ROUND = 32 };
    double reads = 0, flops = 0;
    bml_buffer data = {0}, out = {0};
    bml_status status = bml_metal_buffer_new(queue->device, READ_BYTES, &data, err);
    if (!status)
        status = bml_metal_buffer_new(queue->device, GROUPS * THREADS * sizeof(float), &out, err);
    if (!status)
        status = best_rate(queue, &(trial){BML_METAL_MEASURE_READ, &out, &data, GROUPS}, 1 << 16,
                           READ_BYTES / 16, 16, &reads, err);
    if (!status)
        status = best_rate(queue, &(trial){BML_METAL_MEASURE_MULTIPLY, &out, NULL, GROUPS}, 1,
                           1 << 20, (double)GROUPS * THREADS * FLOPS_A_ROUND, &flops, err);
    bml_metal_buffer_free(queue->device, &data);
    bml_metal_buffer_free(queue->device, &out);
    if (!status) /* Q8 and Q4 are multiplied as float32 here */
        *limits =
            (bml_limits){.read_bytes_per_s = reads, .flops_per_s = flops, .int8_ops_per_s = flops};
    return status;
}
