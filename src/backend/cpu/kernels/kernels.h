/*
 * What every kernel file includes. Each file is compiled once for every instruction set, with
 * BML_ISA naming it (base, avx2, avx512); table.c gathers the results into a bml_backend.
 */
#ifndef BML_BACKEND_CPU_KERNELS_KERNELS_H
#define BML_BACKEND_CPU_KERNELS_KERNELS_H

#include "backend/cpu/cpu.h"
#include "backend/cpu/kernels/vec.h"

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
void KERNEL(argmax)(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                    int n_cols, int n_valid);
bml_status KERNEL(measure)(bml_queue *queue, bml_limits *limits, bml_error *err);

/* One row of softmax in place; shared by the softmax and attention kernels. */
void KERNEL(softmax_row)(float *x, size_t n);

/* Runs BODY(context, begin, end) over 0..n, split over the pool in multiples of GRAIN; on the
 * calling thread alone when n * cost, in elements touched, is too small to be worth waking others.
 */
typedef void bml_range_fn(const void *context, size_t begin, size_t end);
void KERNEL(parallel)(bml_queue *queue, bml_range_fn *body, const void *context, size_t n,
                      size_t grain, size_t cost);

#endif
