/*
 * The Metal backend's own view of the seam's opaque types, and how its parts talk to each other.
 * Objective-C is kept to library.m, device.m and encoder.m; what is above them is C. Objects are
 * retained and released by hand.
 */
#ifndef BML_BACKEND_METAL_METAL_H
#define BML_BACKEND_METAL_METAL_H

#include "backend/backend.h"
#include "backend/metal/kernels/arguments.h"

#include <pthread.h>

#ifdef __OBJC__
#import <Metal/Metal.h>
#define BML_OBJECT(protocol) id<protocol>
#else
#define BML_OBJECT(protocol) void *
#endif

/* The kernels of the library. Those that multiply by weights have a pipeline for each format. */
typedef enum bml_metal_kernel {
    BML_METAL_EMBEDDING,
    BML_METAL_LAYERNORM,
    BML_METAL_MATMUL,
    BML_METAL_LINEAR,
    BML_METAL_LINEAR_TRANSPOSED,
    BML_METAL_LINEAR_PACKED,
    BML_METAL_VECTOR_ROWS,
    BML_METAL_VECTOR_DOTS,
    BML_METAL_VECTOR_PACKED,
    BML_METAL_TILE_8,
    BML_METAL_TILE_32,
    BML_METAL_QKV_SPLIT,
    BML_METAL_KV_APPEND,
    BML_METAL_SOFTMAX,
    BML_METAL_ATTENTION,
    BML_METAL_ATTENTION_CACHED,
    BML_METAL_ATTENTION_QUERY_64,
    BML_METAL_ATTENTION_QUERY_128,
    BML_METAL_ATTENTION_QUERY_256,
    BML_METAL_ATTENTION_GROUP,
    BML_METAL_HEADS_MERGE,
    BML_METAL_RESIDUAL_ADD,
    BML_METAL_GELU,
    BML_METAL_ARGMAX,
    BML_METAL_SCORE,
    BML_METAL_MEASURE_READ,
    BML_METAL_MEASURE_MULTIPLY,
    BML_METAL_N_KERNELS
} bml_metal_kernel;

struct bml_device {
    BML_OBJECT(MTLDevice) gpu;
    BML_OBJECT(MTLLibrary) library;
    BML_OBJECT(MTLComputePipelineState) pipelines[BML_METAL_N_KERNELS][N_FORMATS];
    pthread_mutex_t lock;    /* over .pipelines and .ready, which sessions share */
    unsigned formats, ready; /* of its weights, a bit each; those prepared for */
    bool prepared;           /* the pipelines for .ready are made */
    bool has_matrices;       /* simdgroup matrices: Apple GPUs from the M1 on */
    bml_buffer nothing;      /* stands where a kernel's optional buffer is not there */
    struct bml_device *host; /* the CPU backend's, which converts and packs weights */
};

/* A pass's batch as kernels read it, and the groups of its queries that follow each other in a
 * slot: arrays of int32, side by side in one buffer. */
typedef struct bml_metal_batch {
    bml_buffer buffer;
    size_t capacity;                                                    /* entries of each array */
    size_t token, position, slot, row, target, group_first, group_size; /* where the arrays begin */
    int n_tokens, n_groups;
    bool one_a_slot; /* no two tokens of the batch are of one slot */
} bml_metal_batch;

struct bml_queue {
    bml_device *device;
    BML_OBJECT(MTLCommandQueue) commands;
    BML_OBJECT(MTLCommandBuffer) pass; /* between begin and end */
    BML_OBJECT(MTLComputeCommandEncoder) encoder;
    bml_metal_batch batch;
    bool plain;             /* only the fourteen plain kernels: what tests hold the others to */
    double seconds, latest; /* the GPU's, of all passes and of the latest */
    bml_error failure;      /* of a part of this pass, until end reports it; code BML_OK for none */
};

/* ---- library.m --------------------------------------------------------------------------------*/

/* Compiles the embedded program. */
bml_status bml_metal_library_new(bml_device *device, bml_error *err);

/* Makes the pipelines that passes over the device's weights can need, once. */
bml_status bml_metal_prepare(bml_device *device, bml_error *err);

/* Threads of a threadgroup. */
int bml_metal_threads(bml_metal_kernel kernel);

/* ---- device.m ---------------------------------------------------------------------------------*/

bml_status bml_metal_open(bml_device **device, bml_error *err);
void bml_metal_close(bml_device *device);
bml_status bml_metal_weight_new(bml_device *device, const bml_matrix *matrix, bool out_in,
                                bml_weight_format format, bml_weight *weight, bml_error *err);
void bml_metal_weight_free(bml_device *device, bml_weight *weight);
bml_status bml_metal_buffer_new(bml_device *device, size_t bytes, bml_buffer *buffer,
                                bml_error *err);
void bml_metal_buffer_free(bml_device *device, bml_buffer *buffer);
bml_status bml_metal_upload(bml_queue *queue, bml_buffer *to, const void *from, size_t bytes,
                            bml_error *err);
bml_status bml_metal_download(bml_queue *queue, void *to, const bml_buffer *from, size_t bytes,
                              bml_error *err);

/* ---- encoder.m: one command buffer, one encoder a pass ----------------------------------------*/

bml_status bml_metal_queue_new(bml_device *device, int n_threads, bml_queue **queue,
                               bml_error *err);
