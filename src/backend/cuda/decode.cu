/*
 * The pass of one token as one launch: a block on nearly every multiprocessor, all of them there
 * from the first layer to the last, in clusters of eight.
 *
 * Each block has its share of every matrix (decode_plan.h). One of its warps streams it through a
 * ring in shared memory, in the order of the pass, layers ahead of what is being computed: reading
 * weights, or keys and values, never waits for activations (kernels/ring.cuh). The other warps
 * compute. Within a cluster blocks send what they have to each other's shared memory
 * (kernels/cluster.cuh). Clusters hand each other sums through global memory, in words that say for
 * themselves that they are there (kernels/exchange.cuh); there is no barrier across clusters. Per
 * layer, for a cluster with heads:
 *
 *   x         every block sums up a part of x, all clusters' parts of it, and sends it to all; norm
 *   qkv       rows of the cluster's heads; sent to all blocks of the cluster
 *   attend    with many keys each block a run of them; what it gives is sent to all
 *   project   columns of the cluster's heads, a share of the rows   -> parts of x
 *   x         as above
 *   expand    rows of the block's hidden units, which stay where they are
 *   contract  columns of the same units: a part of every row, sent to the block that sums it up for
 *             the cluster                                           -> parts of x
 *
 * So a layer waits twice for other clusters, where five products one after the other would have to
 * five times. A cluster without heads has x, expand and contract.
 *
 * Parts are written again two layers later. By then all have read them: a layer's x needs what
 * every cluster made of the layer before. The same holds for what is sent within a cluster, whose
 * inboxes are used once a layer (x twice, but all blocks' parts of the second need the first).
 *
 * Every layer runs through nearly all of the code once, so that what counts is how many
 * instructions a warp has, not what they do: warps do again what others do too where that saves a
 * meeting, and each has its own inputs of a product, which it normalises for itself.
 */
#include "backend/cuda/decode_fill.cuh"
#include "backend/cuda/kernels/cluster.cuh"
#include "backend/cuda/kernels/quad.cuh"
#include "backend/cuda/kernels/softmax.cuh"

#if __CUDA_ARCH__ >= 900

__device__ static void wait_for_warps(void)
{
    asm volatile("bar.sync 1, %0;" ::"r"((int)COMPUTE) : "memory");
}

/* ---- the warps that compute ------------------------------------------------------------------ */

/* What comes from the cluster's other blocks: an mbarrier that arms itself for the next use. */
struct inbox {
    uint32_t barrier, bytes, round;

    __device__ void wait()
    {
        barrier_wait(barrier, round);
        if (threadIdx.x == 0)
            barrier_expect(barrier, bytes);
        round ^= 1;
    }
};

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

/* A block's shared memory, as its parts are called below. */
struct memory_map {
    float *x;        /* [n_embd], sent */
    float *qkv;      /* [3 n_heads head_dim], sent */
    float *states;   /* [n_heads][CLUSTER][head_dim + 8], sent: v, the largest score, the sum */
    float *sums;     /* [CLUSTER][n_embd / CLUSTER], sent, where qkv and states are too */
    float *few;      /* [n_heads head_dim], or the block's hidden units */
    float *partial;  /* [MAX_TILES][PARTIAL] */
    float *found;    /* [2048 / head_dim][head_dim + 8]; the head's second partial */
    float *ends;     /* [2][32] largest scores and sums that belong to FOUND */
    float *moments;  /* [WARPS][2] */
    char *taken;     /* [WARPS][MAX_EACH][256] */
    char *zeros;     /* [MAX_EACH][256] */
    qkv_row *rows;   /* [TILE qkv_tiles] */
    candidate *best; /* [WARPS] */
};

