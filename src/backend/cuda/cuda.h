/* The CUDA backend's own view of the seam's opaque types; see backend.h. */
#ifndef BML_BACKEND_CUDA_CUDA_H
#define BML_BACKEND_CUDA_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

#include "backend/backend.h"
#include "backend/cuda/chain.h"

#include <cuda_runtime_api.h>

struct bml_device {
    int n_multiprocessors, capability; /* 90 for compute capability 9.0 */
    int n_clusters;                    /* of the one-launch step; 0: none, see decode.h */
    int shared_bytes;                  /* most shared memory that a block can have */
    int l2_bytes;                      /* of the L2 cache */
    bool shared;                       /* kernels of other processes may run at the same time */
    size_t max_width;                  /* the most inputs that any of its weights has */
    bml_device *packer;                /* of the CPU backend, which quantises; NULL until needed */
};

/* A row's draw, as the kernel wants it. */
typedef struct bml_cuda_draw {
    double uniform; /* in [0, 1): how far into the sum of probabilities */
    float temperature, top_p, min_p;
    int32_t top_k;
} bml_cuda_draw;

/* The arrays of a batch in device memory. */
typedef struct bml_cuda_batch {
    const int32_t *token, *position, *slot, *row, *target;
} bml_cuda_batch;

struct bml_queue {
    bml_device *device;
    cudaStream_t stream;
    cudaError_t error; /* the first that enqueueing gave since begin() */
    const bml_batch *batch;
    /* Pinned memory that begins with the draws of the batch's rows, [2][batch_capacity], which
     * kernels read there: both halves are the same, but for a step enqueued ahead (chain.h). The
     * batch's arrays side by side and room for query tiles (prefill.h) behind them: more of it, and
     * its copy on the device, made when the first kernel asks for it. */
    bml_cuda_draw *draws;
    int32_t *batch_host, *batch_device;
    size_t batch_capacity;
    int n_tiles; /* of the tiles, when they are there: before the copy */
    bool batch_copied;
    /* Memory for kernels, grown by begin() and by nothing else, so that kernels cannot fail. */
    char *scratch;
    size_t scratch_bytes;
    struct bml_cuda_decoder *decoder;   /* see decode.h; NULL until needed */
    bool no_decoder;                    /* making it failed */
    struct bml_cuda_expanded *expanded; /* see expand.h; NULL until needed */
    bool no_expanded;
    struct bml_cuda_graph *graph; /* see pass16.h; NULL until needed */
    /* Pinned memory for the ids of rows (choice.h), and the buffer of which this pass leaves a copy
     * there; NULL for none. */
    int32_t *ids_host;
    const void *ids;
    bml_cuda_chain chain;
};

/* The batch of this pass, copied to the device if it is not there yet. */
bml_cuda_batch bml_cuda_batch_of(bml_queue *queue);

/* As bml_backend.sample, of the batch's rows, to CHOICE, whose halves are those of the draws too.
 */
void bml_cuda_draw_rows(bml_queue *queue, const bml_cuda_choice *choice, bml_buffer *logits,
                        int n_rows, int n_cols, int n_valid);

/* Where this pass's argmax over N_ROWS rows goes: to IDS and, if these are the batch's rows, to the
 * host and to the step that may follow. */
bml_cuda_choice bml_cuda_choice_of(const bml_queue *queue, const bml_buffer *ids, int n_rows);

/* Where the tiles of the batch go, on the host and on the device. */
int32_t *bml_cuda_tiles_host(bml_queue *queue);
const int32_t *bml_cuda_tiles_device(const bml_queue *queue);

/* Keeps the first failure for end(). */
void bml_cuda_note(bml_queue *queue, cudaError_t error);

/* One line for an error of the runtime; BYTES is what was asked for, if it was memory. */
bml_status bml_cuda_fail(bml_error *err, cudaError_t error, size_t bytes, const char *what);

bml_status bml_cuda_weight_new(bml_device *device, const bml_matrix *matrix, bool out_in,
                               bml_weight_format format, bml_weight *weight, bml_error *err);
void bml_cuda_weight_free(bml_device *device, bml_weight *weight);

/* As bml_backend.forward; see forward.c. */
bool bml_cuda_forward(bml_queue *queue, const bml_weights *weights, const bml_batch *batch,
                      bml_activations *activations, bml_kv_cache *cache, int n_valid);

bml_status bml_cuda_measure(bml_queue *queue, bml_limits *limits, bml_error *err);

/* ---- the fourteen kernels ---- */

void bml_cuda_embedding(bml_queue *queue, bml_buffer *out, const bml_weight *wte,
                        const bml_weight *wpe);
void bml_cuda_layernorm(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                        const bml_buffer *weight, const bml_buffer *bias, int n_rows, int n_embd,
                        float epsilon, bool rows_of_batch);
void bml_cuda_matmul(bml_queue *queue, bml_buffer *c, const bml_buffer *a, const bml_buffer *b,
                     int m, int n, int k);
void bml_cuda_linear(bml_queue *queue, bml_buffer *out, const bml_buffer *x, const bml_weight *w,
                     const bml_buffer *bias, int n_tokens);
void bml_cuda_qkv_split(bml_queue *queue, bml_buffer *q, bml_buffer *k, bml_buffer *v,
                        const bml_buffer *qkv, int n_tokens, int n_head, int head_dim);
void bml_cuda_kv_append(bml_queue *queue, bml_kv_cache *cache, int layer, const bml_buffer *k,
                        const bml_buffer *v);
void bml_cuda_softmax(bml_queue *queue, bml_buffer *x, int n_rows, int n_cols);
void bml_cuda_attention_stateless(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                                  const bml_buffer *k, const bml_buffer *v, int n_tokens,
                                  int n_head, int head_dim, float scale);
void bml_cuda_attention_cached(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                               const bml_kv_cache *cache, int layer, float scale);
void bml_cuda_heads_merge(bml_queue *queue, bml_buffer *out, const bml_buffer *heads, int n_tokens,
                          int n_head, int head_dim);
void bml_cuda_residual_add(bml_queue *queue, bml_buffer *x, const bml_buffer *y, size_t n);
void bml_cuda_gelu(bml_queue *queue, bml_buffer *x, size_t n, bml_activation activation);
void bml_cuda_score(bml_queue *queue, bml_buffer *scores, const bml_buffer *logits, int n_rows,
                    int n_cols);
void bml_cuda_sample(bml_queue *queue, bml_buffer *ids, bml_buffer *logits, int n_rows, int n_cols,
                     int n_valid);
void bml_cuda_argmax(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                     int n_cols, int n_valid);

#ifdef __cplusplus
}
#endif

#endif
