/*
 * The pass of one token as one launch: a block on every multiprocessor, all of them there from the
 * first layer to the last.
 *
 * Each block has its share of the rows of every matrix. One of its warps streams them through a
 * ring in shared memory, in the order of the pass, layers ahead of what is being computed: reading
 * weights never waits for activations (kernels/ring.cuh). The other warps compute. What one block
 * has to tell the others goes through a few buffers whose words say for themselves that they are
 * there (kernels/exchange.cuh): there is no barrier across blocks. Per layer:
 *
 *   qkv      every block: norm of x; its rows of the product            -> exchange.qkv
 *   attend   a few blocks a head, each with a run of keys               -> exchange.heads
 *   project  every block: joins the runs; its rows of x += product      -> exchange.x[0]
 *   expand   every block: norm of x; its rows of activation(product)    -> exchange.hidden
 *   contract every block: its rows of x += product                      -> exchange.x[1]
 *
 * and then the head, with the argmax of each block joined by the first one.
 *
 * A buffer is written again one layer later. By then all have read it: nobody can have finished
 * the norm of exchange.x[0] before every block has written its rows of it, and so is past qkv and
 * heads; the same holds for exchange.x[1] and hidden.
 */
#include "backend/cuda/decode.h"

#include "backend/cuda/kernels/dot.cuh"
#include "backend/cuda/kernels/exchange.cuh"
#include "backend/cuda/kernels/ring.cuh"

extern "C" {
#include "base/memory.h"
}

#include <stdlib.h>

enum {
    WARPS = 16, /* that compute */
    COMPUTE = 32 * WARPS,
    THREADS = COMPUTE + 32, /* the last warp fills the ring */
    TILE = 8,               /* rows that a warp works on at a time, and of a stage */
    TILES = 8,              /* whose sums are kept before they are added up */
    MAX_EMBD = 4 * COMPUTE,
    MAX_DIM = 128, /* of a head */
    MAX_SPLITS = 4,
    MAX_SLICE = 40,      /* blocks of a row in a stage */
    KEYS_OF_SPLIT = 256, /* what one block attends to before a second one helps */
    RECORD = 4           /* words of a candidate for argmax */
};

enum matrix { QKV, PROJECT, EXPAND, CONTRACT, N_MATRICES };

struct weights {
    const char *rows;
    const float *bias, *row_scale; /* NULL: none */
};

struct norm_rows {
    const float *weight, *bias;
};

struct layer {
    weights w[N_MATRICES];
    norm_rows ln[2];
    char *k, *v;
    float scale;
};

/* How rows of one format are cut into stages. */
struct slicing {
    int blocks; /* of a row in a stage, at most */
    int pitch;  /* bytes from one row to the next in a stage */
};

/* Device memory through which blocks talk. */
struct exchange {
    float *qkv, *heads, *x[2], *hidden, *best;
};

struct arguments {
    const layer *layers;
    int n_layer, n_head, head_dim, n_embd, n_inner, vocab_size;
    bml_activation activation;
    float epsilon;
    const char *wte, *wpe;
    bml_weight_format wte_format, wpe_format;
    norm_rows ln_f;
    weights head;
    uint4 levels;
    bml_dtype kv;
    int n_ctx, token, position, slot;
    int n_splits, keys_of_split, keys_of_stage;
    exchange out;
    uint32_t use, best_use; /* layers and argmaxes that all launches before have run */
    bool want_row;
    int n_valid;
    float *logits;
    int32_t *id, *host_id;
    slicing layers_slicing, head_slicing;
    int n_stages, stage_bytes;
};

#if __CUDA_ARCH__ >= 900

/* ---- shared memory
 * ------------------------------------------------------------------------------*/

struct shared {
    activations a;
    float *heads;   /* what attention gave, before it is joined */
    float *partial; /* [2][WARPS][TILES][TILE] */
    float *states;  /* [WARPS][MAX_DIM + 2] */
    float *query;   /* [3][MAX_DIM]: q, and k and v of this token */
    float *sums;    /* [WARPS] */
};

__device__ static void wait_for_warps(void)
{
    asm volatile("bar.sync 1, %0;" ::"r"((int)COMPUTE) : "memory");
}

/* The sum of all threads' X. */
__device__ static float sum_of_block(const shared &s, float x)
{
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % 32 == 0)
        s.sums[threadIdx.x / 32] = x;
    wait_for_warps();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        sum += s.sums[w];
    return sum;
}

/* ---- the share of a block
 * -----------------------------------------------------------------------*/

struct range {
    int begin, end;
};

__device__ static range rows_of_block(int n_rows)
{
    return {(int)((int64_t)n_rows * blockIdx.x / gridDim.x),
            (int)((int64_t)n_rows * (blockIdx.x + 1) / gridDim.x)};
}

/* The run of keys that this block attends to; head < 0 for none. */
struct run {
    int head, split, begin, end;
};

