/*
 * Who does what in the one-launch step of decode.cu, and how a block's weights lie one behind the
 * other in the order in which it uses them.
 *
 * Blocks are in clusters of CLUSTER. A cluster has heads: their rows of the first product, their
 * keys and values, and their columns of the projection, all shared out among its blocks. The hidden
 * units, in tiles of 16, are shared out among all blocks, those that have one more being the last
 * ones, whose clusters have fewer heads: a unit's row of the third product. Of the fourth a block
 * has the cluster's units' columns, and of these its slice's rows, as of the projection. And every
 * block has its share of the head.
 */
#ifndef BML_BACKEND_CUDA_DECODE_PLAN_H
#define BML_BACKEND_CUDA_DECODE_PLAN_H

#include "backend/cuda/weight.h"

#ifdef __cplusplus /* functions that give the compiler constants */
#define BML_CUDA_CONSTANT constexpr
#else
#define BML_CUDA_CONSTANT inline
#endif

enum {
    BML_CUDA_CLUSTER = 8,
    BML_CUDA_WARPS = 8,       /* that multiply */
    BML_CUDA_HIDDEN = 16,     /* units of a tile */
    BML_CUDA_STAGE_TILES = 4, /* tiles of hidden units that are a stage of the fourth product */
    BML_CUDA_ROWS = 16,       /* outputs of a tile */
    BML_CUDA_CHUNK = 64,      /* inputs of two row units */
    BML_CUDA_FEW = 8,         /* tokens at most that are one launch */
};

typedef struct bml_cuda_plan {
    int n_clusters, n_embd, n_head, head_dim, n_inner, vocab_size;
} bml_cuda_plan;

/* What one block has, in tiles. */
typedef struct bml_cuda_share {
    int cluster, rank;
    int n_heads;              /* the cluster's: cluster, cluster + n_clusters, ... */
    int qkv_first, qkv_tiles; /* of the cluster's 3 n_heads head_dim rows: q, k and v of a head */
    int slice_first, slice_tiles;       /* of n_embd: its part of x, and of the projection's rows */
    int hidden_first, hidden_tiles;     /* its rows of the third product */
    int clusters_first, clusters_tiles; /* and the cluster's, whose columns of the fourth it has */
    int vocab_first, vocab_tiles;
} bml_cuda_share;

/* Of N things the first one that part I of OF has. */
BML_CUDA_BOTH static inline int bml_cuda_part(int n, int i, int of)
{
    return n * i / of;
}

/* Of the tiles of n_embd the first one that the block with this rank in its cluster has. */
BML_CUDA_BOTH static inline int bml_cuda_slice_first(int n_embd, int rank)
{
    return n_embd / BML_CUDA_ROWS * rank / BML_CUDA_CLUSTER;
}

/* The first tile of hidden units that a block has. */
BML_CUDA_BOTH static inline int bml_cuda_hidden_first(const bml_cuda_plan *p, int block)
{
    int n_blocks = p->n_clusters * BML_CUDA_CLUSTER, hidden = p->n_inner / BML_CUDA_HIDDEN;
    int with_less = n_blocks - hidden % n_blocks;
    return hidden / n_blocks * block + (block > with_less ? block - with_less : 0);
}

BML_CUDA_BOTH static inline bml_cuda_share bml_cuda_share_of(const bml_cuda_plan *p, int block)
{
    bml_cuda_share s;
    int n_blocks = p->n_clusters * BML_CUDA_CLUSTER, more = p->n_head % p->n_clusters;
    int vocab = (p->vocab_size + BML_CUDA_ROWS - 1) / BML_CUDA_ROWS;
    s.cluster = block / BML_CUDA_CLUSTER;
    s.rank = block % BML_CUDA_CLUSTER;
    s.n_heads = p->n_head / p->n_clusters + (s.cluster < more);
    int qkv = s.n_heads * 3 * p->head_dim / BML_CUDA_ROWS;
    s.qkv_first = bml_cuda_part(qkv, s.rank, BML_CUDA_CLUSTER);
    s.qkv_tiles = bml_cuda_part(qkv, s.rank + 1, BML_CUDA_CLUSTER) - s.qkv_first;
    s.slice_first = bml_cuda_slice_first(p->n_embd, s.rank);
    s.slice_tiles = bml_cuda_slice_first(p->n_embd, s.rank + 1) - s.slice_first;
    s.hidden_first = bml_cuda_hidden_first(p, block);
    s.hidden_tiles = bml_cuda_hidden_first(p, block + 1) - s.hidden_first;
    s.clusters_first = bml_cuda_hidden_first(p, block - s.rank);
    s.clusters_tiles =
        bml_cuda_hidden_first(p, block - s.rank + BML_CUDA_CLUSTER) - s.clusters_first;
    s.vocab_first = bml_cuda_part(vocab, block, n_blocks);
    s.vocab_tiles = bml_cuda_part(vocab, block + 1, n_blocks) - s.vocab_first;
    return s;
}

