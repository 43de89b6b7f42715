/* Kernels that fold a row into a number or two: layernorm, softmax, argmax. A block has a row. */
#include "backend/cuda/kernels/common.cuh"

enum { THREADS = 256 };

/* Two passes in float64: the mean may be large against the spread. */
static __global__ void layernorm(float *out, const float *x, const float *weight, const float *bias,
                                 int n, float epsilon, const int32_t *row)
{
    const float *xs = x + (row ? (size_t)row[blockIdx.x] : blockIdx.x) * n;
    double sum = 0, squares = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        sum += xs[i];
    double mean = fold_block<double>(sum, add) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        squares += (xs[i] - mean) * (xs[i] - mean);
    double scale = 1 / sqrt(fold_block<double>(squares, add) / n + epsilon);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float y = (float)((xs[i] - mean) * scale) * weight[i];
        out[(size_t)blockIdx.x * n + i] = bias ? y + bias[i] : y;
    }
}

void bml_cuda_layernorm(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                        const bml_buffer *weight, const bml_buffer *bias, int n_rows, int n_embd,
                        float epsilon, bool rows_of_batch)
{
    const int32_t *row = rows_of_batch ? bml_cuda_batch_of(queue).row : nullptr;
    layernorm<<<n_rows, THREADS, 0, queue->stream>>>(
        (float *)out->data, (const float *)x->data, (const float *)weight->data,
        (const float *)bias->data, n_embd, epsilon, row);
    launched(queue);
}

static __global__ void softmax(float *x, int n)
{
    float *xs = x + (size_t)blockIdx.x * n, max = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        max = larger(max, xs[i]);
    max = fold_block<float>(max, larger);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        xs[i] = max == -INFINITY ? 0 : expf(xs[i] - max);
        sum += xs[i];
    }
    sum = fold_block<float>(sum, add);
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        xs[i] = max == -INFINITY ? 0 : xs[i] / sum;
}

void bml_cuda_softmax(bml_queue *queue, bml_buffer *x, int n_rows, int n_cols)
{
    softmax<<<n_rows, THREADS, 0, queue->stream>>>((float *)x->data, n_cols);
    launched(queue);
}

static __global__ void argmax(int32_t *ids, const float *logits, int n_cols, int n_valid)
{
    const float *xs = logits + (size_t)blockIdx.x * n_cols;
    __shared__ candidate all[THREADS];
    candidate best = {-INFINITY, NO_ID};
    for (int i = threadIdx.x; i < n_valid; i += blockDim.x)
        best = better(best, candidate{xs[i], isfinite(xs[i]) ? i : -1});
    all[threadIdx.x] = best;
    __syncthreads();
    for (int step = THREADS / 2; step; step /= 2) {
        if (threadIdx.x < step)
            all[threadIdx.x] = better(all[threadIdx.x], all[threadIdx.x + step]);
        __syncthreads();
    }
    if (threadIdx.x == 0)
        ids[blockIdx.x] = all[0].id;
}

void bml_cuda_argmax(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                     int n_cols, int n_valid)
{
    argmax<<<n_rows, THREADS, 0, queue->stream>>>((int32_t *)ids->data, (const float *)logits->data,
                                                  n_cols, n_valid);
    launched(queue);
}
