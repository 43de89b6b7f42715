/*
 * The seam between the engine and the processors: buffers, the fourteen kernels, and the frame
 * (begin, end) around a forward pass. src/gpt2/forward.c speaks this and nothing else.
 *
 * Shapes: row-major; T tokens in the batch, C = n_embd, H heads of D = C / H. Activations are
 * float32 on every backend; outputs never overlap inputs. Kernels run between begin and end, over
 * no more tokens than the batch has (layernorm, softmax, argmax and matmul: any number of rows).
 * They are enqueued in order on a bml_queue and take effect by the time end() returns; they cannot
 * fail on their own, a device's failure is reported by end().
 */
#ifndef BML_BACKEND_BACKEND_H
#define BML_BACKEND_BACKEND_H

#include "formats/checkpoint.h"

/* The processor and what is shared by all sessions on it. Each backend defines its own. */
typedef struct bml_device bml_device;

/* Where one session's work runs: a thread pool, a CUDA stream, a Metal command queue. */
typedef struct bml_queue bml_queue;

/* Memory that kernels can use. */
typedef struct bml_buffer {
    void *data;   /* host memory on CPU and Metal, device memory on CUDA; NULL for no buffer */
    void *native; /* the backend's own handle, if it needs one */
    size_t bytes;
} bml_buffer;

/*
 * A weight matrix as the backend holds it. F32, BF16 and F16 are row-major, as the file has them or
 * turned to [n_out, n_in]; Q8 and Q4 are in the backend's own layout (src/backend/cpu/quant.h,
 * src/backend/cuda/weight.h).
 */
typedef struct bml_weight {
    bml_buffer buffer;
    bml_weight_format format; /* never BML_WEIGHTS_FILE */
    bml_dtype dtype;          /* of the elements, row-major formats */
    int n_in, n_out;
    bool out_in; /* row-major formats: stored [n_out, n_in], else [n_in, n_out] */
    bool owned;  /* false: buffer is the mapped file itself */
} bml_weight;

/* Vectors are float32 weights of one row; buffer.data is NULL where the checkpoint has none. */
typedef struct bml_norm_weights {
    bml_weight weight, bias; /* [n_embd] */
} bml_norm_weights;

typedef struct bml_linear_weights {
    bml_weight w;
    bml_weight bias; /* [w.n_out] */
} bml_linear_weights;

typedef struct bml_layer_weights {
    bml_norm_weights ln_1;
    bml_linear_weights c_attn, c_proj;
    bml_norm_weights ln_2;
    bml_linear_weights c_fc, mlp_c_proj;
} bml_layer_weights;

/* A whole model. */
typedef struct bml_weights {
    bml_hf_config config;
    bml_weight wte, wpe;
    bml_layer_weights *layers; /* [config.n_layer] */
    bml_norm_weights ln_f;
    bml_linear_weights lm_head; /* no bias; wte itself when tied */
} bml_weights;

/* Where a pass keeps its intermediate results; made once a session for the largest batch. */
typedef struct bml_activations {
    bml_buffer x;       /* [T, C], the residual stream */
    bml_buffer normed;  /* [T, C] */
    bml_buffer qkv;     /* [T, 3C] */
    bml_buffer q, k, v; /* [H, T, D] */
    bml_buffer heads;   /* [H, T, D], what attention gives */
    bml_buffer merged;  /* [T, C] */
    bml_buffer branch;  /* [T, C], what is added to the residual stream */
    bml_buffer hidden;  /* [T, n_inner] */
    bml_buffer logits;  /* [R, vocab_size] */
    bml_buffer ids;     /* [R] int32 */
    bml_buffer scores;  /* [R] bml_row_score */
} bml_activations;

/* What drawing a row's token needs; see bml_sampling, whose repetition penalty is 1. */
typedef struct bml_draw {
    uint64_t seed, step; /* of bml_philox_uniform */
    float temperature, top_p, min_p;
    int32_t top_k;
} bml_draw;

/* The tokens of one pass. Arrays are the caller's and stay put until end() returns. */
typedef struct bml_batch {
    int n_tokens;
    const int32_t *token, *position, *slot; /* [n_tokens] */
    int n_rows;
    const int32_t *row;    /* [n_rows]: indices of the tokens that want logits, ascending */
    const int32_t *target; /* [n_rows]: the ids that score() is about; else NULL */
    const bml_draw *draw;  /* [n_rows]: how ids are drawn; NULL: they are the most probable ones */
} bml_batch;