/* The most that any block has of each. */
static inline bml_cuda_share bml_cuda_most_of(const bml_cuda_plan *p)
{
    bml_cuda_share most = bml_cuda_share_of(p, BML_CUDA_CLUSTER - 1);
    bml_cuda_share last = bml_cuda_share_of(p, p->n_clusters * BML_CUDA_CLUSTER - 1);
    most.hidden_tiles = last.hidden_tiles;
    most.clusters_tiles = last.clusters_tiles;
    most.vocab_tiles = last.vocab_tiles;
    return most;
}

static inline int bml_cuda_larger(int a, int b)
{
    return a > b ? a : b;
}

/* What the blocks of a cluster send each other: rows of q, k and v; of every head each block's
 * softmax, if keys are shared out; and their hidden units. */
enum {
    BML_CUDA_QKV_IN,
    BML_CUDA_STATES_IN,
    BML_CUDA_HIDDEN_IN,
    BML_CUDA_INBOXES,
    BML_CUDA_NORMED_IN = BML_CUDA_INBOXES, /* see below */
    BML_CUDA_FEW_INBOXES,
};

/* Bytes that come to the block each time. */
BML_CUDA_BOTH static inline int
bml_cuda_inbox_bytes(const bml_cuda_plan *p, const bml_cuda_share *s, int inbox, bool shared_out)
{
    switch (inbox) {
    case BML_CUDA_QKV_IN:
        return s->n_heads * 3 * p->head_dim * 4;
    case BML_CUDA_STATES_IN: /* v, the largest score, the sum */
        return BML_CUDA_CLUSTER * (shared_out ? s->n_heads : 0) * (p->head_dim + 2) * 4;
    default:
        return s->clusters_tiles * BML_CUDA_HIDDEN * 4;
    }
}

/* Hidden units that a cluster has room for, whole stages of the fourth product. */
static inline int bml_cuda_hidden_room(const bml_cuda_share *most)
{
    int stages = (most->clusters_tiles + BML_CUDA_STAGE_TILES - 1) / BML_CUDA_STAGE_TILES;
    return stages * BML_CUDA_STAGE_TILES * BML_CUDA_HIDDEN;
}

/* Floats from one softmax in an inbox to the next. */
BML_CUDA_BOTH static inline int bml_cuda_state_pitch(int head_dim)
{
    return head_dim + 8;
}

/* Bytes that q, k and v and behind them softmaxes need. */
static inline int bml_cuda_inbox_room(const bml_cuda_plan *p, const bml_cuda_share *most)
{
    int head = 3 * p->head_dim + BML_CUDA_CLUSTER * bml_cuda_state_pitch(p->head_dim);
    return 4 * most->n_heads * head;
}

/*
 * With up to FEW tokens: all tokens' norms, in the type of the weights; in that type too
 * attention's results, in the place of softmaxes on their way, and hidden units. Tokens' n operands
 * of the matrix units lie so far apart that those read together are in different banks, whether
 * that is 16 bytes of each or, of hidden units, 8.
 */
BML_CUDA_BOTH static inline int bml_cuda_few_pitch(int n)
{
    return n + 32;
}

/* N is a multiple of 64. */
BML_CUDA_BOTH static inline int bml_cuda_few_hidden_pitch(int n)
{
    return n + 16;
}

/* Block RANK of a cluster has token RANK, if that is there. */
BML_CUDA_BOTH static inline int
bml_cuda_few_inbox_bytes(const bml_cuda_plan *p, const bml_cuda_share *s, int inbox, int n_tokens)
{
    switch (inbox) {
    case BML_CUDA_NORMED_IN:
        return n_tokens * p->n_embd * 2;
    case BML_CUDA_QKV_IN:
        return s->rank < n_tokens ? bml_cuda_inbox_bytes(p, s, inbox, false) : 0;
    case BML_CUDA_STATES_IN:
        return n_tokens * s->n_heads * p->head_dim * 2;
    default:
        return n_tokens * s->clusters_tiles * BML_CUDA_HIDDEN * 2;
    }
}

/* Bytes that q, k and v and behind them attention's results need. */
static inline int bml_cuda_few_inbox_room(const bml_cuda_plan *p, const bml_cuda_share *most)
{
    int width = most->n_heads * p->head_dim;
    return 4 * 3 * width + BML_CUDA_FEW * 2 * bml_cuda_few_pitch(width);
}

/* The row of the first product that row ROW of the cluster's is. */
BML_CUDA_BOTH static inline int bml_cuda_qkv_row(const bml_cuda_plan *p, int cluster, int row)
{
    int d = p->head_dim, head = cluster + row / (3 * d) * p->n_clusters, part = row % (3 * d);
    return part / d * p->n_embd + head * d + part % d;
}

