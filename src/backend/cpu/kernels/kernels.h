/*
 * What every kernel file includes. Each file is compiled once for every instruction set, with
 * BML_ISA naming it (base, avx2, avx512); table.c gathers the results into a bml_backend.
 */
#ifndef BML_BACKEND_CPU_KERNELS_KERNELS_H
#define BML_BACKEND_CPU_KERNELS_KERNELS_H

#include "backend/cpu/cpu.h"
#include "backend/cpu/kernels/vec.h"
#include "backend/cpu/quant.h"

#define BML_PASTE(isa, name) bml_cpu_##isa##_##name
#define BML_PASTE_ISA(isa, name) BML_PASTE(isa, name)
#define KERNEL(name) BML_PASTE_ISA(BML_ISA, name)

void KERNEL(embedding)(bml_queue *queue, bml_buffer *out, const bml_weight *wte,
                       const bml_weight *wpe);
void KERNEL(layernorm)(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                       const bml_buffer *weight, const bml_buffer *bias, int n_rows, int n_embd,
                       float epsilon, bool rows_of_batch);
void KERNEL(matmul)(bml_queue *queue, bml_buffer *c, const bml_buffer *a, const bml_buffer *b,
                    int m, int n, int k);
void KERNEL(linear)(bml_queue *queue, bml_buffer *out, const bml_buffer *x, const bml_weight *w,
                    const bml_buffer *bias, int n_tokens);
void KERNEL(linear_transposed)(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                               const bml_weight *w, const bml_buffer *bias, int n_tokens);
void KERNEL(qkv_split)(bml_queue *queue, bml_buffer *q, bml_buffer *k, bml_buffer *v,
                       const bml_buffer *qkv, int n_tokens, int n_head, int head_dim);
void KERNEL(kv_append)(bml_queue *queue, bml_kv_cache *cache, int layer, const bml_buffer *k,
                       const bml_buffer *v);
void KERNEL(softmax)(bml_queue *queue, bml_buffer *x, int n_rows, int n_cols);
void KERNEL(attention)(bml_queue *queue, bml_buffer *out, const bml_buffer *q, const bml_buffer *k,
                       const bml_buffer *v, int n_tokens, int n_head, int head_dim, float scale);
void KERNEL(attention_cached)(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                              const bml_kv_cache *cache, int layer, float scale);
void KERNEL(heads_merge)(bml_queue *queue, bml_buffer *out, const bml_buffer *heads, int n_tokens,
                         int n_head, int head_dim);
void KERNEL(residual_add)(bml_queue *queue, bml_buffer *x, const bml_buffer *y, size_t n);
void KERNEL(gelu)(bml_queue *queue, bml_buffer *x, size_t n, bml_activation activation);
void KERNEL(score)(bml_queue *queue, bml_buffer *scores, const bml_buffer *logits, int n_rows,
                   int n_cols);
void KERNEL(argmax)(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                    int n_cols, int n_valid);
bml_status KERNEL(measure)(bml_queue *queue, bml_limits *limits, bml_error *err);

/* Makes a weight of any format; the rest of the backend's functions are in device.c. */
bml_status KERNEL(weight_new)(bml_device *device, const bml_matrix *matrix, bool out_in,
                              bml_weight_format format, bml_weight *weight, bml_error *err);

/* The whole pass at once. */
bool KERNEL(forward)(bml_queue *queue, const bml_weights *weights, const bml_batch *batch,
                     bml_activations *activations, bml_kv_cache *cache, int n_valid);

/* ---- what kernels share with the fused pass ---- */

/* One row of activations to int8. */
void KERNEL(quantize_row)(const float *x, size_t n_in, bml_quant_row *row);

/* out [n_embd] = wte[token] + wpe[position] */
void KERNEL(embedding_row)(float *out, const bml_weight *wte, const bml_weight *wpe, int32_t token,
                           int32_t position);

/* One row of layernorm; bias may be NULL. */
void KERNEL(layernorm_row)(float *out, const float *x, const float *weight, const float *bias,
                           size_t n, float epsilon);

/* One token's keys or values, rows of D floats H apart by STRIDE, into its slot and position. */
void KERNEL(cache_store)(const bml_kv_cache *cache, void *to, int32_t slot, int32_t position,
                         size_t head, const float *from);

/*
 * The attention of one head for a group of the batch's tokens: group of attend_groups, a few tokens
 * each. Token t's query is q[t * q_stride..], its result goes to out[t * out_stride..]. All keys
 * and values of the batch lie in the cache. SCRATCH is the thread's.
 */
size_t KERNEL(attend_groups)(const bml_batch *batch);
void KERNEL(attend_group)(const bml_batch *batch, size_t group, float *out, size_t out_stride,
                          const float *q, size_t q_stride, const bml_kv_cache *cache, int layer,
                          size_t head, float scale, float *scratch);

/* argmax over n logits. */
int32_t KERNEL(argmax_row)(const float *logits, size_t n);

/* One row of softmax in place, all but the last step: multiplying it by what is returned. */
float KERNEL(exp_row)(float *x, size_t n);

/* Runs BODY(context, begin, end) over 0..n, split over the pool in multiples of GRAIN; on the
 * calling thread alone when n * cost, in elements touched, is too small to be worth waking others.
 */
typedef void bml_range_fn(const void *context, size_t begin, size_t end);
void KERNEL(parallel)(bml_queue *queue, bml_range_fn *body, const void *context, size_t n,
                      size_t grain, size_t cost);

#endif