/* What a warp does. */
template <bml_weight_format F, bml_weight_format HEAD, int N_EMBD> struct worker : shape<N_EMBD> {
    typedef unit_format<F> format;
    using shape<N_EMBD>::n_embd;
    using shape<N_EMBD>::chunks;
    using shape<N_EMBD>::head_dim;
    using shape<N_EMBD>::most;
    /* At most: chunks of a warp, tiles of a slice, and of these a warp's. */
    static constexpr int CHUNKS = (most / CHUNK + WARPS - 1) / WARPS;
    static constexpr int SLICE = (most / TILE + CLUSTER - 1) / CLUSTER;
    static constexpr int TILES = (SLICE + WARPS - 1) / WARPS;

    const arguments &p;
    const bml_cuda_plan &plan;
    const bml_cuda_share &s;
    const memory_map &m;
    ring r;
    inbox x_in, qkv_in, states_in, sums_in;
    int warp, lane, quad, of4; /* quad, of this block's part of x: four lanes', and which lane */
    uint32_t own_base, bases[2], peer_base; /* of shared memory: here, in blocks of4 and of4 + 4,
                                               and in block WARP */
    char *taken;                            /* the warp's */
    float4 x;                               /* the quad's */

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

    __device__ __forceinline__ bool has_x() const
    {
        return quad < slice() / 4;
    }

    /* Whether the warp has an Ith chunk: every WARPSth is its. */
    __device__ __forceinline__ bool has(int i) const
    {
        return N_EMBD && (i + 1) * WARPS <= most / CHUNK ? true : warp + i * WARPS < chunks;
    }

    /* Where most warps have one, all work on one, some on their first one again: waiting for each
     * other costs more than the work. */
    __device__ __forceinline__ bool works_on(int i) const
    {
        return N_EMBD && i * WARPS + WARPS / 2 <= most / CHUNK ? true : has(i);
    }

    __device__ __forceinline__ int chunk_at(int i) const
    {
        return has(i) ? i * WARPS * CHUNK : 0;
    }

    /* The warp has read N stages. */
    __device__ __forceinline__ void release(int n)
    {
        __syncwarp();
        if (lane < n)
            barrier_arrive(r.empty_at(lane));
        r.next(n);
    }

    /* ---- x ---- */

    /* Sends the quad's x to all blocks of the cluster. */
    __device__ __forceinline__ void share()
    {
        uint32_t at = shared_address(m.x + slice_first() + 4 * quad) - own_base;
#pragma unroll
        for (int i = 0; i < CLUSTER / 4; i++)
            send_to(bases[i] + at, x, bases[i] + x_in.barrier - own_base);
    }

    __device__ __forceinline__ void embed()
    {
        if (has_x()) {
            int i = slice_first() / 4 + quad;
            int token = p.from ? max(*p.from, 0) : p.token; /* -1 fails the pass before */
            x = add4(embedding_at(p.wte, p.wte_format, n_embd, token, i),
                     embedding_at(p.wpe, p.wpe_format, n_embd, p.position, i));
            if (s.n_heads)
                share();
        }
        __syncwarp();
    }

    /* Adds what all clusters have of a product to x. */
    __device__ __forceinline__ void add_product(int layer, int matrix, uint32_t use, bool to_all)
    {
        if (8 * warp >= slice() / 4)
            return;
        const float *constants =
            p.vectors.data + layer * p.vectors.layer + slice_first() + 4 * quad;
        const float *parts = parts_of(matrix == PROJECT ? p.out.project : p.out.contract, use);
        int n_parts = matrix == PROJECT ? min(plan.n_head, plan.n_clusters) : plan.n_clusters;
        float4 bias = {}, scale = make_float4(1, 1, 1, 1), sum = {};
        if (has_x()) {
            bias = __ldg((const float4 *)(constants + p.vectors.bias[matrix]));
            if (F == BML_WEIGHTS_Q4)
                scale = __ldg((const float4 *)(constants + p.vectors.row_scale[matrix]));
            sum = get_sum(parts + 4 * of4 * n_embd + slice_first() + 4 * quad, n_embd,
                          n_parts - 4 * of4, tag_of(use));
        }
        __syncwarp();
        sum = sum_of_four(sum);
        x = F == BML_WEIGHTS_Q4 ? fma4(scale, sum, add4(bias, x)) : add4(sum, add4(bias, x));
        if (has_x() && to_all)
            share();
        __syncwarp();
    }

    __device__ __forceinline__ float *parts_of(float *all, uint32_t use) const
    {
        return all + (use & 1) * n_embd * PARTS;
    }

    static __device__ __forceinline__ uint32_t tag_of(uint32_t use)
    {
        return use >> 1 & 1;
    }

    /* Waits for all of x, and gives the warp's chunks of its norm. */
    template <class Format>
    __device__ __forceinline__ void norm(typename Format::row_x (&out)[CHUNKS], int layer,
                                         int which)
    {
        const float *weight = p.vectors.data + layer * p.vectors.layer + 2 * which * n_embd;
        float2 w[CHUNKS], b[CHUNKS], v[CHUNKS];
        int first = CHUNK * warp + 2 * lane;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                w[i] = __ldg((const float2 *)(weight + first + chunk_at(i)));
                b[i] = __ldg((const float2 *)(weight + n_embd + first + chunk_at(i)));
            }
        x_in.wait();
        /* Deviations from any element have no more than sqrt(n_embd) deviations to cancel. */
        float pivot = m.x[0], sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                float2 u = *(const float2 *)(m.x + first + chunk_at(i));
                v[i] = make_float2(u.x - pivot, u.y - pivot);
                sum += has(i) ? v[i].x + v[i].y : 0;
                squares += has(i) ? fmaf(v[i].x, v[i].x, v[i].y * v[i].y) : 0;
            }