__device__ static run run_of_block(const arguments &p)
{
    int n = p.n_head * p.n_splits;
    int unit = (int)(((int64_t)blockIdx.x * n + gridDim.x - 1) / gridDim.x);
    if (unit >= n || (int64_t)unit * gridDim.x / n != blockIdx.x)
        return {-1, 0, 0, 0};
    int split = unit % p.n_splits, begin = min(split * p.keys_of_split, p.position);
    return {unit / p.n_splits, split, begin, min(begin + p.keys_of_split, p.position)};
}

/* ---- the warp that fills the ring
 * ---------------------------------------------------------------*/

template <bml_weight_format F>
__device__ static void fill_rows(ring &r, const char *w, int n_rows, int n_in, slicing cut)
{
    typedef dot_format<F> format;
    int lane = threadIdx.x % 32, n_blocks = n_in / format::block_inputs;
    size_t row_bytes = bml_cuda_row_bytes(F, (size_t)n_in);
    range mine = rows_of_block(n_rows);
    for (int row = mine.begin; row < mine.end; row += TILE)
        for (int b = 0; b < n_blocks; b += cut.blocks) {
            size_t from = format::packed ? bml_cuda_scales_at(F, b) : (size_t)format::at(b);
            size_t to = b + cut.blocks >= n_blocks ? row_bytes
                        : format::packed           ? bml_cuda_scales_at(F, b + cut.blocks)
                                                   : (size_t)format::at(b + cut.blocks);
            uint32_t bytes = (uint32_t)(to - from);
            int n = min(TILE, mine.end - row);
            barrier_wait(&r.empty[r.at], r.round ^ 1);
            if (lane == 0)
                barrier_expect(&r.full[r.at], bytes * n);
            __syncwarp();
            if (lane < n)
                bulk_copy(r.stage() + lane * cut.pitch, w + (row + lane) * row_bytes + from, bytes,
                          &r.full[r.at], true);
            r.next();
        }
}

__device__ static void fill_keys(ring &r, const arguments &p, const layer &l, run keys)
{
    size_t key_bytes = p.head_dim * (p.kv == BML_F32 ? 4 : 2);
    size_t head = ((size_t)p.slot * p.n_head + keys.head) * p.n_ctx;
    for (int key = keys.begin; key < keys.end; key += p.keys_of_stage) {
        uint32_t bytes = (uint32_t)(min(p.keys_of_stage, keys.end - key) * key_bytes);
        barrier_wait(&r.empty[r.at], r.round ^ 1);
        if (threadIdx.x % 32 == 0) {
            barrier_expect(&r.full[r.at], 2 * bytes);
            bulk_copy(r.stage(), l.k + (head + key) * key_bytes, bytes, &r.full[r.at], false);
            bulk_copy(r.stage() + p.keys_of_stage * key_bytes, l.v + (head + key) * key_bytes,
                      bytes, &r.full[r.at], false);
        }
        __syncwarp();
        r.next();
    }
}

template <bml_weight_format F, bml_weight_format HEAD>
__device__ static void fill(ring &r, const arguments &p)
{
    run keys = run_of_block(p);
    int c = p.n_embd;
    for (int i = 0; i < p.n_layer; i++) {
        const layer &l = p.layers[i];
        fill_rows<F>(r, l.w[QKV].rows, 3 * c, c, p.layers_slicing);
        if (keys.head >= 0)
            fill_keys(r, p, l, keys);
        fill_rows<F>(r, l.w[PROJECT].rows, c, c, p.layers_slicing);
        fill_rows<F>(r, l.w[EXPAND].rows, p.n_inner, c, p.layers_slicing);
        fill_rows<F>(r, l.w[CONTRACT].rows, c, p.n_inner, p.layers_slicing);
    }
    if (p.want_row)
        fill_rows<HEAD>(r, p.head.rows, p.vocab_size, c, p.head_slicing);
}

/* ---- products
 * -----------------------------------------------------------------------------------*/

/* The bias and the scale of the row that a thread finishes, asked for before they are needed. */
struct row_constants {
    float bias, scale;

    __device__ row_constants(const weights &w, int n_rows)
    {
        range mine = rows_of_block(n_rows);
        int row = mine.begin + (int)threadIdx.x;
        bool has = row < mine.end;
        bias = has && w.bias ? w.bias[row] : 0;
        scale = has && w.row_scale ? w.row_scale[row] : 1;
    }
};

/*
 * This block's rows of a product with the activations in s.a. FINISH(row, i, sum) is called once
 * for every row by one thread, i counting the block's rows; row i < TILES * TILE by thread i.
 * Warps share the blocks of a stage, beginning elsewhere in each.
 */
