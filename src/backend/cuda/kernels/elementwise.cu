/* Kernels that sum nothing: embedding, qkv_split, kv_append, heads_merge, residual_add, gelu. */
#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/launch.cuh"

enum { THREADS = 256 };

static __global__ void embedding(float *out, const char *wte, bml_weight_format wte_format,
                                 const char *wpe, bml_weight_format wpe_format, int n_embd,
                                 bml_cuda_batch batch)
{
    allow_next(); /* which reads weights before it waits */
    size_t t = blockIdx.x, token = batch.token[t], position = batch.position[t];
    for (int i = threadIdx.x; i < n_embd; i += blockDim.x)
        out[t * n_embd + i] = weight_at(wte, wte_format, n_embd, token, i) +
                              weight_at(wpe, wpe_format, n_embd, position, i);
}

void bml_cuda_embedding(bml_queue *queue, bml_buffer *out, const bml_weight *wte,
                        const bml_weight *wpe)
{
    bml_cuda_batch batch = bml_cuda_batch_of(queue);
    embedding<<<queue->batch->n_tokens, THREADS, 0, queue->stream>>>(
        (float *)out->data, (const char *)wte->buffer.data, wte->format,
        (const char *)wpe->buffer.data, wpe->format, wte->n_in, batch);
    launched(queue);
}

/* Thread i has element i of [T, C]: token t, head h, dimension d. */
struct element {
    size_t t, h, d;
    __device__ element(size_t i, size_t n_head, size_t head_dim)
        : t(i / (n_head * head_dim)), h(i / head_dim % n_head), d(i % head_dim)
    {
    }
    __device__ size_t in_heads(size_t n_tokens, size_t head_dim) const
    {
        return (h * n_tokens + t) * head_dim + d;
    }
};

static __global__ void qkv_split(float *q, float *k, float *v, const float *qkv, size_t n_tokens,
                                 size_t n_head, size_t head_dim)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, c = n_head * head_dim;
    if (i >= n_tokens * c)
        return;
    element e(i, n_head, head_dim);
    const float *from = qkv + e.t * 3 * c + i % c;
    size_t to = e.in_heads(n_tokens, head_dim);
    q[to] = from[0];
    k[to] = from[c];
    v[to] = from[2 * c];
}

void bml_cuda_qkv_split(bml_queue *queue, bml_buffer *q, bml_buffer *k, bml_buffer *v,
                        const bml_buffer *qkv, int n_tokens, int n_head, int head_dim)
{
    size_t n = (size_t)n_tokens * n_head * head_dim;
    qkv_split<<<blocks_for(n, THREADS), THREADS, 0, queue->stream>>>(
        (float *)q->data, (float *)k->data, (float *)v->data, (const float *)qkv->data, n_tokens,
        n_head, head_dim);
    launched(queue);
}

static __global__ void heads_merge(float *out, const float *heads, size_t n_tokens, size_t n_head,
                                   size_t head_dim)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n_tokens * n_head * head_dim)
        out[i] = heads[element(i, n_head, head_dim).in_heads(n_tokens, head_dim)];
}

void bml_cuda_heads_merge(bml_queue *queue, bml_buffer *out, const bml_buffer *heads, int n_tokens,
                          int n_head, int head_dim)
{
    size_t n = (size_t)n_tokens * n_head * head_dim;
    heads_merge<<<blocks_for(n, THREADS), THREADS, 0, queue->stream>>>(
        (float *)out->data, (const float *)heads->data, n_tokens, n_head, head_dim);
    launched(queue);
}

template <class T>
static __global__ void kv_append(T *ck, T *cv, const float *k, const float *v, size_t n_tokens,
                                 size_t n_head, size_t head_dim, size_t n_ctx, bml_cuda_batch batch)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_tokens * n_head * head_dim)
        return;
    element e(i, n_head, head_dim);
    size_t from = e.in_heads(n_tokens, head_dim);
    size_t to = ((batch.slot[e.t] * n_head + e.h) * n_ctx + batch.position[e.t]) * head_dim + e.d;
    from_float(ck + to, k[from]);
    from_float(cv + to, v[from]);
}

void bml_cuda_kv_append(bml_queue *queue, bml_kv_cache *cache, int layer, const bml_buffer *k,
                        const bml_buffer *v)
{
    bml_cuda_batch batch = bml_cuda_batch_of(queue);
    size_t n_tokens = queue->batch->n_tokens;
    size_t n = n_tokens * cache->n_head * cache->head_dim;
    with_type(cache->dtype, [&](auto type) {
        typedef std::remove_const_t<std::remove_pointer_t<decltype(type)>> T;
        kv_append<<<blocks_for(n, THREADS), THREADS, 0, queue->stream>>>(
            (T *)cache->k[layer].data, (T *)cache->v[layer].data, (const float *)k->data,
            (const float *)v->data, n_tokens, cache->n_head, cache->head_dim, cache->n_ctx, batch);
    });
    launched(queue);
}

static __global__ void residual_add(float *x, const float *y, size_t n)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] += y[i];
}

void bml_cuda_residual_add(bml_queue *queue, bml_buffer *x, const bml_buffer *y, size_t n)
{
    residual_add<<<blocks_for(n, THREADS), THREADS, 0, queue->stream>>>((float *)x->data,
                                                                        (const float *)y->data, n);
    launched(queue);
}

static __global__ void gelu(float *x, size_t n, bml_activation activation)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] = activate(x[i], activation);
}

void bml_cuda_gelu(bml_queue *queue, bml_buffer *x, size_t n, bml_activation activation)
{
    gelu<<<blocks_for(n, THREADS), THREADS, 0, queue->stream>>>((float *)x->data, n, activation);
    launched(queue);
}