#pragma unroll
        for (int step = 16; step; step /= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            squares += __shfl_xor_sync(~0u, squares, step);
        }
        if (lane == 0)
            ((float2 *)m.moments)[warp] = make_float2(sum, squares);
        wait_for_warps();
        sum = squares = 0;
#pragma unroll
        for (int i = 0; i < WARPS / 2; i++) {
            float4 two = ((const float4 *)m.moments)[i];
            sum += two.x + two.z;
            squares += two.y + two.w;
        }
        float mean = sum * p.inverse_embd;
        float variance = squares * p.inverse_embd - mean * mean;
        float scale = rsqrtf((variance < 0 ? 0 : variance) + p.epsilon);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                v[i] = make_float2(fmaf((v[i].x - mean) * scale, w[i].x, b[i].x),
                                   fmaf((v[i].y - mean) * scale, w[i].y, b[i].y));
                Format::keep(out[i], taken + i * 256, v[i]);
            }
        __syncwarp();
        const char *share = Format::share_of(taken, m.zeros);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i))
                Format::take(out[i], share + i * 256);
    }

    /* ---- products ---- */

    /* What the warp has of N tiles of rows goes to PARTIAL. */
    template <class Format>
    __device__ __forceinline__ void sum_rows(const typename Format::row_x (&v)[CHUNKS], int n,
                                             float *partial)
    {
        constexpr int group = together_for(N_EMBD), first = Format::unit.first_bytes,
                      second = Format::unit.second_bytes;
        float *to = partial + warp * TILE + lane / 2;
#pragma unroll 1
        for (int tile = 0; tile < n; tile += group, to += group * PARTIAL) {
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
            for (int j = 0; j < group; j++) {
                float2 two = sum[j].result();
                if (lane % 4 == 0 && (j == 0 || all))
                    *(float2 *)(to + j * PARTIAL) = two;
            }
        }
    }

    /* Row ROW of those in PARTIAL. */
    __device__ __forceinline__ float row_of(const float *partial, int row) const
    {
        const float *at = partial + row / TILE * PARTIAL + row % TILE;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            sum += at[w * TILE];
        return sum;
    }

    /* Of a product's output, whose bias is at BIAS in a layer's vectors. */
    __device__ __forceinline__ float complete(float sum, float bias, int layer, int matrix,
                                              int row) const
    {
        if (F == BML_WEIGHTS_Q4)
            return fmaf(
                sum,
                __ldg(p.vectors.data + layer * p.vectors.layer + p.vectors.row_scale[matrix] + row),
                bias);
        return sum + bias;
    }

    /* q, k and v of the cluster's heads: sent to all its blocks, to block W by warp W; k and v
     * cached. */
    __device__ __forceinline__ void project_heads(int layer_number, const layer &l)
    {
        const float *biases = p.vectors.data + layer_number * p.vectors.layer + p.vectors.bias[QKV];
        int n = TILE * s.qkv_tiles;
        float bias = lane < n ? __ldg(biases + m.rows[lane].row) : 0;
        typename format::row_x v[CHUNKS];
        norm<format>(v, layer_number, 0);
        sum_rows<format>(v, s.qkv_tiles, m.partial);
        wait_for_warps();
        uint32_t to = shared_address(m.qkv + TILE * s.qkv_first) - own_base + peer_base;
        uint32_t barrier = qkv_in.barrier - own_base + peer_base;
#pragma unroll 1
        for (int i = lane; i < n; i += 32) {
            qkv_row row = m.rows[i];
            if (i >= 32)
                bias = __ldg(biases + row.row);
            float v = complete(row_of(m.partial, i), bias, layer_number, QKV, row.row);
            if (row.cached >= 0) {
                v = to_cache_and_back(v, p.kv);
                if (warp == 0)
                    store_cached(row.row < 2 * n_embd ? l.k : l.v,
                                 ((size_t)p.slot * plan.n_head * p.n_ctx + p.position) * head_dim +
                                     row.cached,
                                 v, p.kv);
            }
            send_to(to + 4 * i, v, barrier);
        }
        __syncwarp();
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

    /* The warp's keys of a group of stages, N of them: two at a time. */
    template <class Kv>
    __device__ __forceinline__ void attend_group(softmax_state &own, const float q[8], int n)
    {
        int lanes = head_dim / 8, groups = 32 / lanes, part = 8 * (lane % lanes);
        const Kv *k = (const Kv *)r.stage() + part, *v = (const Kv *)r.stage_at(1) + part;
#pragma unroll 1
        for (int first = warp * groups; first < n; first += 2 * WARPS * groups) {
            int a = first + lane / lanes, b = a + WARPS * groups;
            int at_a = min(a, n - 1) * head_dim, at_b = min(b, n - 1) * head_dim;
            float score_a = score_of(q, k + at_a), score_b = score_of(q, k + at_b);
            own.add(a < n ? score_a : -INFINITY, b < n ? score_b : -INFINITY, v + at_a, v + at_b);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void attend(const layer &l)
    {
        int pitch = bml_cuda_state_pitch(head_dim), lanes = head_dim / 8, part = 8 * (lane % lanes);
        int sharing = COMPUTE / head_dim; /* lanes of an element below: four or two */
        int e = threadIdx.x / sharing, q_of = threadIdx.x % sharing;
        run keys(p.position, s.rank);
        bool shared_out = run::shared_out(p.position);
        float scale = l.scale * 1.44269504f;
        qkv_in.wait();
#pragma unroll 1
        for (int i = 0; i < s.n_heads; i++) {
            const float *query = m.qkv + i * 3 * head_dim;
            softmax_state own;
            float q[8];
            load_cached(q, query + part);
#pragma unroll
            for (int j = 0; j < 8; j++)
                q[j] *= scale;
#pragma unroll 1
            for (int n = keys.end - keys.begin; n > 0; n -= p.keys_of_stage) {
                int here = min(n, p.keys_of_stage);
                barrier_wait(r.full_now(), r.round);
                if (p.kv == BML_BF16)
                    attend_group<__nv_bfloat16>(own, q, here);
                else if (p.kv == BML_F16)
                    attend_group<__half>(own, q, here);
                else
                    attend_group<float>(own, q, here);
                release(2);
            }
            /* The token's own key, for one block if they share keys out. */
            if (warp == WARPS - 1 && (s.rank == CLUSTER - 1 || !shared_out)) {
                float score = score_of(q, query + head_dim + part);
                const float *value = query + 2 * head_dim + part;
                own.add(lane < lanes ? score : -INFINITY, -INFINITY, value, value);
            }
            int state = warp * (32 / lanes) + lane / lanes;
            float *to = m.found + state * pitch + part;
            *(float4 *)to = make_float4(own.v[0], own.v[1], own.v[2], own.v[3]);
            *(float4 *)(to + 4) = make_float4(own.v[4], own.v[5], own.v[6], own.v[7]);
            if (part == 0) {
                m.ends[state] = own.top;
                m.ends[32 + state] = own.sum;
            }
            wait_for_warps();
            float top, sum;
            float v = joined<8>(sharing, m.found + q_of * pitch + e, m.ends + q_of,
                                m.ends + 32 + q_of, sharing, pitch, sharing, top, sum);
            if (!shared_out) {
                if (q_of == 0)
                    m.few[i * head_dim + e] = __fdividef(v, sum);
            } else {
                float *state_to = m.states + (i * CLUSTER + s.rank) * pitch;
#pragma unroll 1
                for (int rank = q_of; rank < CLUSTER; rank += sharing) {
                    uint32_t base = address_in(own_base, rank) - own_base;
                    uint32_t barrier = base + states_in.barrier;
                    send_to(base + shared_address(state_to + e), v, barrier);
                    if (e == 0)
                        send_to(base + shared_address(state_to + head_dim), make_float2(top, sum),
                                barrier);
                }
            }
            if (i + 1 < s.n_heads)
                wait_for_warps();
        }
        if (shared_out) {
            states_in.wait();
#pragma unroll 1
            for (int i = 0; i < s.n_heads; i++) {
                const float *from = m.states + (i * CLUSTER + q_of) * pitch;
                float top, sum, v;
                if (head_dim == 64)
                    v = joined<2>(sharing, from + e, from + head_dim, from + head_dim + 1, 4, pitch,
                                  4 * pitch, top, sum);
                else
                    v = joined<4>(sharing, from + e, from + head_dim, from + head_dim + 1, 2, pitch,
                                  2 * pitch, top, sum);
                if (q_of == 0)
                    m.few[i * head_dim + e] = __fdividef(v, sum);
            }
        }
        wait_for_warps();
    }

    /* ---- what a cluster adds to x ---- */

    __device__ __forceinline__ void project(uint32_t use)
    {
        constexpr int first = format::unit.first_bytes, both = first + format::unit.second_bytes;
        typename format::sums sum[TILES];
        int n = slice_tiles(s.rank);
#pragma unroll 1
        for (int part = 0; part < bml_cuda_proj_stages(&plan, &s); part++) {
            const char *units = r.stage() + warp * both;
            typename format::row_x v;
            format::keep(v, taken, ((const float2 *)(m.few + part * CHUNK))[lane]);
            __syncwarp();
            format::take(v, format::share_of(taken, m.zeros));
            barrier_wait(r.full_now(), r.round);
#pragma unroll
            for (int i = 0; i < TILES; i++)
                if (warp + i * WARPS < n)
                    format::add_row(sum[i], units + i * WARPS * both,
                                    units + i * WARPS * both + first, v, p.levels);
            release(1);
        }
        float *to = parts_of(p.out.project, use) + s.cluster * n_embd + slice_first() +
                    TILE * warp + lane / 2;
#pragma unroll
        for (int i = 0; i < TILES; i++)
            if (warp + i * WARPS < n) {
                float2 v = sum[i].result();
                if (lane % 4 == 0)
                    put(to + i * WARPS * TILE, v, tag_of(use));
            }
    }

    __device__ __forceinline__ void expand(int layer)
    {
        const float *biases = p.vectors.data + layer * p.vectors.layer + p.vectors.bias[EXPAND] +
                              HIDDEN * s.hidden_first;
        int n = HIDDEN * s.hidden_tiles, row = threadIdx.x;
        float bias = row < n ? __ldg(biases + row) : 0;
        typename format::row_x v[CHUNKS];
        norm<format>(v, layer, 1);
        sum_rows<format>(v, s.hidden_tiles, m.partial);
        wait_for_warps();
        if (row < n) {
            float sum = complete(row_of(m.partial, row), bias, layer, EXPAND,
                                 HIDDEN * s.hidden_first + row);
            m.few[row] = activate(sum, p.activation);
        }
        wait_for_warps();
    }

    /* A warp has a slice of x, and sends its sums to whose slice it is. */
    __device__ __forceinline__ void contract(uint32_t use)
    {
        typename format::sums sum[SLICE];
        int half = warp / (WARPS / 2), n = slice_tiles(warp);
        int at = (bml_cuda_slice_first(n_embd, warp) -
                  bml_cuda_slice_first(n_embd, half * (WARPS / 2))) *
                 format::unit.col_bytes;
#pragma unroll 1
        for (int k = 0; k < s.hidden_tiles; k += format::pairs ? 2 : 1) {
            bool pair = format::pairs && k + 1 < s.hidden_tiles;
            typename format::columns_x v = format::columns(m.few + k * HIDDEN, pair);
            const char *first = r.stage_at(half) + at;
            typename format::column_units units(first, pair ? r.stage_at(2 + half) + at : first);
            barrier_wait(r.full_now(), r.round);
            if (pair)
                barrier_wait(r.full_at(2), r.round_at(2));
#pragma unroll
            for (int i = 0; i < SLICE; i++)
                if (i < n)
                    format::add_columns(sum[i], units, i, v, p.levels);
            release(pair ? 4 : 2);
        }
        uint32_t to = shared_address(m.sums + s.rank * TILE * n + lane / 2) - own_base + peer_base;
        uint32_t barrier = sums_in.barrier - own_base + peer_base;
#pragma unroll
        for (int i = 0; i < SLICE; i++)
            if (i < n) {
                float2 v = sum[i].result_of_columns();
                if (lane % 4 == 0)
                    send_to(to + i * TILE * (int)sizeof(float), v, barrier);
            }
        sums_in.wait();
        int i = threadIdx.x;
        if (i < slice() / 4) {
            float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int b = 0; b < CLUSTER; b++)
                v = add4(((const float4 *)m.sums)[b * (slice() / 4) + i], v);
            put(parts_of(p.out.contract, use) + s.cluster * n_embd + slice_first() + 4 * i, v,
                tag_of(use));
        }
        __syncwarp();
    }

    /* ---- the head ---- */

    /* Joins the candidates of threads and blocks. A logit's 32 bits go in halves: all of them
     * count, and words carry tags. */
    __device__ __forceinline__ void choose(candidate mine, uint32_t tag)
    {
        int i = threadIdx.x;
        mine = best_of_block(mine);
        if (i == 0) {
            uint32_t bits = __float_as_uint(mine.logit);
            float4 record =
                make_float4(__uint_as_float(bits >> 16 << 1), __uint_as_float((bits & 0xffff) << 1),
                            __uint_as_float((uint32_t)mine.id << 1), 0);
            put(p.out.best + blockIdx.x * RECORD, record, tag);
        }
        if (blockIdx.x > 0)
            return;
        mine = {-INFINITY, NO_ID};
        if (i < gridDim.x) {
            float4 v = get(p.out.best + i * RECORD, tag);
            uint32_t bits = __float_as_uint(v.x) >> 1 << 16 | __float_as_uint(v.y) >> 1;
            mine = {__uint_as_float(bits), (int)__float_as_uint(v.z) >> 1};
        }
        __syncwarp();
        mine = best_of_block(mine);
        if (i == 0)
            *p.id = *p.host_id = mine.id;
    }

    /* For thread 0. */
    __device__ __forceinline__ candidate best_of_block(candidate mine)
    {
        mine = best_of_warp(mine);
        wait_for_warps(); /* for the last use to end */
        if (lane == 0)
            m.best[warp] = mine;
        wait_for_warps();
        if (threadIdx.x == 0)
            for (int w = 0; w < WARPS; w++)
                mine = better(mine, m.best[w]);
        return mine;
    }

    __device__ __forceinline__ void head()
    {
        typedef unit_format<HEAD> format;
        candidate mine = {-INFINITY, NO_ID};
        typename format::row_x v[CHUNKS];
        norm<format>(v, p.n_layer, 0);
        float *partial = m.partial, *other = m.found;
#pragma unroll 1
        for (int tile = 0; tile < s.vocab_tiles; tile += MAX_TILES) {
            int n = min(s.vocab_tiles - tile, (int)MAX_TILES), row = threadIdx.x;
            sum_rows<format>(v, n, partial);
            wait_for_warps();
            if (row < TILE * n) {
                float logit = row_of(partial, row);
                int id = TILE * (s.vocab_first + tile) + row;
                if (id < p.n_valid)
                    mine = better(mine, candidate{logit, isfinite(logit) ? id : -1});
                if (!p.n_valid && id < plan.vocab_size)
                    p.logits[id] = logit;
            }
            __syncwarp();
            float *last = partial; /* others may still read it */
            partial = other;
            other = last;
        }
        if (p.n_valid)
            choose(mine, (p.best_use + 1) & 1);
    }

    __device__ __forceinline__ void pass()
    {
        bool attends = s.n_heads > 0;
        embed();
#pragma unroll 1
        for (int i = 0; i < p.n_layer; i++) {
            uint32_t use = p.use + i;
            if (attends) {
                layer l = p.layers[i];
                project_heads(i, l);
                attend(l);
                project(use);
            }
            add_product(i, PROJECT, use, true);
            expand(i);
            contract(use);
            add_product(i, CONTRACT, use, i + 1 < p.n_layer ? attends : p.want_row);
        }
        if (p.want_row)
            head();
    }
};

#endif

template <bml_weight_format F, bml_weight_format HEAD, int N_EMBD>
static __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ arguments p)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const bml_cuda_plan &plan = p.plan;
    bml_cuda_share s = bml_cuda_share_of(&plan, blockIdx.x);
    uint64_t *barriers = (uint64_t *)(memory + p.n_stages * p.stage_bytes);
    uint32_t full = shared_address(barriers), empty = full + p.n_stages * 8;
    uint32_t inboxes = empty + p.n_stages * 8;
    ring r = {memory, full, empty, p.n_stages, p.stage_bytes, 0, 0};
    uint32_t bytes[BML_CUDA_INBOXES];