template <bml_weight_format F, class Finish>
__device__ static void multiply(ring &r, const arguments &p, const shared &s, int n_rows, int n_in,
                                slicing cut, Finish finish)
{
    typedef dot_format<F> format;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    int n_blocks = n_in / format::block_inputs, stage = 0, parity = 0;
    range mine = rows_of_block(n_rows);
    for (int first = mine.begin; first < mine.end; first += TILES * TILE, parity ^= 1) {
        int n = min(TILES * TILE, mine.end - first);
        float *partial = s.partial + parity * WARPS * TILES * TILE;
        for (int t = 0; t * TILE < n; t++) {
            float sum = 0;
            for (int at = 0; at < n_blocks; at += cut.blocks, stage++) {
                int m = min(cut.blocks, n_blocks - at);
                const char *row = r.stage() + g * cut.pitch;
                barrier_wait(&r.full[r.at], r.round);
                for (int b = (warp + WARPS / 2 * stage) % WARPS; b < m; b += WARPS)
                    sum = format::dot(sum, row, b, at, c, s.a, p.levels);
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(&r.empty[r.at]);
                r.next();
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (c == 0)
                partial[(warp * TILES + t) * TILE + g] = sum;
        }
        wait_for_warps();
        int i = threadIdx.x;
        if (i < n) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                sum += partial[w * TILES * TILE + i];
            finish(first + i, first + i - mine.begin, sum);
        }
    }
}

/* ---- activations
 * --------------------------------------------------------------------------------*/

/* Four elements of a layer norm's weight and bias, asked for before they are needed. */
struct norm_constants {
    float4 weight, bias;

    __device__ norm_constants(const norm_rows &n, int n_embd)
    {
        bool has = 4 * (int)threadIdx.x < n_embd;
        weight = bias = make_float4(0, 0, 0, 0);
        if (has)
            weight = ((const float4 *)n.weight)[threadIdx.x];
        if (has && n.bias)
            bias = ((const float4 *)n.bias)[threadIdx.x];
    }
};

/* Keeps the norm of x for a product; thread i has elements 4i .. 4i + 3 in V. */
template <bml_weight_format F>
__device__ static void keep_norm(const arguments &p, const shared &s, float4 v,
                                 const norm_constants &k)
{
    bool has = 4 * (int)threadIdx.x < p.n_embd;
    float mean = sum_of_block(s, has ? v.x + v.y + v.z + v.w : 0) / p.n_embd;
    float4 d = make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean);
    wait_for_warps(); /* s.sums is read */
    float squares = has ? d.x * d.x + d.y * d.y + d.z * d.z + d.w * d.w : 0;
    float scale = rsqrtf(sum_of_block(s, squares) / p.n_embd + p.epsilon);
    if (has)
        dot_format<F>::keep(s.a, threadIdx.x,
                            make_float4(fmaf(d.x * scale, k.weight.x, k.bias.x),
                                        fmaf(d.y * scale, k.weight.y, k.bias.y),
                                        fmaf(d.z * scale, k.weight.z, k.bias.z),
                                        fmaf(d.w * scale, k.weight.w, k.bias.w)));
    wait_for_warps();
}

__device__ static float embedding_at(const arguments &p, int i)
{
    return weight_at(p.wte, p.wte_format, p.n_embd, p.token, i) +
           weight_at(p.wpe, p.wpe_format, p.n_embd, p.position, i);
}

/* ---- attention
 * ----------------------------------------------------------------------------------*/

__device__ static float to_cache_and_back(float x, bml_dtype kv)
{
    return kv == BML_F32    ? x
           : kv == BML_BF16 ? __bfloat162float(__float2bfloat16(x))
                            : __half2float(__float2half(x));
}

__device__ static void store_cached(char *to, size_t i, float x, bml_dtype kv)
{
    if (kv == BML_F32)
        ((float *)to)[i] = x;
    else if (kv == BML_BF16)
        ((__nv_bfloat16 *)to)[i] = __float2bfloat16(x);
    else
        ((__half *)to)[i] = __float2half(x);
}

/* Elements 8i .. 8i + 7. */
__device__ static void load_cached(float out[8], const char *from, int i, bml_dtype kv)
{
    if (kv == BML_F32) {
        *(float4 *)out = ((const float4 *)from)[2 * i];
        *(float4 *)(out + 4) = ((const float4 *)from)[2 * i + 1];
        return;
    }
    uint4 v = ((const uint4 *)from)[i];
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 f = kv == BML_BF16 ? make_float2(__uint_as_float(words[j] << 16),
                                                __uint_as_float(words[j] & 0xffff0000u))
                                  : __half22float2(*(const __half2 *)&words[j]);
        out[2 * j] = f.x;
        out[2 * j + 1] = f.y;
    }
}

/* A softmax on its way: the largest score, the sum of exp(score - max), and of that times v. */
struct state {
    float max, sum, v[8];

    __device__ void add(float score, const float value[8])
    {
        float top = larger(max, score), before = max == -INFINITY ? 0 : __expf(max - top);
        float p = __expf(score - top);
        max = top;
        sum = fmaf(sum, before, p);
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = fmaf(v[i], before, p * value[i]);
    }

