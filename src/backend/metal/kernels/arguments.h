/* What the host tells each kernel besides its buffers; read by C and by Metal. */
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#else
#include <stdint.h>
#endif

/* Elements of weights and caches. The first three are row-major and numbered as bml_dtype; Q8 and
 * Q4 are the tiles of backend/cpu/quant.h. */
enum { FORMAT_F32, FORMAT_F16, FORMAT_BF16, FORMAT_Q8, FORMAT_Q4, N_FORMATS };

enum { EPILOGUE_NONE, EPILOGUE_ACTIVATE, EPILOGUE_ADD };

/* Activations, numbered as bml_activation. */
enum { GELU_TANH, GELU_ERF, RELU };

enum {
    SIMD_WIDTH = 32,
    ROW_THREADS = 256, /* that share a row: norms, softmax, products with one token */
    ARGMAX_THREADS = 1024,
    SCRATCH_FLOATS = 256, /* that these exchange, before what else they keep */
    VECTOR_OUTPUTS = 32,  /* of a threadgroup in a product with one token */
    TILE_OUTPUTS = 64,    /* of a threadgroup in a product with many */
    TILE_INPUTS = 32,     /* taken at a time */
    TILE_THREADS = 128,
    QUERY_THREADS = 256,  /* that share a query */
    QUERY_GROUP = 8,      /* queries that follow each other and share each load of the cache */
    QUERY_GROUP_KEYS = 32 /* loaded at a time */
};

typedef struct weight_layout {
    uint32_t format, n_in, n_out, out_in;
    uint32_t wide;                    /* four elements in a row are aligned for one load */
    uint32_t tile_bytes, tile_header; /* Q8, Q4 */
    int8_t levels[16];                /* Q4 */
} weight_layout;

typedef struct embedding_args {
    weight_layout wte;
    uint32_t wpe_format, n_tokens;
} embedding_args;

typedef struct norm_args {
    uint32_t n, has_bias, of_batch;
    float epsilon;
} norm_args;

typedef struct matmul_args {
    uint32_t m, n, k;
} matmul_args;

typedef struct product_args {
    weight_layout w;
    norm_args norm;
    uint32_t n_tokens, has_bias, has_norm, epilogue, activation;
} product_args;

typedef struct heads_args {
    uint32_t n_tokens, n_head, head_dim;
} heads_args;

typedef struct softmax_args {
    uint32_t n_cols;
} softmax_args;

/* Where the heads of tokens lie: of [H, T, D], or of columns in rows of [T, ...]. */
typedef struct head_strides {
    uint32_t token, head;
} head_strides;

typedef struct cache_layout {
    uint32_t format, n_ctx, n_head, head_dim;
} cache_layout;

typedef struct append_args {
    cache_layout cache;
    head_strides from;
    uint32_t n_tokens;
} append_args;

typedef struct attention_args {
    cache_layout cache; /* n_ctx: of the stateless kernel, the tokens */
    head_strides q, out;
    float scale;
    uint32_t append; /* the query's own key and value lie behind it in qkv, and go to the cache */
} attention_args;

typedef struct elements_args {
    uint32_t n, activation;
} elements_args;

/* bml_row_score */
typedef struct row_score {
    float max, target;
    int32_t rank;
    float sum, weighted;
} row_score;

typedef struct score_args {
    uint32_t n_cols;
} score_args;

typedef struct argmax_args {
    uint32_t n_cols, n_valid;
} argmax_args;
