/* Kernels that fold a row into a number or two: layernorm, softmax, argmax, score. A block has a
 * row. */
#include "backend/cuda/kernels/common.cuh"

enum { THREADS = 256, ARGMAX_THREADS = 1024 };

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

/* ALSO, which may be null, gets the ids too. */
static __global__ void argmax(bml_cuda_choice choice, const float *logits, int n_cols, int n_valid)
{
    const float *xs = logits + (size_t)blockIdx.x * n_cols;
    __shared__ candidate all[32];
    candidate best = {-INFINITY, NO_ID};
#pragma unroll 8
    for (int i = threadIdx.x; i < n_valid; i += ARGMAX_THREADS)
        best = better(best, candidate{xs[i], isfinite(xs[i]) ? i : -1});
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0)
        all[threadIdx.x / 32] = best;
    __syncthreads();
    best = best_of_warp(all[threadIdx.x % 32]);
    if (threadIdx.x == 0)
        give(choice, blockIdx.x, best.id);
}

void bml_cuda_argmax(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                     int n_cols, int n_valid)
{
    if (n_rows == queue->batch->n_rows)
        queue->ids = ids->data;
    argmax<<<n_rows, ARGMAX_THREADS, 0, queue->stream>>>(
        bml_cuda_choice_of(queue, ids, n_rows), (const float *)logits->data, n_cols, n_valid);
    launched(queue);
}

static __global__ void score(bml_row_score *scores, const float *logits, const int32_t *targets,
                             int n_cols)
{
    const float *xs = logits + (size_t)blockIdx.x * n_cols;
    int target = targets[blockIdx.x], before = 0, bad = 0;
    float own = xs[target], max = -INFINITY;
    for (int i = threadIdx.x; i < n_cols; i += THREADS) {
        bad += !isfinite(xs[i]);
        before += xs[i] > own || (xs[i] == own && i < target);
        max = larger(max, xs[i]);
    }
    bad = fold_block<int>(bad, add);
    before = fold_block<int>(before, add);
    max = bad ? NAN : fold_block<float>(max, larger);
    /* A thread adds up a few hundred terms in float32; the threads' sums are added in float64. */
    float sum = 0, weighted = 0;
    for (int i = threadIdx.x; i < n_cols && !bad; i += THREADS) {
        float d = xs[i] - max, e = expf(d);
        sum += e;
        weighted += d * e;
    }
    double all = fold_block<double>(sum, add), all_weighted = fold_block<double>(weighted, add);
    if (threadIdx.x == 0)
        scores[blockIdx.x] = {max, own, before + 1, (float)all, (float)all_weighted};
}

void bml_cuda_score(bml_queue *queue, bml_buffer *scores, const bml_buffer *logits, int n_rows,
                    int n_cols)
{
    score<<<n_rows, THREADS, 0, queue->stream>>>((bml_row_score *)scores->data,
                                                 (const float *)logits->data,
                                                 bml_cuda_batch_of(queue).target, n_cols);
    launched(queue);
}