    /* Joins with the state that the lane STEP away has. */
    __device__ void join(int step)
    {
        float other = __shfl_xor_sync(~0u, max, step), top = larger(max, other);
        float mine = max == -INFINITY ? 0 : __expf(max - top);
        max = top;
        sum *= mine;
        sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] *= mine;
            v[i] += __shfl_xor_sync(~0u, v[i], step);
        }
    }
};

/* One run of keys of one head: waits for the token's q, k and v, stores k and v, and hands out the
 * run's state. Eight elements of a key to a lane. */
__device__ static void attend(ring &r, const arguments &p, const shared &s, const layer &l,
                              run keys, uint32_t tag)
{
    int d = p.head_dim, lanes = d / 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int part = lane % lanes, i = threadIdx.x;
    if (4 * i < 3 * d) {
        int which = 4 * i / d, at = 4 * i % d;
        float4 v = get(p.out.qkv + which * p.n_embd + keys.head * d + at, tag);
        if (which) {
            v = make_float4(to_cache_and_back(v.x, p.kv), to_cache_and_back(v.y, p.kv),
                            to_cache_and_back(v.z, p.kv), to_cache_and_back(v.w, p.kv));
        }
        *(float4 *)(s.query + which * MAX_DIM + at) = v;
    }
    wait_for_warps();
    bool last = keys.split == p.n_splits - 1; /* which has this token's own key */
    if (last && i < 2 * d) {
        size_t at = (((size_t)p.slot * p.n_head + keys.head) * p.n_ctx + p.position) * d + i % d;
        store_cached(i < d ? l.k : l.v, at, s.query[(i / d + 1) * MAX_DIM + i % d], p.kv);
    }

    state own = {-INFINITY, 0, {}};
    float q[8];
    load_cached(q, (const char *)s.query, part, BML_F32);
#pragma unroll
    for (int j = 0; j < 8; j++)
        q[j] *= l.scale;
    size_t key_bytes = d * (p.kv == BML_F32 ? 4 : 2);
    int each = 32 / lanes; /* keys that a warp takes at once */
    for (int first = keys.begin; first < keys.end; first += p.keys_of_stage) {
        const char *k = r.stage(), *v = k + p.keys_of_stage * key_bytes;
        int m = min(p.keys_of_stage, keys.end - first);
        barrier_wait(&r.full[r.at], r.round);
        for (int at = warp * each; at < m; at += WARPS * each) {
            int key = at + lane / lanes;
            float kk[8], vv[8], score = 0;
            load_cached(kk, k + min(key, m - 1) * key_bytes, part, p.kv);
            load_cached(vv, v + min(key, m - 1) * key_bytes, part, p.kv);
#pragma unroll
            for (int j = 0; j < 8; j++)
                score = fmaf(q[j], kk[j], score);
            for (int step = lanes / 2; step; step /= 2)
                score += __shfl_xor_sync(~0u, score, step);
            if (key < m)
                own.add(score, vv);
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(&r.empty[r.at]);
        r.next();
    }
    if (last && warp == 0) {
        float kk[8], vv[8], score = 0;
        load_cached(kk, (const char *)(s.query + MAX_DIM), part, BML_F32);
        load_cached(vv, (const char *)(s.query + 2 * MAX_DIM), part, BML_F32);
#pragma unroll
        for (int j = 0; j < 8; j++)
            score = fmaf(q[j], kk[j], score);
        for (int step = lanes / 2; step; step /= 2)
            score += __shfl_xor_sync(~0u, score, step);
        if (lane < lanes)
            own.add(score, vv);
    }
    for (int step = lanes; step < 32; step *= 2)
        own.join(step);
    float *mine = s.states + warp * (MAX_DIM + 2);
    if (lane < lanes) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            mine[8 * part + j] = own.v[j];
        mine[MAX_DIM] = own.max;
        mine[MAX_DIM + 1] = own.sum;
    }
    wait_for_warps();
    if (i < d + 4) { /* the sums are against a maximum that can carry the tag */
        float top = -INFINITY, total = 0;
        for (int w = 0; w < WARPS; w++)
            top = larger(top, s.states[w * (MAX_DIM + 2) + MAX_DIM]);
        top = tagged(top, tag);
        for (int w = 0; w < WARPS; w++) {
            const float *other = s.states + w * (MAX_DIM + 2);
            float weight = other[MAX_DIM] == -INFINITY ? 0 : __expf(other[MAX_DIM] - top);
            total = fmaf(weight, other[i < d ? i : MAX_DIM + 1], total);
        }
        float *to = p.out.heads + (keys.head * p.n_splits + keys.split) * (d + 4);
        if (i == d + 1)
            put_word(to + i, top);
        else
            put(to + i, total, tag); /* d: the sum; d + 2 and d + 3 only fill up */
    }
}

