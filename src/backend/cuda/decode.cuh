/* What the kernel of decode.cu and its launch share. */
#ifndef BML_BACKEND_CUDA_DECODE_CUH
#define BML_BACKEND_CUDA_DECODE_CUH

#include "backend/cuda/decode.h"
#include "backend/cuda/kernels/dot.cuh"
#include "backend/cuda/kernels/exchange.cuh"

enum {
    WARPS = 15, /* that compute */
    COMPUTE = 32 * WARPS,
    THREADS = COMPUTE + 32, /* the last warp fills the ring */
    TILE = 8,               /* rows that a warp works on at a time, and of a stage */
    SPLITS = 16,            /* above all units and warps */
    ROWS = 64,              /* of a matrix of a layer that a block can have */
    QUADS = 4,              /* most words of four that a thread waits for at once */
    MAX_EMBD = 4 * COMPUTE,
    MAX_DIM = 128,       /* of a head */
    STATE = MAX_DIM + 4, /* floats of a softmax on its way */
    MAX_SPLITS = 4,
    RECORD = 4 /* words of a candidate for argmax */
};

enum matrix { QKV, PROJECT, EXPAND, CONTRACT, N_MATRICES };

struct layer {
    const char *rows[N_MATRICES];
    char *k, *v;
    float scale;
};

/* The float32 vectors of all layers, one layer behind the other, so that reading them needs no
 * pointer: both norms' weights and biases, the four products' biases and, for Q4, their row scales;
 * zeros where there is none. One more layer holds the last norm in place of its first. */
struct vectors {
    const float *data;
    int layer, bias[N_MATRICES], row_scale[N_MATRICES]; /* in floats */
};

/* How rows of one format are cut into stages. */
struct slicing {
    int blocks; /* of a row in a stage, at most */
    int pitch;  /* bytes from one row to the next in a stage */
};

/* A product: how its rows and inputs are cut up. */
struct product {
    int n_blocks, n_slices; /* of a row */
    int slice;              /* blocks of a slice */
    int rows_at_once;       /* rows whose units are worked on together: whole tiles */
};

/* Device memory through which blocks talk. */
struct exchange {
    float *qkv, *heads, *x[2], *hidden, *best;
};

struct arguments {
    const layer *layers;
    vectors vectors;
    int n_layer, n_head, head_dim, n_embd, n_inner, vocab_size;
    bml_activation activation;
    float epsilon, inverse_embd, inverse_halves; /* of n_embd and n_embd / 64 */
    const char *wte, *wpe, *head;
    bml_weight_format wte_format, wpe_format;
    uint4 levels;
    bml_dtype kv;
    int n_ctx, token, position, slot;
    const int32_t *from; /* device memory that has the token; NULL: it is TOKEN */
    int n_splits, keys_of_split, keys_of_stage;
    exchange out;
    uint32_t use, best_use; /* layers and argmaxes that all launches before have run */
    bool want_row;
    int n_valid;
    float *logits;
    int32_t *id, *host_id;
    slicing layers_slicing, head_slicing;
    product products[N_MATRICES + 1]; /* the head's is the last */
    int lanes_log2;                   /* of the lanes that share a key */
    int n_stages, stage_bytes;
    int on_their_way; /* stages that are being filled at a time, at most */
    int units;        /* stages that are worked on at a time: the others are being filled */
};

/* The kernel for layers of FORMAT, and a head of the format that goes with it. */
extern "C" const void *bml_cuda_decode_kernel(bml_weight_format format);

#endif
