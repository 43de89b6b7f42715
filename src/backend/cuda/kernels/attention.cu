/* Attention, the plain way: a block has a query of a head. The softmax is taken online over chunks
 * of keys, so that any context fits. */
#include "backend/cuda/kernels/common.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, CHUNK = 512, KEYS = 4 };

/* How many keys are looked at side by side for each element of a head of D. */
BML_CUDA_BOTH static inline int groups_for(int d)
{
    return d < THREADS ? THREADS / d : 1;
}

/* Bytes of shared memory for that. */
static size_t acc_bytes(int d)
{
    return (size_t)groups_for(d) * d * sizeof(float);
}

/* One query q [D] against n keys and values [n, D]; acc [groups_for(D)][D] is shared memory. */
template <class T>
__device__ static void attend(float *out, const float *q, const T *k, const T *v, int n, int d,
                              float scale, float *acc)
{
    __shared__ float p[CHUNK];
    float max = -INFINITY, sum = 0;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = groups_for(d);
    for (int i = threadIdx.x; i < groups * d; i += THREADS)
        acc[i] = 0;
    for (int first = 0; first < n; first += CHUNK) {
        int m = min(CHUNK, n - first);
        for (int key = warp * KEYS; key < m; key += WARPS * KEYS) {
            float dot[KEYS] = {};
            for (int i = lane; i < d; i += 32)
#pragma unroll
                for (int j = 0; j < KEYS; j++) /* what is not there is the last one again */
                    dot[j] = fmaf(q[i], to_float(k[(size_t)(first + min(key + j, m - 1)) * d + i]),
                                  dot[j]);
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                for (int step = 16; step; step /= 2)
                    dot[j] += __shfl_xor_sync(~0u, dot[j], step);
                if (lane == j && key + j < m)
                    p[key + j] = dot[j] * scale;
            }
        }
        __syncthreads();
        float chunk_max = -INFINITY, chunk_sum = 0;
        for (int key = threadIdx.x; key < m; key += THREADS)
            chunk_max = larger(chunk_max, p[key]);
        float new_max = larger(max, fold_block<float>(chunk_max, larger));
        for (int key = threadIdx.x; key < m; key += THREADS)
            chunk_sum += p[key] = expf(p[key] - new_max);
        float before = first ? expf(max - new_max) : 0;
        sum = sum * before + fold_block<float>(chunk_sum, add);
        max = new_max;
        for (int i = threadIdx.x; i < groups * d; i += THREADS) {
            float total = acc[i] * before;
#pragma unroll 8
            for (int key = i / d; key < m; key += groups)
                total = fmaf(p[key], to_float(v[(size_t)(first + key) * d + i % d]), total);
            acc[i] = total;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < d; i += THREADS) {
        float total = 0;
        for (int group = 0; group < groups; group++)
            total += acc[group * d + i];
        out[i] = total / sum;
    }
}

static __global__ void attention(float *out, const float *q, const float *k, const float *v,
                                 int n_tokens, int d, float scale)
{
    extern __shared__ float acc[];
    size_t t = blockIdx.x, head = (size_t)blockIdx.y * n_tokens;
    attend(out + (head + t) * d, q + (head + t) * d, k + head * d, v + head * d, (int)t + 1, d,
           scale, acc);
}

void bml_cuda_attention_stateless(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                                  const bml_buffer *k, const bml_buffer *v, int n_tokens,
                                  int n_head, int head_dim, float scale)
{
    attention<<<dim3(n_tokens, n_head), THREADS, acc_bytes(head_dim), queue->stream>>>(
        (float *)out->data, (const float *)q->data, (const float *)k->data, (const float *)v->data,
        n_tokens, head_dim, scale);
    launched(queue);
}

template <class T>
static __global__ void attention_cached(float *out, const float *q, const T *k, const T *v, int d,
                                        int n_ctx, float scale, bml_cuda_batch batch)
{
    extern __shared__ float acc[];
    size_t t = blockIdx.x, n_tokens = gridDim.x, h = blockIdx.y, n_head = gridDim.y;
    size_t query = (h * n_tokens + t) * d, head = (batch.slot[t] * n_head + h) * n_ctx * d;
    attend(out + query, q + query, k + head, v + head, batch.position[t] + 1, d, scale, acc);
}

void bml_cuda_attention_cached(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                               const bml_kv_cache *cache, int layer, float scale)
{
    bml_cuda_batch batch = bml_cuda_batch_of(queue);
    dim3 grid(queue->batch->n_tokens, cache->n_head);
    with_type(cache->dtype, [&](auto type) {
        attention_cached<<<grid, THREADS, acc_bytes(cache->head_dim), queue->stream>>>(
            (float *)out->data, (const float *)q->data, (decltype(type))cache->k[layer].data,
            (decltype(type))cache->v[layer].data, cache->head_dim, cache->n_ctx, scale, batch);
    });
    launched(queue);
}