/* Waits for all runs of all heads, and keeps what they give together. */
template <bml_weight_format F>
__device__ static void keep_heads(const arguments &p, const shared &s, uint32_t tag)
{
    int d = p.head_dim, pitch = d + 4, n = p.n_head * p.n_splits * pitch;
    for (int i = threadIdx.x; 4 * i < n; i += COMPUTE)
        ((float4 *)s.heads)[i] = get(p.out.heads + 4 * i, tag);
    wait_for_warps();
    int i = threadIdx.x;
    if (4 * i < p.n_embd) {
        const float *runs = s.heads + 4 * i / d * p.n_splits * pitch;
        float top = -INFINITY, sum = 0;
        for (int run = 0; run < p.n_splits; run++)
            top = larger(top, runs[run * pitch + d + 1]);
        float4 total = make_float4(0, 0, 0, 0);
        for (int run = 0; run < p.n_splits; run++) {
            const float *one = runs + run * pitch;
            float weight = __expf(one[d + 1] - top);
            float4 v = *(const float4 *)(one + 4 * i % d);
            sum = fmaf(weight, one[d], sum);
            total = make_float4(fmaf(weight, v.x, total.x), fmaf(weight, v.y, total.y),
                                fmaf(weight, v.z, total.z), fmaf(weight, v.w, total.w));
        }
        dot_format<F>::keep(
            s.a, i, make_float4(total.x / sum, total.y / sum, total.z / sum, total.w / sum));
    }
    wait_for_warps();
}

/* ---- the head
 * -----------------------------------------------------------------------------------*/

/* Joins the candidates of the 64 threads that finish rows, and of all blocks in the first one.
 * A logit's 32 bits go in halves: all of them count, and each word carries a tag. */
__device__ static void choose(const arguments &p, const shared &s, candidate best, uint32_t tag)
{
    candidate *all = (candidate *)s.states;
    int i = threadIdx.x;
    if (i < TILES * TILE)
        all[i] = best;
    wait_for_warps();
    if (i == 0) {
        for (int j = 1; j < TILES * TILE; j++)
            best = better(best, all[j]);
        uint32_t bits = __float_as_uint(best.logit),
                 words[RECORD] = {bits >> 16, bits & 0xffff, (uint32_t)best.id, 0};
        for (int j = 0; j < RECORD; j++)
            put_word(p.out.best + blockIdx.x * RECORD + j, __uint_as_float(words[j] << 1 | tag));
    }
    if (blockIdx.x)
        return;
    wait_for_warps(); /* ALL is read */
    if (i < gridDim.x) {
        float4 v = get(p.out.best + i * RECORD, tag);
        uint32_t bits = __float_as_uint(v.x) >> 1 << 16 | __float_as_uint(v.y) >> 1;
        all[i] = {__uint_as_float(bits), (int)__float_as_uint(v.z) >> 1};
    }
    wait_for_warps();
    if (i == 0) {
        best = all[0];
        for (int j = 1; j < gridDim.x; j++)
            best = better(best, all[j]);
        *p.id = best.id;
        *p.host_id = best.id;
    }
}

/* ---- the pass
 * -----------------------------------------------------------------------------------*/

template <bml_weight_format F, bml_weight_format HEAD>
__device__ static void compute(ring &r, const arguments &p, const shared &s)
{
    int c = p.n_embd, i = threadIdx.x;
    bool has_x = 4 * i < c;
    range own_rows = rows_of_block(c);
    float own_x = own_rows.begin + i < own_rows.end ? embedding_at(p, own_rows.begin + i) : 0;
    float4 x = make_float4(0, 0, 0, 0);
    if (has_x)
        x = make_float4(embedding_at(p, 4 * i), embedding_at(p, 4 * i + 1),
                        embedding_at(p, 4 * i + 2), embedding_at(p, 4 * i + 3));
    run keys = run_of_block(p);
    uint32_t tag = 0;
    for (int index = 0; index < p.n_layer; index++) {
        const layer &l = p.layers[index];
        uint32_t before = tag;
        tag = (p.use + index + 1) & 1;
        {
            norm_constants norm(l.ln[0], c);
            row_constants k(l.w[QKV], 3 * c);
            if (index && has_x)
                x = get(p.out.x[1] + 4 * i, before);
            keep_norm<F>(p, s, x, norm);
            multiply<F>(r, p, s, 3 * c, c, p.layers_slicing, [&](int row, int, float sum) {
                put(p.out.qkv + row, fmaf(sum, k.scale, k.bias), tag);
            });
        }
        if (keys.head >= 0)
            attend(r, p, s, l, keys, tag);
        {
            row_constants k(l.w[PROJECT], c);
            keep_heads<F>(p, s, tag);
            multiply<F>(r, p, s, c, c, p.layers_slicing, [&](int row, int, float sum) {
                own_x += fmaf(sum, k.scale, k.bias);
                put(p.out.x[0] + row, own_x, tag);
            });
        }
        {
            norm_constants norm(l.ln[1], c);
            row_constants k(l.w[EXPAND], p.n_inner);
            if (has_x)
                x = get(p.out.x[0] + 4 * i, tag);
            keep_norm<F>(p, s, x, norm);
            multiply<F>(r, p, s, p.n_inner, c, p.layers_slicing, [&](int row, int, float sum) {
                put(p.out.hidden + row, activate(fmaf(sum, k.scale, k.bias), p.activation), tag);
            });
        }
        {
            row_constants k(l.w[CONTRACT], c);
            for (int j = i; 4 * j < p.n_inner; j += COMPUTE)
                dot_format<F>::keep(s.a, j, get(p.out.hidden + 4 * j, tag));
            wait_for_warps();
            multiply<F>(r, p, s, c, p.n_inner, p.layers_slicing, [&](int row, int, float sum) {
                own_x += fmaf(sum, k.scale, k.bias);
                put(p.out.x[1] + row, own_x, tag);
            });
        }
    }
    if (!p.want_row)
        return;
    norm_constants norm(p.ln_f, c);
    if (has_x)
        x = get(p.out.x[1] + 4 * i, tag);
    keep_norm<HEAD>(p, s, x, norm);
    candidate best = {-INFINITY, NO_ID};
    multiply<HEAD>(r, p, s, p.vocab_size, c, p.head_slicing, [&](int row, int, float sum) {
        if (!p.n_valid)
            p.logits[row] = sum;
        else if (row < p.n_valid)
            best = better(best, candidate{sum, isfinite(sum) ? row : -1});
    });
    if (p.n_valid)
        choose(p, s, best, (p.best_use + 1) & 1);
}