void bml_metal_queue_free(bml_queue *queue);
int bml_metal_queue_threads(const bml_queue *queue);
double bml_metal_device_seconds(const bml_queue *queue);
bml_status bml_metal_begin(bml_queue *queue, const bml_batch *batch, bml_error *err);
void bml_metal_finish(bml_queue *queue);
bml_status bml_metal_end(bml_queue *queue, bml_error *err);

enum { BML_METAL_MAX_BINDINGS = 8, BML_METAL_MAX_MEMORIES = 2 };

/* A buffer from OFFSET bytes on. */
typedef struct bml_metal_binding {
    const bml_buffer *buffer; /* may hold nothing where the kernel then does not look */
    size_t offset;
} bml_metal_binding;

/* One dispatch: buffers 0 to n_buffers - 1, then the arguments. */
typedef struct bml_metal_call {
    bml_metal_kernel kernel;
    unsigned format; /* of the weights, for kernels that have a pipeline for each */
    bml_metal_binding buffers[BML_METAL_MAX_BINDINGS];
    int n_buffers;
    const void *args;
    size_t args_bytes;
    size_t memory[BML_METAL_MAX_MEMORIES]; /* threadgroup memory, floats or as wide; 0: no more */
    size_t n_groups;                       /* threadgroups; 0: nothing to do */
} bml_metal_call;

void bml_metal_dispatch(bml_queue *queue, const bml_metal_call *call);

/* Threadgroups for N elements, one a thread. */
size_t bml_metal_groups_for(bml_metal_kernel kernel, size_t n);

/* ---- product.c: which kernel multiplies -------------------------------------------------------*/

/* out = x W + bias, and what is taken in with it where the kernel for this shape can. */
typedef struct bml_metal_product {
    const bml_buffer *out, *x, *bias;
    const bml_weight *w;
    int n_tokens;
    const bml_norm_weights *norm; /* of x, before; NULL for none */
    float epsilon;
    int epilogue; /* EPILOGUE_ADD: out += x W + bias */
    bml_activation activation;
} bml_metal_product;

bool bml_metal_takes_norm(const bml_queue *queue, const bml_weight *w, int n_tokens);
bool bml_metal_takes_epilogue(const bml_queue *queue, const bml_weight *w, int n_tokens);
void bml_metal_multiply(bml_queue *queue, const bml_metal_product *product);
weight_layout bml_metal_layout(const bml_weight *w);
void bml_metal_linear(bml_queue *queue, bml_buffer *out, const bml_buffer *x, const bml_weight *w,
                      const bml_buffer *bias, int n_tokens);

/* ---- attention.c: which kernel attends --------------------------------------------------------*/

/* The batch's queries against a layer of the cache. */
typedef struct bml_metal_attention {
    const bml_buffer *out, *q;
    head_strides out_strides, q_strides;
    const bml_kv_cache *cache;
    int layer;
    float scale;
    bool append; /* keys and values lie behind the queries, and go to the cache first */
} bml_metal_attention;

/* Whether the kernel for this batch can append. */
bool bml_metal_attention_appends(const bml_queue *queue, const bml_kv_cache *cache);
void bml_metal_attend(bml_queue *queue, const bml_metal_attention *attention);
void bml_metal_append(bml_queue *queue, const bml_kv_cache *cache, int layer, bml_metal_binding k,
                      bml_metal_binding v, head_strides from);
void bml_metal_attention_stateless(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                                   const bml_buffer *k, const bml_buffer *v, int n_tokens,
                                   int n_head, int head_dim, float scale);
void bml_metal_attention_cached(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                                const bml_kv_cache *cache, int layer, float scale);
void bml_metal_kv_append(bml_queue *queue, bml_kv_cache *cache, int layer, const bml_buffer *k,
                         const bml_buffer *v);

/* ---- kernels.c: the others --------------------------------------------------------------------*/

void bml_metal_embedding(bml_queue *queue, bml_buffer *out, const bml_weight *wte,
                         const bml_weight *wpe);
void bml_metal_layernorm(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                         const bml_buffer *weight, const bml_buffer *bias, int n_rows, int n_embd,
                         float epsilon, bool rows_of_batch);
void bml_metal_matmul(bml_queue *queue, bml_buffer *c, const bml_buffer *a, const bml_buffer *b,
                      int m, int n, int k);
void bml_metal_qkv_split(bml_queue *queue, bml_buffer *q, bml_buffer *k, bml_buffer *v,
                         const bml_buffer *qkv, int n_tokens, int n_head, int head_dim);
void bml_metal_softmax(bml_queue *queue, bml_buffer *x, int n_rows, int n_cols);
void bml_metal_heads_merge(bml_queue *queue, bml_buffer *out, const bml_buffer *heads, int n_tokens,
                           int n_head, int head_dim);
void bml_metal_residual_add(bml_queue *queue, bml_buffer *x, const bml_buffer *y, size_t n);
void bml_metal_gelu(bml_queue *queue, bml_buffer *x, size_t n, bml_activation activation);
void bml_metal_argmax(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                      int n_cols, int n_valid);

void bml_metal_score(bml_queue *queue, bml_buffer *scores, const bml_buffer *logits, int n_rows,
                     int n_cols);

/* ---- pass.c, measure.c, table.c ---------------------------------------------------------------*/

bool bml_metal_forward(bml_queue *queue, const bml_weights *weights, const bml_batch *batch,
                       bml_activations *activations, bml_kv_cache *cache, int n_valid);
bml_status bml_metal_measure(bml_queue *queue, bml_limits *limits, bml_error *err);

/* The text of kernels/, one file after the other; made by cmake/embed_metal.cmake. */
extern const char bml_metal_source[];

#endif
