/* What the kernels of decode.cu and decode_few.cu, the packing and the launch share. */
#ifndef BML_BACKEND_CUDA_DECODE_CUH
#define BML_BACKEND_CUDA_DECODE_CUH

#include "backend/cuda/decode.h"
#include "backend/cuda/decode_plan.h"
#include "backend/cuda/kernels/exchange.cuh"
#include "backend/cuda/kernels/unit.cuh"

enum {
    WARPS = BML_CUDA_WARPS,
    COMPUTE = 32 * WARPS,
    THREADS = COMPUTE + 32, /* the last warp fills the ring */
    CLUSTER = BML_CUDA_CLUSTER,
    TILE = BML_CUDA_ROWS,
    CHUNK = BML_CUDA_CHUNK,
    HIDDEN = BML_CUDA_HIDDEN,
    PARTS = 16, /* most clusters */
    MAX_EMBD = 2048,
    MAX_EACH = MAX_EMBD / CHUNK / WARPS, /* chunks of a warp */
    MAX_TILES = 8,                       /* of rows that are summed up over warps together */
    FEW = BML_CUDA_FEW,                  /* tokens that are one launch */
    KEYS_OF_ALL = 128,     /* so many keys every block of a cluster looks at, more are shared out */
    KEYS = 64,             /* that a stage of the ring has room for */
    SIXTEEN = 16,          /* keys that are the rows of a matrix instruction */
    FOUND = 32 * (64 + 8), /* floats of the softmaxes on their way of all warps */
};

/* Floats between tiles' sums of each warp: [WARPS][TILE], and the next tile in other banks. */
enum { PARTIAL = WARPS * TILE + TILE };

enum matrix { QKV, PROJECT, EXPAND, CONTRACT, N_MATRICES };

struct layer {
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

/* Device memory through which clusters talk, all zeros before the launch, and what the next launch
 * will have for it, which this one clears. */
struct exchange {
    uint64_t *sums; /* [2][FEW][n_embd]: what clusters add to x, with the projection and the fourth
                       product; see kernels/exchange.cuh */
    uint4 *best;    /* [FEW][blocks]: candidates */
    uint4 *next;
    int quads; /* of 16 bytes */
};

/* A row of the first product: which one, and where it goes in a cached token; -1: q. */
struct qkv_row {
    int row, cached;
};

struct arguments {
    bml_cuda_plan plan;
    const layer *layers;
    struct vectors vectors;
    const char *stream; /* the packed weights of layers, and of the head behind them */
    const size_t *begin, *head_begin; /* of each block's in a layer's, and in the head's */
    size_t layer_bytes;
    int n_layer;
    bml_activation activation;
    float epsilon, inverse_embd;
    const char *wte, *wpe;
    bml_weight_format wte_format, wpe_format;
    uint4 levels;
    bml_dtype kv;
    int n_ctx, n_tokens;
    int token[FEW], position[FEW], slot[FEW];
    const int32_t *from; /* device memory that has the tokens; NULL: they are TOKEN */
    bool want_row;
    exchange out;
    int n_valid;
    float *logits;
    int32_t *ids, *host_id[FEW];
    int n_stages, stage_bytes;
    int chunks, keys_of_stage; /* of n_embd, and of a stage */
    int few, inbox_bytes;      /* floats of memory_map, and bytes from qkv on that are sent */
    int hidden;                /* of the cluster with most: floats, or FEW tokens' operands */
    int tiles;                 /* of rows that are summed up over warps together: decode_few.cu */
    int columns;               /* stages of the fourth product that are waited for together */
    int kept;                  /* bits that tiles of the head must not have which stay in L2 */
};

/* The width that kernels are compiled for, if it is one of GPT-2's; else 0: any. */
BML_CUDA_BOTH static inline int width_of(int n_embd, int head_dim)
{
    bool known = n_embd == 768 || n_embd == 1024 || n_embd == 1280 || n_embd == 1600;
    return known && head_dim == 64 ? n_embd : 0;
}

/* Below, N_EMBD is such a width. How many tiles of rows are waited for together: two, unless these
 * are long, or the kernel does not know how long. */
BML_CUDA_BOTH static constexpr int together_for(int n_embd)
{
    return n_embd > 0 && n_embd <= 1024 ? 2 : 1;
}

/* How many heads of a cluster a block attends to side by side, for one token: two, if clusters of
 * GPT-2's size have two and heads are of 64. */
BML_CUDA_BOTH static constexpr int abreast_for(int n_embd)
{
    return n_embd > 768 ? 2 : 1;
}

/* Stages of the ring that have the same tokens' keys and values: where there is room for both in
 * one, one. */
BML_CUDA_BOTH static constexpr int key_stages_for(int n_embd)
{
    return n_embd > 768 ? 1 : 2;
}

/* Keys of 16 bits in a stage where matrix units see them, for up to FEW tokens: what the room of a
 * tile's units has room for. */
BML_CUDA_BOTH static constexpr int keys_for(int n_embd)
{
    return n_embd / (2 * CHUNK) * key_stages_for(n_embd) / 2 * SIXTEEN;
}

template <bml_weight_format F> struct format_tag {
    static constexpr bml_weight_format format = F;
};

/* Calls F with the tag of FORMAT. */
template <class Call> static void bml_cuda_with_format(bml_weight_format format, Call call)
{
    switch (format) {
    case BML_WEIGHTS_F32:
        return call(format_tag<BML_WEIGHTS_F32>());
    case BML_WEIGHTS_F16:
        return call(format_tag<BML_WEIGHTS_F16>());
    case BML_WEIGHTS_Q8:
        return call(format_tag<BML_WEIGHTS_Q8>());
    case BML_WEIGHTS_Q4:
        return call(format_tag<BML_WEIGHTS_Q4>());
    default:
        return call(format_tag<BML_WEIGHTS_BF16>());
    }
}

/* Pack a layer's weights, and the head's, to STREAM; see decode_plan.h. BEGIN is device memory. */
void bml_cuda_pack_layer(char *stream, const size_t *begin, const bml_layer_weights *layer,
                         const bml_cuda_plan *plan);
void bml_cuda_pack_head(char *stream, const size_t *begin, const bml_weight *head,
                        const bml_cuda_plan *plan);

/* The kernels for layers of FORMAT, a head of the format that goes with it, and these sizes: of one
 * token, and of two to FEW, which only 16-bit weights have. */
const void *bml_cuda_decode_kernel(bml_weight_format format, int n_embd, int head_dim);
const void *bml_cuda_decode_few_kernel(bml_weight_format format, int n_embd, int head_dim);

#endif