/* A row of logits seen from one target id. */
typedef struct bml_row_score {
    float max, target;   /* the largest logit, NaN if any is not finite; the target's */
    int32_t rank;        /* 1 for the largest; of equal logits the lower id comes first */
    float sum, weighted; /* over all ids: e^d and d e^d with d = logit - max */
} bml_row_score;

/* Keys and values of every layer: k[l] and v[l] are [n_slots, H, n_ctx, D] of dtype. */
typedef struct bml_kv_cache {
    bml_dtype dtype;
    int n_layer, n_slots, n_ctx, n_head, head_dim;
    bml_buffer *k, *v;
} bml_kv_cache;

typedef struct bml_backend {
    const char *name;

    /* With weights of 16 bits or fewer, passes of many tokens are quick only with a 16-bit cache,
     * of heads up to this; 0: the cache makes no such difference. */
    int max_head_dim16;

    /* close, weight_free and buffer_free do nothing for a NULL device, a weight or a buffer that
     * is all zeros: whatever was made of a model that failed to load can be freed. */
    bml_status (*open)(bml_device **device, bml_error *err);
    void (*close)(bml_device *device);

    /* Makes a host matrix usable by kernels, converting it to FORMAT where that is asked for. The
     * host data must outlive the weight. */
    bml_status (*weight_new)(bml_device *device, const bml_matrix *matrix, bool out_in,
                             bml_weight_format format, bml_weight *weight, bml_error *err);
    void (*weight_free)(bml_device *device, bml_weight *weight);

    /* Zeroed memory of BYTES bytes. */
    bml_status (*buffer_new)(bml_device *device, size_t bytes, bml_buffer *buffer, bml_error *err);
    void (*buffer_free)(bml_device *device, bml_buffer *buffer);

    bml_status (*queue_new)(bml_device *device, int n_threads, bml_queue **queue, bml_error *err);
    void (*queue_free)(bml_queue *queue); /* waits for what it has enqueued */
    int (*queue_threads)(const bml_queue *queue);

    /* Copies between host memory and a buffer; both finish before they return. */
    bml_status (*upload)(bml_queue *queue, bml_buffer *to, const void *from, size_t bytes,
                         bml_error *err);
    bml_status (*download)(bml_queue *queue, void *to, const bml_buffer *from, size_t bytes,
                           bml_error *err);

    /* The frame around a pass. embedding, kv_append and attention_cached work on its batch. */
    bml_status (*begin)(bml_queue *queue, const bml_batch *batch, bml_error *err);
    bml_status (*end)(bml_queue *queue, bml_error *err);

    /* ---- the fourteen kernels ---- */

    /* out[t] = wte[token[t]] + wpe[position[t]]; out [T, C] */
    void (*embedding)(bml_queue *queue, bml_buffer *out, const bml_weight *wte,
                      const bml_weight *wpe);

    /* out[r] = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias for x = x[r], or, with
     * ROWS_OF_BATCH, x[row[r]] of the batch; out [T, C]; weight, bias [C] (bias.data may be NULL).
     * Two passes: the variance is the mean of squared deviations. */
    void (*layernorm)(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                      const bml_buffer *weight, const bml_buffer *bias, int n_rows, int n_embd,
                      float epsilon, bool rows_of_batch);

    /* c = a b; a [M, K], b [K, N], c [M, N] */
    void (*matmul)(bml_queue *queue, bml_buffer *c, const bml_buffer *a, const bml_buffer *b, int m,
                   int n, int k);

    /* out = x W + bias; x [T, n_in], W stored [n_in, n_out], out [T, n_out]; bias.data may be NULL
     */
    void (*linear)(bml_queue *queue, bml_buffer *out, const bml_buffer *x, const bml_weight *w,
                   const bml_buffer *bias, int n_tokens);

    /* The same with W stored [n_out, n_in]. */
    void (*linear_transposed)(bml_queue *queue, bml_buffer *out, const bml_buffer *x,
                              const bml_weight *w, const bml_buffer *bias, int n_tokens);

    /* qkv [T, 3C] -> q, k, v, each [H, T, D] */
    void (*qkv_split)(bml_queue *queue, bml_buffer *q, bml_buffer *k, bml_buffer *v,
                      const bml_buffer *qkv, int n_tokens, int n_head, int head_dim);

    /* k, v [H, T, D] of the batch into LAYER of the cache, each at its slot and position */
    void (*kv_append)(bml_queue *queue, bml_kv_cache *cache, int layer, const bml_buffer *k,
                      const bml_buffer *v);

    /* Each row of x [rows, cols] in place: exp(x - max) / sum; a row of all -inf gives zeros. */
    void (*softmax)(bml_queue *queue, bml_buffer *x, int n_rows, int n_cols);

    /* Stateless: q, k, v [H, T, D] of one whole prompt; token t sees tokens 0..t; out [H, T, D].
     * Scores are scale * q.k */
    void (*attention)(bml_queue *queue, bml_buffer *out, const bml_buffer *q, const bml_buffer *k,
                      const bml_buffer *v, int n_tokens, int n_head, int head_dim, float scale);

    /* q [H, T, D] of the batch against LAYER of the cache: token t sees positions 0..position[t] of
     * its slot; out [H, T, D] */
    void (*attention_cached)(bml_queue *queue, bml_buffer *out, const bml_buffer *q,
                             const bml_kv_cache *cache, int layer, float scale);

    /* heads [H, T, D] -> out [T, C] */
    void (*heads_merge)(bml_queue *queue, bml_buffer *out, const bml_buffer *heads, int n_tokens,
                        int n_head, int head_dim);

    /* x += y, n elements */
    void (*residual_add)(bml_queue *queue, bml_buffer *x, const bml_buffer *y, size_t n);

    /* The config's activation in place, n elements. */
    void (*gelu)(bml_queue *queue, bml_buffer *x, size_t n, bml_activation activation);

    /* ids[r] (int32) = the lowest index of the largest of the first n_valid of logits[r], a row of
     * n_cols; -1 if any of these is NaN or infinite. */
    void (*argmax)(bml_queue *queue, bml_buffer *ids, const bml_buffer *logits, int n_rows,
                   int n_cols, int n_valid);

    /* ---- optional: NULL where a backend has none ---- */

    /* The whole pass at once: what src/gpt2/forward.c does kernel by kernel (on the CPU to the bit,
     * elsewhere but for the order of sums). Leaves the rows' logits in activations->logits or, with
     * N_VALID > 0, their argmax over the first N_VALID ids in activations->ids, or what the batch's
     * draws take of these. False, and nothing is enqueued: there is no such pass for this model and
     * batch. */
    bool (*forward)(bml_queue *queue, const bml_weights *weights, const bml_batch *batch,
                    bml_activations *activations, bml_kv_cache *cache, int n_valid);

    /* scores[r] (bml_row_score) = the row logits[r] of n_cols seen from the batch's target[r]. */
    void (*score)(bml_queue *queue, bml_buffer *scores, const bml_buffer *logits, int n_rows,
                  int n_cols);

    /* Of each of the batch's rows: ids[r] (int32) = the token that its draw[r] takes from the first
     * n_valid of logits[r], a row of n_cols, in the order of src/gpt2/sampler.c; -1 if any of these
     * is NaN or infinite. LOGITS are lost. NULL only where they are in host memory: that file draws
     * there. */
    void (*sample)(bml_queue *queue, bml_buffer *ids, bml_buffer *logits, int n_rows, int n_cols,
                   int n_valid);

    /* Measures read bandwidth and float32 peak with the queue's threads. */
    bml_status (*measure)(bml_queue *queue, bml_limits *limits, bml_error *err);

    /* Waits for what has been enqueued since begin(), so that a kernel can be timed: only passes
     * that are traced call it. end() reports a failure. */
    void (*finish)(bml_queue *queue);

    /* Seconds that the device has spent on the queue's passes so far, by its own clock. */
    double (*device_seconds)(const bml_queue *queue);
} bml_backend;

/* The CPU backend with the kernels for the best instruction set this machine has. */
const bml_backend *bml_backend_cpu(void);

/* In builds that have them (BML_HAVE_CUDA, BML_HAVE_METAL). Their open() fails with
 * BML_ERR_UNSUPPORTED where the machine has no such device. */
const bml_backend *bml_backend_cuda(void);
const bml_backend *bml_backend_metal(void);

/* The backends of this build that KIND stands for, the best first; *n is how many. Fails where
 * this build has none. */
bml_status bml_backend_list(bml_backend_kind kind, const bml_backend *list[3], int *n,
                            bml_error *err);

/* What the dot product of a query and a key is multiplied by in a layer. */
float bml_attention_scale(const bml_hf_config *config, int layer);

/* Whether no two tokens are of one slot. Compares all of them: for short batches. */
bool bml_batch_one_a_slot(const bml_batch *batch);

#endif