#endif

template <bml_weight_format F, bml_weight_format HEAD>
static __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ arguments p)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    int d = p.head_dim, widest = max(p.n_embd, p.n_inner);
    ring r = {memory, nullptr, nullptr, p.n_stages, p.stage_bytes, 0, 0};
    r.full = (uint64_t *)(memory + p.n_stages * p.stage_bytes);
    r.empty = r.full + p.n_stages;
    shared s;
    s.a.x = (float *)(r.full + 2 * p.n_stages);
    s.a.q = (int8_t *)s.a.x;
    s.a.scale = (float *)(s.a.q + widest);
    s.heads = s.a.x + widest;
    s.partial = s.heads + p.n_head * p.n_splits * (d + 4);
    s.states = s.partial + 2 * WARPS * TILES * TILE;
    s.query = s.states + WARPS * (MAX_DIM + 2);
    s.sums = s.query + 3 * MAX_DIM;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.n_stages; i++) {
            barrier_init(&r.full[i], 1);
            barrier_init(&r.empty[i], WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < COMPUTE)
        compute<F, HEAD>(r, p, s);
    else
        fill<F, HEAD>(r, p);
#endif
}

/* ---- the host's side
 * ----------------------------------------------------------------------------*/

struct bml_cuda_decoder {
    int n_blocks;
    layer *layers; /* device memory */
    exchange out;  /* one allocation, from out.qkv on */
    size_t exchange_bytes;
    int n_splits; /* that the exchange was last used with */
    uint32_t use, best_use;
    int32_t *id; /* pinned memory */
    const void *kernel;
};

void bml_cuda_decoder_free(bml_cuda_decoder *d)
{
    if (!d)
        return;
    cudaFree(d->layers);
    cudaFree(d->out.qkv);
    cudaFreeHost(d->id);
    free(d);
}

static int n_blocks_for(const bml_device *device, const bml_hf_config *c)
{
    return device->n_multiprocessors < c->n_embd ? device->n_multiprocessors : c->n_embd;
}

bool bml_cuda_can_decode(const bml_queue *queue, const bml_weights *w, const bml_kv_cache *cache)
{
    const bml_hf_config *c = &w->config;
    int d = cache->head_dim, n_blocks = n_blocks_for(queue->device, c);
    int most_rows = c->n_inner > 3 * c->n_embd ? c->n_inner : 3 * c->n_embd;
    bml_weight_format format = w->layers[0].c_attn.w.format;
    bml_weight_format head = format == BML_WEIGHTS_Q4 ? BML_WEIGHTS_Q8 : format;
    bool fits = queue->device->capability >= 90 && queue->batch->n_tokens == 1 &&
                c->n_embd % 64 == 0 && c->n_inner % 64 == 0 && c->n_embd <= MAX_EMBD &&
                c->n_head <= n_blocks && d >= 8 && d <= MAX_DIM && (d & (d - 1)) == 0 &&
                (most_rows + n_blocks - 1) / n_blocks <= TILES * TILE &&
                w->lm_head.w.format == head;
    for (int i = 0; i < c->n_layer && fits; i++) {
        const bml_layer_weights *l = &w->layers[i];
        fits = l->c_attn.w.format == format && l->c_proj.w.format == format &&
               l->c_fc.w.format == format && l->mlp_c_proj.w.format == format;
    }
    return fits;
}

