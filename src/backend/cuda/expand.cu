#include "backend/cuda/expand.h"
#include "backend/cuda/kernels/common.cuh"

extern "C" {
#include "base/memory.h"
}

#include <stdlib.h>

enum { THREADS = 256, ALIGNMENT = 256 };

struct bml_cuda_expanded {
    bml_weights weights; /* whose layers are ours */
    char *data;          /* device memory of all matrices */
};

void bml_cuda_expanded_free(bml_cuda_expanded *e)
{
    if (!e)
        return;
    cudaFree(e->data);
    free(e->weights.layers);
    free(e);
}

/* A block has a row. */
template <class T>
static __global__ void expand(T *to, const char *rows, bml_weight_format format, int n_in,
                              const float *row_scales, uint4 levels)
{
    size_t row = blockIdx.x;
    const char *from = rows + row * bml_cuda_row_bytes(format, (size_t)n_in);
    for (int i = threadIdx.x; i < n_in; i += THREADS) {
        float v;
        if (format == BML_WEIGHTS_Q8) {
            v = weight_at(rows, format, n_in, row, i);
        } else {
            int b = i / BML_CUDA_BLOCK, h = i / 32 % 2, c = i / 8 % 4;
            const char *at = from + bml_cuda_block_at(BML_WEIGHTS_Q4, b) + 8 * c + 4 * h;
            uint32_t nibble = *(const uint32_t *)at >> i % 8 * 4 & 0xf;
            const int8_t *scales = (const int8_t *)from + bml_cuda_scales_at(BML_WEIGHTS_Q4, b);
            float scale = row_scales[row] * scales[b % BML_CUDA_GROUP * 2 + h];
            v = scale * (int8_t)q4_levels_of(nibble, levels);
        }
        from_float(to + row * n_in + i, v);
    }
}

/* Matrices of a model that passes multiply with. */
template <class Call> static void each_matrix(bml_weights *w, Call call)
{
    for (int i = 0; i < w->config.n_layer; i++) {
        bml_layer_weights *l = &w->layers[i];
        call(&l->c_attn.w);
        call(&l->c_proj.w);
        call(&l->c_fc.w);
        call(&l->mlp_c_proj.w);
    }
    call(&w->lm_head.w);
}

static size_t bytes_of(const bml_weight *w)
{
    size_t bytes = 2 * (size_t)w->n_in * (size_t)w->n_out;
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Points W to its copy at TO. */
static void expand_to(bml_weight *w, char *to, bml_dtype type)
{
    const char *rows = (const char *)w->buffer.data;
    const float *row_scales =
        (const float *)(rows + (size_t)w->n_out * bml_cuda_row_bytes(w->format, (size_t)w->n_in));
    if (type == BML_BF16)
        expand<<<w->n_out, THREADS>>>((__nv_bfloat16 *)to, rows, w->format, w->n_in, row_scales,
                                      q4_levels());
    else
        expand<<<w->n_out, THREADS>>>((__half *)to, rows, w->format, w->n_in, row_scales,
                                      q4_levels());
    w->buffer = {to, NULL, bytes_of(w)};
    w->format = type == BML_BF16 ? BML_WEIGHTS_BF16 : BML_WEIGHTS_F16;
    w->dtype = type;
    w->out_in = true;
}

static bml_cuda_expanded *expanded_new(const bml_weights *w, bml_dtype type, cudaError_t *error)
{
    size_t n = (size_t)w->config.n_layer, bytes = 0;
    bml_cuda_expanded *e = (bml_cuda_expanded *)bml_calloc(1, sizeof *e);
    bml_layer_weights *layers = (bml_layer_weights *)bml_calloc(n, sizeof *layers);
    *error = e && layers ? cudaSuccess : cudaErrorMemoryAllocation;
    if (!*error) {
        memcpy(layers, w->layers, n * sizeof *layers);
        e->weights = *w;
        e->weights.layers = layers;
        layers = NULL;
        each_matrix(&e->weights,
                    [&](bml_weight *m) { bytes += bml_cuda_packed(m->format) ? bytes_of(m) : 0; });
        *error = cudaMalloc((void **)&e->data, bytes);
    }
    if (!*error) {
        char *to = e->data;
        each_matrix(&e->weights, [&](bml_weight *m) {
            if (bml_cuda_packed(m->format)) {
                expand_to(m, to, type);
                to += m->buffer.bytes;
            }
        });
        *error = cudaGetLastError();
    }
    if (!*error) /* the queue's stream does not wait for the copies */
        *error = cudaStreamSynchronize(0);
    if (*error) {
        bml_cuda_expanded_free(e);
        e = NULL;
    }
    free(layers);
    return e;
}

const bml_weights *bml_cuda_expand(bml_queue *queue, const bml_weights *w, bml_dtype type)
{
    if (!bml_cuda_packed(w->layers[0].c_attn.w.format))
        return w;
    if (!queue->expanded && !queue->no_expanded) {
        cudaError_t error;
        queue->expanded = expanded_new(w, type, &error);
        queue->no_expanded = error != cudaSuccess;
        if (error == cudaErrorMemoryAllocation)
            cudaGetLastError(); /* nobody is to find it */
        else if (error)
            bml_cuda_note(queue, error);
    }
    return queue->expanded ? &queue->expanded->weights : w;
}
