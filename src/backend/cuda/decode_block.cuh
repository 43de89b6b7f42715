/*
 * What the launches of decode.cu and decode_few.cu have in common: how their warps share out the
 * work, take it from the ring, and go through a head's keys.
 */
#ifndef BML_BACKEND_CUDA_DECODE_BLOCK_CUH
#define BML_BACKEND_CUDA_DECODE_BLOCK_CUH

#include "backend/cuda/decode_fill.cuh"
#include "backend/cuda/kernels/cluster.cuh"
#include "backend/cuda/kernels/quad.cuh"
#include "backend/cuda/kernels/softmax.cuh"
#include "backend/cuda/launch.cuh"

#if __CUDA_ARCH__ >= 900

__device__ static void wait_for_warps(void)
{
    asm volatile("bar.sync 1, %0;" ::"r"((int)COMPUTE) : "memory");
}

/* What comes from the cluster's other blocks: an mbarrier that arms itself for the next use. What
 * comes says that the block's own warps have come so far, too, where others wait for what they
 * send; racecheck does not know that, and for it they meet. */
struct inbox {
    uint32_t barrier, bytes, round;

    __device__ inbox(uint32_t barrier, uint32_t bytes) : barrier(barrier), bytes(bytes), round(0)
    {
        arm();
    }

    __device__ void arm()
    {
        if (threadIdx.x == 0)
            barrier_expect(barrier, bytes);
    }

    __device__ void wait()
    {
        barrier_wait(barrier, round);
#ifdef BML_RACECHECK
        wait_for_warps();
#endif
        arm();
        round ^= 1;
    }
};

/* Clears what the next launch exchanges, which the last one did. */
__device__ __forceinline__ static void clear_next(const exchange &e)
{
    for (int i = blockIdx.x * COMPUTE + threadIdx.x; i < e.quads; i += gridDim.x * COMPUTE)
        e.next[i] = uint4{};
}

/* All of a launch, by one of its computing warps. The last one may still run at first: embed()
 * waits for it, and for the cluster, before it touches what launches write or another block has. */
template <class Worker> __device__ __forceinline__ static void run_pass(Worker &w)
{
    const arguments &p = w.p;
    bool attends = w.s.n_heads > 0;
    w.embed();
    clear_next(p.out);
#pragma unroll 1
    for (int i = 0; i < p.n_layer; i++) {
        if (attends) {
            layer l = p.layers[i];
            w.project_heads(i, l);
            w.attend(l);
            w.project(i);
        }
        w.add_product(i, PROJECT, true);
        w.expand(i);
        w.contract(i);
        w.add_product(i, CONTRACT, i + 1 < p.n_layer ? attends : p.want_row);
    }
    if (p.want_row)
        w.head();
}

/* Row I of what the block has of the first product. */
__device__ __forceinline__ static qkv_row qkv_row_of(const arguments &p, const bml_cuda_share &s,
                                                     int i)
{
    const bml_cuda_plan &plan = p.plan;
    int row = bml_cuda_qkv_row(&plan, s.cluster, TILE * s.qkv_first + i);
    int e = row % plan.n_embd, head = e / plan.head_dim;
    return {row, row < plan.n_embd ? -1 : head * p.n_ctx * plan.head_dim + e % plan.head_dim};
}

/* A candidate as a record. */
__device__ static uint4 record_of(candidate c)
{
    return make_uint4((uint32_t)c.id << 1, __float_as_uint(c.logit), 0, 0);
}

__device__ static candidate candidate_of(uint4 record)
{
    return {__uint_as_float(record.y), (int)record.x >> 1};
}

/* Moments of what the warps of a block have together: N[w] elements of warp W, with this mean and
 * this sum of squared deviations from it. ONE is 1 over all of them. Returns mean and variance. */
template <class Count>
__device__ __forceinline__ static float2 joined_moments(const float2 *of_warps, Count n, float one)
{
    float2 of[WARPS];
    float mean = 0, squares = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        of[w] = of_warps[w];
        mean = fmaf(of[w].x, n(w) * one, mean);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float off = of[w].x - mean;
        squares += fmaf(off * off, n(w), of[w].y);
    }
    return make_float2(mean, squares < 0 ? 0 : squares * one);
}

/* The widths that most of the arithmetic depends on, known when compiling; 0: not before, but no
 * more than MAX_EMBD. */
template <int N_EMBD> struct shape {
    static constexpr int n_embd = N_EMBD, chunks = N_EMBD / CHUNK, head_dim = 64, most = N_EMBD;

    __device__ explicit shape(const bml_cuda_plan &)
    {
    }
};