static weights weights_of(const bml_linear_weights *l)
{
    const char *rows = (const char *)l->w.buffer.data;
    size_t bytes = (size_t)l->w.n_out * bml_cuda_row_bytes(l->w.format, (size_t)l->w.n_in);
    return {rows, (const float *)l->bias.buffer.data,
            l->w.format == BML_WEIGHTS_Q4 ? (const float *)(rows + bytes) : nullptr};
}

static norm_rows norm_of(const bml_norm_weights *n)
{
    return {(const float *)n->weight.buffer.data, (const float *)n->bias.buffer.data};
}

static const void *kernel_for(bml_weight_format format)
{
    switch (format) {
    case BML_WEIGHTS_F32:
        return (const void *)decode<BML_WEIGHTS_F32, BML_WEIGHTS_F32>;
    case BML_WEIGHTS_BF16:
        return (const void *)decode<BML_WEIGHTS_BF16, BML_WEIGHTS_BF16>;
    case BML_WEIGHTS_F16:
        return (const void *)decode<BML_WEIGHTS_F16, BML_WEIGHTS_F16>;
    case BML_WEIGHTS_Q8:
        return (const void *)decode<BML_WEIGHTS_Q8, BML_WEIGHTS_Q8>;
    default:
        return (const void *)decode<BML_WEIGHTS_Q4, BML_WEIGHTS_Q8>;
    }
}

static cudaError_t fill_layers(bml_cuda_decoder *d, const bml_weights *w, const bml_kv_cache *cache)
{
    size_t n = (size_t)w->config.n_layer;
    layer *host = (layer *)bml_calloc(n, sizeof *host);
    if (!host)
        return cudaErrorMemoryAllocation;
    for (size_t i = 0; i < n; i++) {
        const bml_layer_weights *l = &w->layers[i];
        host[i] = {{weights_of(&l->c_attn), weights_of(&l->c_proj), weights_of(&l->c_fc),
                    weights_of(&l->mlp_c_proj)},
                   {norm_of(&l->ln_1), norm_of(&l->ln_2)},
                   (char *)cache->k[i].data,
                   (char *)cache->v[i].data,
                   bml_attention_scale(&w->config, (int)i)};
    }
    cudaError_t error = cudaMalloc((void **)&d->layers, n * sizeof *host);
    if (!error)
        error = cudaMemcpy(d->layers, host, n * sizeof *host, cudaMemcpyHostToDevice);
    free(host);
    return error;
}

static cudaError_t exchange_new(bml_cuda_decoder *d, const bml_hf_config *c)
{
    size_t e = (size_t)c->n_embd, head_dim = e / (size_t)c->n_head;
    size_t heads = (size_t)c->n_head * MAX_SPLITS * (head_dim + 4);
    size_t words = 5 * e + heads + (size_t)c->n_inner + (size_t)d->n_blocks * RECORD;
    d->exchange_bytes = words * sizeof(float);
    cudaError_t error = cudaMalloc((void **)&d->out.qkv, d->exchange_bytes);
    d->out.heads = d->out.qkv + 3 * e;
    d->out.x[0] = d->out.heads + heads;
    d->out.x[1] = d->out.x[0] + e;
    d->out.hidden = d->out.x[1] + e;
    d->out.best = d->out.hidden + c->n_inner;
    return error;
}

/* The queue's decoder, made at the first call: the weights and the cache of a queue stay. */
static cudaError_t decoder_of(bml_queue *queue, const bml_weights *w, const bml_kv_cache *cache)
{
    if (queue->decoder)
        return cudaSuccess;
    bml_cuda_decoder *d = (bml_cuda_decoder *)bml_calloc(1, sizeof *d);
    if (!d)
        return cudaErrorMemoryAllocation;
    d->n_blocks = n_blocks_for(queue->device, &w->config);
    d->kernel = kernel_for(w->layers[0].c_attn.w.format);
    cudaError_t error = fill_layers(d, w, cache);
    if (!error)
        error = exchange_new(d, &w->config);
    if (!error)
        error = cudaMallocHost((void **)&d->id, sizeof *d->id);
    if (!error)
        error = cudaFuncSetAttribute(d->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     queue->device->shared_bytes);
    if (error)
        bml_cuda_decoder_free(d);
    else
        queue->decoder = d;
    return error;
}

template <bml_weight_format F> static slicing slicing_for(int n_embd)
{
    typedef dot_format<F> format;
    int n_blocks = n_embd / format::block_inputs, n_slices = (n_blocks + MAX_SLICE - 1) / MAX_SLICE;
    int blocks = (n_blocks + n_slices - 1) / n_slices, apart = 4 * format::lane_bytes;
    if (format::packed) /* slices begin where groups do */
        blocks = (blocks + BML_CUDA_GROUP - 1) / BML_CUDA_GROUP * BML_CUDA_GROUP;
    int bytes = format::packed ? (int)bml_cuda_scales_at(F, (size_t)blocks) : format::at(blocks);
    /* Rows lie APART bytes further in the banks than the one before. */
    return {blocks, (bytes - apart + 127) / 128 * 128 + apart};
}