#pragma unroll
    for (int i = 0; i < BML_CUDA_INBOXES; i++)
        bytes[i] = bml_cuda_inbox_bytes(&plan, &s, i, run::shared_out(p.position));
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.n_stages; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS);
        }
        for (int i = 0; i < BML_CUDA_INBOXES; i++)
            barrier_init(inboxes + 8 * i, 1);
        barrier_init_fence();
        for (int i = 0; i < BML_CUDA_INBOXES; i++)
            barrier_expect(inboxes + 8 * i, bytes[i]);
    }
    meet_cluster();
    if (threadIdx.x < COMPUTE) {
        memory_map m;
        m.x = (float *)(barriers + 2 * p.n_stages + BML_CUDA_INBOXES);
        m.qkv = m.sums = m.x + plan.n_embd;
        m.states = m.qkv + s.n_heads * 3 * plan.head_dim;
        m.few = m.qkv + p.inbox_bytes / 4;
        m.partial = m.few + p.few;
        m.found = m.partial + MAX_TILES * PARTIAL;
        m.ends = m.found + FOUND;
        m.moments = m.ends + 64;
        m.taken = (char *)(m.moments + 2 * WARPS);
        m.zeros = m.taken + WARPS * MAX_EACH * 256;
        m.best = (candidate *)(m.zeros + MAX_EACH * 256);
        m.rows = (qkv_row *)(m.best + WARPS);
        for (int i = threadIdx.x; i < MAX_EACH * 64; i += COMPUTE)
            ((int *)m.zeros)[i] = 0;
        for (int i = threadIdx.x; i < TILE * s.qkv_tiles; i += COMPUTE) {
            int row = bml_cuda_qkv_row(&plan, s.cluster, TILE * s.qkv_first + i);
            int e = row % plan.n_embd, head = e / plan.head_dim;
            m.rows[i] = {
                row, row < plan.n_embd ? -1 : head * p.n_ctx * plan.head_dim + e % plan.head_dim};
        }
        wait_for_warps();
        int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0); /* uniform */
        uint32_t base = shared_address(memory);
        worker<F, HEAD, N_EMBD> w = {
            shape<N_EMBD>(plan),
            p,
            plan,
            s,
            m,
            r,
            {inboxes + 8 * BML_CUDA_X_IN, bytes[BML_CUDA_X_IN], 0},
            {inboxes + 8 * BML_CUDA_QKV_IN, bytes[BML_CUDA_QKV_IN], 0},
            {inboxes + 8 * BML_CUDA_STATES_IN, bytes[BML_CUDA_STATES_IN], 0},
            {inboxes + 8 * BML_CUDA_SUMS_IN, bytes[BML_CUDA_SUMS_IN], 0},
            warp,
            lane,
            (int)threadIdx.x / 4,
            lane % 4,
            base,
            {address_in(base, lane % 4), address_in(base, lane % 4 + 4)},
            address_in(base, warp),
            m.taken + warp * MAX_EACH * 256,
            {}};
        w.pass();
    } else if (threadIdx.x == COMPUTE) {
        fill<F, HEAD, N_EMBD>(r, p, s);
    }
    __syncwarp();
    meet_cluster(); /* nobody leaves while another may still send to it */
#endif
}

template <bml_weight_format F> static const void *kernel_of(int n_embd, int head_dim)
{
    constexpr bml_weight_format head = bml_cuda_head_format(F);
    switch (head_dim == 64 ? n_embd : 0) { /* GPT-2's */
    case 768:
        return (const void *)decode<F, head, 768>;
    case 1024:
        return (const void *)decode<F, head, 1024>;
    case 1280:
        return (const void *)decode<F, head, 1280>;
    case 1600:
        return (const void *)decode<F, head, 1600>;
    }
    return (const void *)decode<F, head, 0>;
}

const void *bml_cuda_decode_kernel(bml_weight_format format, int n_embd, int head_dim)
{
    const void *kernel = nullptr;
    bml_cuda_with_format(format, [&](auto f) { kernel = kernel_of<f.format>(n_embd, head_dim); });
    return kernel;
}