template <> struct shape<0> {
    static constexpr int most = MAX_EMBD;
    int n_embd, chunks, head_dim;

    __device__ explicit shape(const bml_cuda_plan &p)
        : n_embd(p.n_embd), chunks(p.n_embd / CHUNK), head_dim(p.head_dim)
    {
    }
};

/* What a warp does. */
template <bml_weight_format F, int N_EMBD> struct computing_warp : shape<N_EMBD> {
    typedef unit_format<F> format;
    using shape<N_EMBD>::n_embd;
    using shape<N_EMBD>::chunks;
    using shape<N_EMBD>::head_dim;
    using shape<N_EMBD>::most;
    /* At most: chunks of a warp, tiles of a slice, and of these a warp's. */
    static constexpr int CHUNKS = (most / CHUNK + WARPS - 1) / WARPS;
    static constexpr int SLICE = (most / TILE + CLUSTER - 1) / CLUSTER;
    static constexpr int TILES = (SLICE + WARPS - 1) / WARPS;
    static constexpr int KEY_STAGES = key_stages_for(N_EMBD), ABREAST = abreast_for(N_EMBD);

    const arguments &p;
    const bml_cuda_plan &plan;
    const bml_cuda_share &s;
    ring r;
    int warp, lane;

    /* Of block RANK's slice of x: all have as many, or some one less. */
    __device__ __forceinline__ int slice_tiles(int rank) const
    {
        if constexpr (N_EMBD % (TILE * CLUSTER) == 0 && N_EMBD > 0)
            return SLICE;
        return bml_cuda_slice_first(n_embd, rank + 1) - bml_cuda_slice_first(n_embd, rank);
    }

    /* Floats of all this block's slice, and where in x it begins. */
    __device__ __forceinline__ int slice() const
    {
        return TILE * slice_tiles(s.rank);
    }

    __device__ __forceinline__ int slice_first() const
    {
        return TILE * s.slice_first;
    }

    /* Whether the warp has an Ith chunk: every WARPSth is its. */
    __device__ __forceinline__ bool has(int i) const
    {
        return N_EMBD && (i + 1) * WARPS <= most / CHUNK ? true : warp + i * WARPS < chunks;
    }

    /* What clusters add to token T's x. */
    __device__ __forceinline__ uint64_t *sums_of(int matrix, int t) const
    {
        return p.out.sums + ((matrix == CONTRACT) * FEW + t) * n_embd;
    }

    /* How many of them do. */
    __device__ __forceinline__ uint32_t adding(int matrix) const
    {
        return matrix == PROJECT ? min(plan.n_head, plan.n_clusters) : plan.n_clusters;
    }

    /* Waits until the first sum of token T is complete, LAST what it was. One warp looks for all,
     * and at no more: looks are in the way of what they look for. */
    __device__ __forceinline__ void await_first_sum(int matrix, int t, uint64_t last) const
    {
        if (warp == 0)
            await_sum(sums_of(matrix, t), __shfl_sync(~0u, last, 0), adding(matrix));
        wait_for_warps();
    }

    /* The warp has read N stages. */
    __device__ __forceinline__ void release(int n)
    {
        stages_read(r, lane, n);
        r.next(n);
    }

    /* ---- products ---- */

    /* KEEP gets what the warp has of each of N tiles of rows. */
    template <class Format, class Keep>
    __device__ __forceinline__ void sum_rows(const typename Format::row_x (&v)[CHUNKS], int n,
                                             Keep keep)
    {
        constexpr int group = together_for(N_EMBD), first = Format::unit.first_bytes,
                      second = Format::unit.second_bytes;
#pragma unroll 1
        for (int tile = 0; tile < n; tile += group) {
            typename Format::sums sum[group];
            const char *units[group][2];
            bool all = group == 1 || tile + 1 < n;
#pragma unroll
            for (int j = 0; j < group; j++) {
                int place = j && all ? 2 : 0; /* what is not there is the first one again */
                units[j][0] = r.stage_at(place) + warp * first;
                units[j][1] = r.stage_at(place + 1) + warp * second;
            }
            barrier_wait(r.full_now(), r.round);
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (has(i))
#pragma unroll
                    for (int j = 0; j < group; j++)
                        Format::add_row(sum[j], units[j][0] + i * WARPS * first,
                                        units[j][1] + i * WARPS * second, v[i], p.levels);
            release(all ? 2 * group : 2);
#pragma unroll
            for (int j = 0; j < group; j++)
                keep(tile + j, sum[j], j == 0 || all);
        }
    }

    /* Of the tiles of the block's slice the warp's: every WARPSth. OPERAND gives a chunk of what
     * the cluster's heads have. */
    template <class Operand>
    __device__ __forceinline__ void sum_projection(typename format::sums (&sum)[TILES],
                                                   Operand operand)
    {
        constexpr int first = format::unit.first_bytes, both = first + format::unit.second_bytes;
        int n = slice_tiles(s.rank);
#pragma unroll 1
        for (int part = 0; part < bml_cuda_proj_stages(&plan, &s); part++) {
            const char *units = r.stage() + warp * both;
            typename format::row_x v = operand(part);
            barrier_wait(r.full_now(), r.round);
#pragma unroll
            for (int i = 0; i < TILES; i++)
                if (warp + i * WARPS < n)
                    format::add_row(sum[i], units + i * WARPS * both,
                                    units + i * WARPS * both + first, v, p.levels);
            release(1);
        }
    }

    /* The fourth product: EACH(first, tiles) for tiles of hidden units from FIRST on, when their
     * stages are there: TOGETHER of these, 0: as many as p.columns says. */
    template <int TOGETHER, class Each> __device__ __forceinline__ void for_columns(Each each)
    {
        constexpr int stage_tiles = BML_CUDA_STAGE_TILES;
        int together = TOGETHER ? TOGETHER : p.columns, whole = s.clusters_tiles / stage_tiles;
#pragma unroll 1
        for (int first = 0; first < s.clusters_tiles;) {
            int stages = max(1, min(together, whole - first / stage_tiles));
            int tiles = min(s.clusters_tiles - first, stages * stage_tiles);
            barrier_wait(r.full_now(), r.round);
            each(first, tiles);
            release(stages);
            first += tiles;
        }
    }

    /* What a row's sum is to be multiplied by. */
    __device__ __forceinline__ float row_scale(int layer, int matrix, int row) const
    {
        if (F != BML_WEIGHTS_Q4)
            return 1;
        return __ldg(p.vectors.data + layer * p.vectors.layer + p.vectors.row_scale[matrix] + row);
    }

    /* A product's output. */
    __device__ __forceinline__ float complete(float sum, float bias, int layer, int matrix,
                                              int row) const
    {
        if (F == BML_WEIGHTS_Q4)
            return fmaf(sum, row_scale(layer, matrix, row), bias);
        return sum + bias;
    }

    /* ---- attention: softmaxes on their way are v[head_dim], the largest score, and the sum;
     * scores are logarithms to base two ---- */

    /* q.k, eight products to a lane, head_dim / 8 lanes to a key. */
    template <class Kv> __device__ __forceinline__ float score_of(const float q[8], const Kv *key)
    {
        float k[8], score = 0;
        load_cached(k, key);
#pragma unroll
        for (int i = 0; i < 8; i++)
            score = fmaf(q[i], k[i], score);
#pragma unroll
        for (int step = 1; step < 8; step *= 2)
            score += __shfl_xor_sync(~0u, score, step);
        if (head_dim > 64)
            score += __shfl_xor_sync(~0u, score, 8);
        return score;
    }

    /* N of a head's keys in the group of stages that comes I after this: of MANY warps the Ith's,
     * two at a time. */
    template <class Kv>
    __device__ __forceinline__ void attend_group(softmax_state &own, const float q[8], int n,
                                                 int group, int i, int many)
    {
        int lanes = head_dim / 8, groups = 32 / lanes, part = 8 * (lane % lanes);
        const Kv *k = (const Kv *)r.stage_at(group * KEY_STAGES) + part;
        const Kv *v = (KEY_STAGES > 1 ? (const Kv *)r.stage_at(group * KEY_STAGES + 1) + part
                                      : k + p.keys_of_stage * head_dim);
#pragma unroll 1
        for (int first = i * groups; first < n; first += 2 * many * groups) {
            int a = first + lane / lanes, b = a + many * groups;
            int at_a = min(a, n - 1) * head_dim, at_b = min(b, n - 1) * head_dim;
            float score_a = score_of(q, k + at_a), score_b = score_of(q, k + at_b);
            own.add(a < n ? score_a : -INFINITY, b < n ? score_b : -INFINITY, v + at_a, v + at_b);
        }
        __syncwarp();
    }

    /*
     * One head, or two side by side: ABREAST. Of the first one the query, then a token's own key
     * and value, which count if OWN_KEY, are at QUERY, the second one's behind them; each has
     * N_KEYS in the ring. FOUND and ENDS have room for all warps' softmaxes.
     * Returns the element of what the block finds that joins() says, not yet divided by SUM.
     */
    __device__ __forceinline__ float attend_heads(const float *query, int abreast, int n_keys,
                                                  bool own_key, float scale, float *found,
                                                  float *ends, float &top, float &sum)
    {
        int lanes = head_dim / 8, part = 8 * (lane % lanes);
        bool two = ABREAST > 1 && abreast > 1;
        int many = two ? WARPS / 2 : WARPS, i = two ? warp % (WARPS / 2) : warp;
        int head = two ? warp / (WARPS / 2) : 0;
        softmax_state own;
        float q[8];
        query += head * 3 * head_dim;
        load_cached(q, query + part);
#pragma unroll
        for (int j = 0; j < 8; j++)
            q[j] *= scale;
#pragma unroll 1
        for (int n = n_keys; n > 0; n -= p.keys_of_stage) {
            int here = min(n, p.keys_of_stage);
            barrier_wait(r.full_now(), r.round);
            if (two)
                barrier_wait(r.full_at(KEY_STAGES), r.round_at(KEY_STAGES));
            if (p.kv == BML_BF16)
                attend_group<__nv_bfloat16>(own, q, here, head, i, many);
            else if (p.kv == BML_F16)
                attend_group<__half>(own, q, here, head, i, many);
            else
                attend_group<float>(own, q, here, head, i, many);
            release(abreast * KEY_STAGES);
        }
        if (i == many - 1 && own_key) {
            float score = score_of(q, query + head_dim + part);
            const float *value = query + 2 * head_dim + part;
            own.add(lane < lanes ? score : -INFINITY, -INFINITY, value, value);
        }
        return join(own, abreast, found, ends, top, sum);
    }

    /* What a thread has of what warps found: element E of head HEAD of those side by side, which
     * it joins together with other lanes: it is number OF of so many. */
    struct joint {
        int head, e, of, lanes;
    };

    __device__ __forceinline__ joint joins(int abreast) const
    {
        int t = threadIdx.x, all = sharing();
        if (ABREAST > 1 && abreast > 1) {
            int half = WARPS / 2 * 32; /* heads of 64: two lanes an element */
            return {t / half, t % half / 2, t % 2, 2};
        }
        return {0, t / all, t % all, all};
    }

    /* Joins what all lanes have; returns as attend_heads(). */
    __device__ __forceinline__ float join(const softmax_state &own, int abreast, float *found,
                                          float *ends, float &top, float &sum)
    {
        int pitch = bml_cuda_state_pitch(head_dim), lanes = head_dim / 8, part = 8 * (lane % lanes);
        int state = warp * (32 / lanes) + lane / lanes;
        joint mine = joins(abreast);
        float *to = found + state * pitch + part;
        *(float4 *)to = make_float4(own.v[0], own.v[1], own.v[2], own.v[3]);
        *(float4 *)(to + 4) = make_float4(own.v[4], own.v[5], own.v[6], own.v[7]);
        if (part == 0) {
            ends[state] = own.top;
            ends[32 + state] = own.sum;
        }
        wait_for_warps();
        int first = mine.head * (WARPS / 2 * 32 / lanes) + mine.of;
        return joined<8>(mine.lanes, found + first * pitch + mine.e, ends + first,
                         ends + 32 + first, mine.lanes, pitch, mine.lanes, top, sum);
    }

    /* ---- the head ---- */

    /* Where block B's candidate for token T is. */
    __device__ __forceinline__ uint4 *record_at(int t, int b) const
    {
        return p.out.best + t * gridDim.x + b;
    }

    /* For thread 0. ROOM: of WARPS candidates. */
    __device__ __forceinline__ candidate best_of_block(candidate mine, candidate *room) const
    {
        mine = best_of_warp(mine);
        wait_for_warps(); /* for the last use to end */
        if (lane == 0)
            room[warp] = mine;
        wait_for_warps();
        if (threadIdx.x == 0)
            for (int w = 0; w < WARPS; w++)
                mine = better(mine, room[w]);
        return mine;
    }

    /* Joins all blocks' candidates for token T, by one block. */
    __device__ __forceinline__ void choose_token(int t, candidate *room) const
    {
        candidate best = {-INFINITY, NO_ID};
        if (threadIdx.x < gridDim.x)
            best = candidate_of(get(record_at(t, threadIdx.x)));
        __syncwarp();
        best = best_of_block(best, room);
        if (threadIdx.x == 0)
            p.ids[t] = *p.host_id[t] = best.id;
    }

    /* Lanes that work on an element of a head: four or two. */
    __device__ __forceinline__ int sharing() const
    {
        return COMPUTE / head_dim;
    }
};

#endif

#endif
