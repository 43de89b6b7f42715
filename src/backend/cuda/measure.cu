/* What this GPU can do: read bandwidth, float32 peak, and 8-bit dot products. */
#include "backend/cuda/kernels/common.cuh"

#include <stdlib.h>

enum { REPEATS = 7, THREADS = 512, CHAINS = 8, STEPS = 20000 };
static const size_t read_bytes = (size_t)2 << 30; /* far more than the L2 cache holds */

static __global__ void read_all(const uint4 *data, size_t n, float *sink)
{
    uint4 sum = {};
    size_t stride = (size_t)gridDim.x * THREADS;
#pragma unroll 8
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += stride) {
        uint4 v = __ldcs(data + i);
        sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 1) /* never: the memory is zeros */
        *sink = 1;
}

static __global__ void multiply_add(const uint4 *data, size_t n, float *sink)
{
    float sum[CHAINS], a = (float)data[0].x + 0.5f, b = (float)data[n - 1].x + 0.25f, total = 0;
    for (int i = 0; i < CHAINS; i++)
        sum[i] = (float)(threadIdx.x + i);
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            sum[i] = fmaf(sum[i], a, b);
    for (int i = 0; i < CHAINS; i++)
        total += sum[i];
    if (total == 12345)
        *sink = total;
}

static __global__ void dot(const uint4 *data, size_t n, float *sink)
{
    int sum[CHAINS], a = (int)data[0].x + 0x01020304, b = (int)data[n - 1].x + 0x04030201,
                     total = 0;
    for (int i = 0; i < CHAINS; i++)
        sum[i] = (int)threadIdx.x + i;
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            sum[i] = __dp4a(a ^ sum[(i + 1) % CHAINS], b, sum[i]);
    for (int i = 0; i < CHAINS; i++)
        total += sum[i];
    if (total == 12345)
        *sink = (float)total;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median seconds of a kernel over the whole memory; 0 on failure. */
static double time_of(bml_queue *queue, void (*kernel)(const uint4 *, size_t, float *),
                      const void *data, float *sink)
{
    float ms[REPEATS];
    cudaEvent_t begin = nullptr, end = nullptr;
    bml_cuda_note(queue, cudaEventCreate(&begin));
    bml_cuda_note(queue, cudaEventCreate(&end));
    for (int i = -1; i < REPEATS && !queue->error; i++) { /* the first warms up */
        cudaEventRecord(begin, queue->stream);
        kernel<<<4 * queue->device->n_multiprocessors, THREADS, 0, queue->stream>>>(
            (const uint4 *)data, read_bytes / sizeof(uint4), sink);
        launched(queue);
        cudaEventRecord(end, queue->stream);
        bml_cuda_note(queue, cudaStreamSynchronize(queue->stream));
        if (i >= 0)
            bml_cuda_note(queue, cudaEventElapsedTime(&ms[i], begin, end));
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    if (queue->error)
        return 0;
    qsort(ms, REPEATS, sizeof *ms, by_value);
    return 1e-3 * ms[REPEATS / 2];
}

bml_status bml_cuda_measure(bml_queue *queue, bml_limits *limits, bml_error *err)
{
    void *data = nullptr, *sink = nullptr;
    cudaError_t error = cudaMalloc(&data, read_bytes);
    if (!error)
        error = cudaMalloc(&sink, sizeof(float));
    if (!error)
        error = cudaMemset(data, 0, read_bytes);
    if (!error)
        error = cudaStreamSynchronize(0);
    queue->error = error;
    bml_limits l = {};
    double lanes = 4.0 * queue->device->n_multiprocessors * THREADS * CHAINS * STEPS;
    l.read_bytes_per_s = (double)read_bytes / time_of(queue, read_all, data, (float *)sink);
    l.flops_per_s = 2 * lanes / time_of(queue, multiply_add, data, (float *)sink);
    l.int8_ops_per_s = 8 * lanes / time_of(queue, dot, data, (float *)sink);
    cudaFree(data);
    cudaFree(sink);
    if (queue->error)
        return bml_cuda_fail(err, queue->error, read_bytes, "measuring it");
    *limits = l;
    return BML_OK;
}