/*
 * The unit of streaming: what a warp's 32 lanes read together, each what matrix units want of it.
 * Lane l has rows 2g and 2g + 1 of sixteen, g = l / 4, and of the inputs c = l % 4:
 *
 * Row units, of 32 inputs; two make a chunk:
 *     F32: for j in 0..1, for both rows, all lanes' inputs 16j + 4c and on, four.
 *     BF16, F16: for s in 0..1, for each pair of inputs 8c + 4s and on, two, both rows'.
 *     Q8: of inputs 8c and on both rows' first four and both rows' other four; behind a chunk's
 *         first unit a bfloat16 scale for each row.
 *     Q4: both rows' inputs 8c and on in the order of their nibbles; then an int8 scale for each
 *         row.
 * Column units, of 16 inputs, 4c and on: F32, for both rows all lanes'; BF16 and F16, for each pair
 *     both rows'; Q8, both rows'; Q4, both rows' nibbles; then scales as above.
 */
typedef struct bml_cuda_unit {
    int row_data, first_bytes, second_bytes; /* without scales, and with them: of a chunk's units */
    int col_data, col_bytes;
} bml_cuda_unit;

BML_CUDA_BOTH static BML_CUDA_CONSTANT bml_cuda_unit bml_cuda_unit_of(bml_weight_format format)
{
    const bml_cuda_unit f32 = {2048, 2048, 2048, 1024, 1024}, half = {1024, 1024, 1024, 512, 512};
    const bml_cuda_unit q8 = {512, 544, 512, 256, 288}, q4 = {256, 272, 272, 128, 144};
    return format == BML_WEIGHTS_F32  ? f32
           : format == BML_WEIGHTS_Q8 ? q8
           : format == BML_WEIGHTS_Q4 ? q4
                                      : half;
}

/* The head's format where layers are of FORMAT. */
BML_CUDA_BOTH static BML_CUDA_CONSTANT bml_weight_format
bml_cuda_head_format(bml_weight_format format)
{
    return format == BML_WEIGHTS_Q4 ? BML_WEIGHTS_Q8 : format;
}

/*
 * Stages of the ring, in the order of the pass:
 *     the first and the third product, and the head: for each tile of rows two, all chunks' first
 *         units and all chunks' second ones;
 *     the projection: for every chunk of the cluster's heads one, first and second units of the
 *         slice's tiles, tile after tile;
 *     the fourth product: for each four of the cluster's tiles of hidden units one, the column
 * units of the slice's tiles, of one tile of hidden units after the other.
 */
BML_CUDA_BOTH static inline int bml_cuda_chunks(const bml_cuda_plan *p)
{
    return p->n_embd / BML_CUDA_CHUNK;
}

BML_CUDA_BOTH static inline int bml_cuda_proj_stages(const bml_cuda_plan *p,
                                                     const bml_cuda_share *s)
{
    return s->n_heads * p->head_dim / BML_CUDA_CHUNK;
}

/* Bytes of a projection's stage. */
BML_CUDA_BOTH static inline int bml_cuda_proj_bytes(const bml_cuda_share *s, bml_cuda_unit u)
{
    return s->slice_tiles * (u.first_bytes + u.second_bytes);
}

/* And of one of the fourth product, of so many tiles of hidden units. */
BML_CUDA_BOTH static inline int bml_cuda_column_bytes(const bml_cuda_share *s, bml_cuda_unit u,
                                                      int tiles)
{
    return tiles * s->slice_tiles * u.col_bytes;
}

/* And of the largest one of any block. */
static inline int bml_cuda_stage_bytes(const bml_cuda_plan *p, const bml_cuda_share *most,
                                       bml_weight_format format)
{
    bml_cuda_unit u = bml_cuda_unit_of(format);
    bml_cuda_unit head = bml_cuda_unit_of(bml_cuda_head_format(format));
    int rows = bml_cuda_chunks(p) * bml_cuda_larger(u.first_bytes, head.first_bytes);
    return bml_cuda_larger(rows,
                           bml_cuda_larger(bml_cuda_proj_bytes(most, u),
                                           bml_cuda_column_bytes(most, u, BML_CUDA_STAGE_TILES)));
}

/* Where a block's units of a layer begin, in bytes from its first one, and where they end. */
typedef struct bml_cuda_stream {
    size_t proj, expand, contract, end;
} bml_cuda_stream;

BML_CUDA_BOTH static inline bml_cuda_stream
bml_cuda_stream_of(const bml_cuda_plan *p, const bml_cuda_share *s, bml_weight_format format)
{
    bml_cuda_unit u = bml_cuda_unit_of(format);
    bml_cuda_stream at;
    size_t tile = (size_t)bml_cuda_chunks(p) * (u.first_bytes + u.second_bytes);
    at.proj = s->qkv_tiles * tile;
    at.expand = at.proj + (size_t)bml_cuda_proj_stages(p, s) * bml_cuda_proj_bytes(s, u);
    at.contract = at.expand + s->hidden_tiles * tile;
    at.end = at.contract + (size_t)bml_cuda_column_bytes(s, u, s->clusters_tiles);
    return at;
}

#endif