static slicing slicing_of(bml_weight_format format, int n_embd)
{
    switch (format) {
    case BML_WEIGHTS_F32:
        return slicing_for<BML_WEIGHTS_F32>(n_embd);
    case BML_WEIGHTS_Q8:
        return slicing_for<BML_WEIGHTS_Q8>(n_embd);
    case BML_WEIGHTS_Q4:
        return slicing_for<BML_WEIGHTS_Q4>(n_embd);
    default:
        return slicing_for<BML_WEIGHTS_BF16>(n_embd);
    }
}

/* How shared memory is cut: what is fixed, and as many stages as the rest has room for. */
static size_t lay_out(arguments *p, const bml_device *device)
{
    int widest = p->n_embd > p->n_inner ? p->n_embd : p->n_inner;
    size_t floats = (size_t)widest + (size_t)p->n_head * p->n_splits * (p->head_dim + 4) +
                    2 * WARPS * TILES * TILE + WARPS * (MAX_DIM + 2) + 3 * MAX_DIM + WARPS;
    int pitch = p->layers_slicing.pitch > p->head_slicing.pitch ? p->layers_slicing.pitch
                                                                : p->head_slicing.pitch;
    p->stage_bytes = TILE * pitch;
    size_t room = (size_t)device->shared_bytes - floats * sizeof(float);
    p->n_stages = (int)(room / ((size_t)p->stage_bytes + 2 * sizeof(uint64_t)));
    int key_bytes = p->head_dim * (p->kv == BML_F32 ? 4 : 2);
    p->keys_of_stage = p->stage_bytes / (2 * key_bytes);
    return floats * sizeof(float) + p->n_stages * (p->stage_bytes + 2 * sizeof(uint64_t));
}

void bml_cuda_decode(bml_queue *queue, const bml_weights *w, bml_activations *a,
                     bml_kv_cache *cache, int n_valid)
{
    const bml_hf_config *c = &w->config;
    const bml_batch *batch = queue->batch;
    cudaError_t error = decoder_of(queue, w, cache);
    if (error) {
        bml_cuda_note(queue, error);
        return;
    }
    bml_cuda_decoder *d = queue->decoder;
    arguments p = {};
    p.layers = d->layers;
    p.n_layer = c->n_layer;
    p.n_head = c->n_head;
    p.head_dim = cache->head_dim;
    p.n_embd = c->n_embd;
    p.n_inner = c->n_inner;
    p.vocab_size = c->vocab_size;
    p.activation = c->activation;
    p.epsilon = c->layer_norm_epsilon;
    p.wte = (const char *)w->wte.buffer.data;
    p.wte_format = w->wte.format;
    p.wpe = (const char *)w->wpe.buffer.data;
    p.wpe_format = w->wpe.format;
    p.ln_f = norm_of(&w->ln_f);
    p.head = weights_of(&w->lm_head);
    p.levels = q4_levels();
    p.kv = cache->dtype;
    p.n_ctx = cache->n_ctx;
    p.token = batch->token[0];
    p.position = batch->position[0];
    p.slot = batch->slot[0];
    int most_splits = d->n_blocks / c->n_head < MAX_SPLITS ? d->n_blocks / c->n_head : MAX_SPLITS;
    p.n_splits = p.position / KEYS_OF_SPLIT + 1;
    p.n_splits = p.n_splits < most_splits ? p.n_splits : most_splits;
    p.keys_of_split = (p.position + p.n_splits - 1) / p.n_splits;
    p.out = d->out;
    p.want_row = batch->n_rows == 1;
    p.n_valid = n_valid;
    p.logits = (float *)a->logits.data;
    p.id = (int32_t *)a->ids.data;
    p.host_id = d->id;
    p.layers_slicing = slicing_of(w->layers[0].c_attn.w.format, c->n_embd);
    p.head_slicing = slicing_of(w->lm_head.w.format, c->n_embd);
    size_t bytes = lay_out(&p, queue->device);

    /* Other splits write other words: their tags would not be one use old. */
    if (p.n_splits != d->n_splits) {
        bml_cuda_note(queue, cudaMemsetAsync(d->out.qkv, 0, d->exchange_bytes, queue->stream));
        d->use = d->best_use = 0;
        d->n_splits = p.n_splits;
    }
    p.use = d->use;
    p.best_use = d->best_use;
    void *arguments[] = {&p};
    bml_cuda_note(queue, cudaLaunchCooperativeKernel(d->kernel, d->n_blocks, THREADS, arguments,
                                                     bytes, queue->stream));
    d->use += (uint32_t)c->n_layer;
    if (p.want_row && n_valid) {
        d->best_use++;
        queue->ids = a->ids.data;
        queue->ids_host = d->id;
    }
}
