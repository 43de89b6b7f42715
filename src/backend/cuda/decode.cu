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
 *   expand    rows of the block's hidden units; sent to all
 *   contract  columns of the cluster's hidden units, a share of the rows -> parts of x
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
#include "backend/cuda/decode_block.cuh"

#if __CUDA_ARCH__ >= 900

/* Whether the blocks of a cluster share keys out. */
__device__ static bool shares_keys(const arguments &p)
{
    return p.position[0] > KEYS_OF_ALL;
}

__device__ static run keys_of(const arguments &p, int rank)
{
    int n = p.position[0];
    if (!shares_keys(p))
        return {p.slot[0], 0, n};
    return {p.slot[0], n * rank / CLUSTER, n * (rank + 1) / CLUSTER};
}

/* A block's shared memory, as its parts are called below. */
struct memory_map {
    float *x;        /* [n_embd], sent */
    float *qkv;      /* [3 n_heads head_dim], sent */
    float *states;   /* [n_heads][CLUSTER][head_dim + 8], sent: v, the largest score, the sum */
    float *hidden;   /* [units of the cluster], sent, and zeros up to [p.hidden] */
    float *few;      /* [n_heads head_dim] */
    float *partial;  /* [MAX_TILES][PARTIAL] */
    float *found;    /* [2048 / head_dim][head_dim + 8]; other sums of warps */
    float *ends;     /* [2][32] largest scores and sums that belong to FOUND */
    float *moments;  /* [WARPS][2] */
    char *taken;     /* [WARPS][MAX_EACH][256] */
    char *zeros;     /* [MAX_EACH][256] */
    qkv_row *rows;   /* [TILE qkv_tiles] */
    candidate *best; /* [WARPS] */
};

template <bml_weight_format F, bml_weight_format HEAD, int N_EMBD>
struct worker : computing_warp<F, N_EMBD> {
    typedef computing_warp<F, N_EMBD> base;
    using base::attend_heads, base::CHUNKS, base::complete, base::has, base::head_dim, base::lane,
        base::most, base::n_embd, base::p, base::plan, base::r, base::s, base::slice, base::SLICE,
        base::slice_first, base::slice_tiles, base::sum_projection, base::TILES, base::warp;
    using typename base::format;

    const memory_map &m;
    inbox x_in, qkv_in, states_in, hidden_in;
    int quad, of4; /* quad, of this block's part of x: four lanes', and which lane */
    uint32_t own_base, bases[2], peer_base; /* of shared memory: here, in blocks of4 and of4 + 4,
                                               and in block WARP */
    char *taken;                            /* the warp's */
    float4 x;                               /* the quad's */

    __device__ __forceinline__ bool has_x() const
    {
        return quad < slice() / 4;
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
            int token = p.from ? max(*p.from, 0) : p.token[0]; /* -1 fails the pass before */
            x = add4(embedding_at(p.wte, p.wte_format, n_embd, token, i),
                     embedding_at(p.wpe, p.wpe_format, n_embd, p.position[0], i));
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
    __device__ __forceinline__ void keep_rows(const typename Format::row_x (&v)[CHUNKS], int n,
                                              float *partial)
    {
        float *to = partial + warp * TILE + lane / 2;
        this->template sum_rows<Format>(
            v, n, [&](int tile, const typename Format::sums &sum, bool is_there) {
                float2 two = sum.result();
                if (lane % 4 == 0 && is_there)
                    *(float2 *)(to + tile * PARTIAL) = two;
            });
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

    /* q, k and v of the cluster's heads: sent to all its blocks, to block W by warp W; k and v
     * cached. */
    __device__ __forceinline__ void project_heads(int layer_number, const layer &l)
    {
        const float *biases = p.vectors.data + layer_number * p.vectors.layer + p.vectors.bias[QKV];
        int n = TILE * s.qkv_tiles;
        float bias = lane < n ? __ldg(biases + m.rows[lane].row) : 0;
        typename format::row_x v[CHUNKS];
        norm<format>(v, layer_number, 0);
        keep_rows<format>(v, s.qkv_tiles, m.partial);
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
                                 ((size_t)p.slot[0] * plan.n_head * p.n_ctx + p.position[0]) *
                                         head_dim +
                                     row.cached,
                                 v, p.kv);
            }
            send_to(to + 4 * i, v, barrier);
        }
        __syncwarp();
    }

    /* ---- attention: softmaxes on their way are v[head_dim], the largest score, and the sum;
     * scores are logarithms to base two ---- */

    /* ---- attention ---- */

    __device__ __forceinline__ void attend(const layer &l)
    {
        int pitch = bml_cuda_state_pitch(head_dim);
        run keys = keys_of(p, s.rank);
        bool shared_out = shares_keys(p);
        float scale = l.scale * 1.44269504f;
        qkv_in.wait();
#pragma unroll 1
        for (int i = 0; i < s.n_heads; i += abreast_for(N_EMBD)) {
            /* The token's own key, for one block if they share keys out. */
            bool own_key = s.rank == CLUSTER - 1 || !shared_out;
            int abreast = abreast_for(N_EMBD) > 1 && i + 1 < s.n_heads ? 2 : 1;
            float top, sum;
            float v = attend_heads(m.qkv + i * 3 * head_dim, abreast, keys.end - keys.begin,
                                   own_key, scale, m.found, m.ends, top, sum);
            auto mine = this->joins(abreast);
            int head = i + mine.head;
            if (!shared_out) {
                if (mine.of == 0)
                    m.few[head * head_dim + mine.e] = __fdividef(v, sum);
            } else {
                float *state_to = m.states + (head * CLUSTER + s.rank) * pitch;
#pragma unroll 1
                for (int rank = mine.of; rank < CLUSTER; rank += mine.lanes) {
                    uint32_t base = address_in(own_base, rank) - own_base;
                    uint32_t barrier = base + states_in.barrier;
                    send_to(base + shared_address(state_to + mine.e), v, barrier);
                    if (mine.e == 0)
                        send_to(base + shared_address(state_to + head_dim), make_float2(top, sum),
                                barrier);
                }
            }
            if (i + abreast_for(N_EMBD) < s.n_heads)
                wait_for_warps();
        }
        if (shared_out) {
            auto mine = this->joins(1);
            states_in.wait();
#pragma unroll 1
            for (int i = 0; i < s.n_heads; i++) {
                const float *from = m.states + (i * CLUSTER + mine.of) * pitch;
                const float *state = from + mine.e, *ends = from + head_dim;
                float top, sum, v;
                if (head_dim == 64)
                    v = joined<2>(mine.lanes, state, ends, ends + 1, 4, pitch, 4 * pitch, top, sum);
                else
                    v = joined<4>(mine.lanes, state, ends, ends + 1, 2, pitch, 2 * pitch, top, sum);
                if (mine.of == 0)
                    m.few[i * head_dim + mine.e] = __fdividef(v, sum);
            }
        }
        wait_for_warps();
    }

    /* ---- what a cluster adds to x ---- */

    __device__ __forceinline__ void project(uint32_t use)
    {
        typename format::sums sum[TILES];
        sum_projection(sum, [&](int part) {
            typename format::row_x v;
            format::keep(v, taken, ((const float2 *)(m.few + part * CHUNK))[lane]);
            __syncwarp();
            format::take(v, format::share_of(taken, m.zeros));
            return v;
        });
        put_sums(p.out.project, use, [&](int i) { return sum[i].result(); });
    }

    /* The warp's tiles of what the cluster adds to x go to where all clusters look. */
    template <class Sum> __device__ __forceinline__ void put_sums(float *all, uint32_t use, Sum sum)
    {
        float *to =
            parts_of(all, use) + s.cluster * n_embd + slice_first() + TILE * warp + lane / 2;
#pragma unroll
        for (int i = 0; i < TILES; i++)
            if (warp + i * WARPS < slice_tiles(s.rank)) {
                float2 v = sum(i);
                if (lane % 4 == 0)
                    put(to + i * WARPS * TILE, v, tag_of(use));
            }
    }

    /* Hidden units: sent to all blocks of the cluster, to block W by warp W. */
    __device__ __forceinline__ void expand(int layer)
    {
        const float *biases = p.vectors.data + layer * p.vectors.layer + p.vectors.bias[EXPAND] +
                              HIDDEN * s.hidden_first;
        int n = HIDDEN * s.hidden_tiles;
        float bias = lane < n ? __ldg(biases + lane) : 0;
        typename format::row_x v[CHUNKS];
        norm<format>(v, layer, 1);
        keep_rows<format>(v, s.hidden_tiles, m.partial);
        wait_for_warps();
        uint32_t peer = peer_base - own_base;
        uint32_t to =
            shared_address(m.hidden + HIDDEN * (s.hidden_first - s.clusters_first)) + peer;
#pragma unroll 1
        for (int i = lane; i < n; i += 32) {
            if (i >= 32)
                bias = __ldg(biases + i);
            float sum =
                complete(row_of(m.partial, i), bias, layer, EXPAND, HIDDEN * s.hidden_first + i);
            send_to(to + 4 * i, format::kept(activate(sum, p.activation)),
                    hidden_in.barrier + peer);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void contract(uint32_t use)
    {
        if (s.clusters_tiles)
            hidden_in.wait();
        if constexpr (format::half_width && N_EMBD > 1280)
            contract_rows(use);
        else
            contract_units(use);
        __syncwarp();
    }

    /* Of the slice's tiles of rows the warp's, as of the projection: little comes behind the last
     * weights, which large models wait for. */
    __device__ __forceinline__ void contract_rows(uint32_t use)
    {
        constexpr int bytes = format::unit.col_bytes, stage_tiles = BML_CUDA_STAGE_TILES;
        typename format::sums sum[TILES];
        int n = slice_tiles(s.rank), tiles = s.clusters_tiles;
#pragma unroll 1
        for (int stage = 0; stage < tiles; stage += stage_tiles) {
            const char *at = r.stage() + warp * bytes;
            typename format::columns_x v[stage_tiles / 2];
#pragma unroll
            for (int j = 0; j < stage_tiles / 2; j++)
                v[j] = format::columns(m.hidden + (stage + 2 * j) * HIDDEN, true);
            barrier_wait(r.full_now(), r.round);
#pragma unroll
            for (int j = 0; j < stage_tiles / 2; j++) {
                int k = 2 * j; /* what is not there is the first one, times zeros */
                const char *one = stage + k < tiles ? at + k * n * bytes : at;
                const char *other = stage + k + 1 < tiles ? at + (k + 1) * n * bytes : at;
                typename format::column_units units(one, other);
#pragma unroll
                for (int i = 0; i < TILES; i++)
                    if (warp + i * WARPS < n)
                        format::add_columns(sum[i], units, i * WARPS, v[j], p.levels);
            }
            this->release(1);
        }
        put_sums(p.out.contract, use, [&](int i) { return sum[i].result_of_columns(); });
    }

    /* A warp has every WARPSth of the cluster's tiles of hidden units, or of pairs of them, for all
     * of the slice's rows: the least code, and what it makes of units it makes once. */
    __device__ __forceinline__ void contract_units(uint32_t use)
    {
        constexpr int bytes = format::unit.col_bytes, stage_tiles = BML_CUDA_STAGE_TILES;
        constexpr int each = format::pairs ? 2 : 1, pitch = TILE * SLICE;
        typename format::sums sum[SLICE];
        int n = slice_tiles(s.rank), i = threadIdx.x;
#pragma unroll 1
        for (int stage = 0; stage < s.clusters_tiles; stage += stage_tiles) {
            int mine = (warp - stage / each) & (WARPS - 1), k = stage + mine * each;
            bool has = mine < stage_tiles / each && k < s.clusters_tiles;
            bool pair = format::pairs && k + 1 < s.clusters_tiles;
            typename format::columns_x v;
            if (has)
                v = format::columns(m.hidden + k * HIDDEN, pair);
            barrier_wait(r.full_now(), r.round);
            if (has) {
                const char *at = r.stage() + mine * each * n * bytes;
                typename format::column_units units(at, pair ? at + n * bytes : at);
#pragma unroll
                for (int j = 0; j < SLICE; j++)
                    if (j < n)
                        format::add_columns(sum[j], units, j, v, p.levels);
            }
            this->release(1);
        }
        static_assert(WARPS * pitch <= FOUND, "sums of all warps");
        float *to = m.found + warp * pitch + lane / 2;
#pragma unroll
        for (int j = 0; j < SLICE; j++)
            if (j < n) {
                float2 v = sum[j].result_of_columns();
                if (lane % 4 == 0)
                    *(float2 *)(to + j * TILE) = v;
            }
        wait_for_warps();
        if (i < slice() / 4) {
            float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                v = add4(((const float4 *)m.found)[w * (pitch / 4) + i], v);
            put(parts_of(p.out.contract, use) + s.cluster * n_embd + slice_first() + 4 * i, v,
                tag_of(use));
        }
    }

    /* ---- the head ---- */

    /* Joins the candidates of threads and blocks. */
    __device__ __forceinline__ void choose(candidate mine, uint32_t tag)
    {
        int i = threadIdx.x;
        mine = best_of_block(mine);
        if (i == 0)
            put(p.out.best + blockIdx.x * RECORD, record_of(mine), tag);
        if (blockIdx.x > 0)
            return;
        mine = {-INFINITY, NO_ID};
        if (i < gridDim.x)
            mine = candidate_of(get(p.out.best + i * RECORD, tag));
        __syncwarp();
        mine = best_of_block(mine);
        if (i == 0)
            *p.ids = *p.host_id[0] = mine.id;
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
            keep_rows<format>(v, n, partial);
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
        bytes[i] = bml_cuda_inbox_bytes(&plan, &s, i, shares_keys(p));
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.n_stages; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS * ARRIVALS);
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
        m.qkv = m.x + plan.n_embd;
        m.states = m.qkv + s.n_heads * 3 * plan.head_dim;
        m.few = m.qkv + p.inbox_bytes / 4;
        m.hidden = m.few + p.few;
        m.partial = m.hidden + p.hidden;
        m.found = m.partial + MAX_TILES * PARTIAL;
        m.ends = m.found + FOUND;
        m.moments = m.ends + 64;
        m.taken = (char *)(m.moments + 2 * WARPS);
        m.zeros = m.taken + WARPS * MAX_EACH * 256;
        m.best = (candidate *)(m.zeros + MAX_EACH * 256);
        m.rows = (qkv_row *)(m.best + WARPS);
        for (int i = threadIdx.x; i < MAX_EACH * 64; i += COMPUTE)
            ((int *)m.zeros)[i] = 0;
        for (int i = threadIdx.x + HIDDEN * s.clusters_tiles; i < p.hidden; i += COMPUTE)
            m.hidden[i] = 0;
        for (int i = threadIdx.x; i < TILE * s.qkv_tiles; i += COMPUTE)
            m.rows[i] = qkv_row_of(p, s, i);
        wait_for_warps();
        int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0); /* uniform */
        uint32_t base = shared_address(memory);
        worker<F, HEAD, N_EMBD> w = {
            {shape<N_EMBD>(plan), p, plan, s, r, warp, lane},
            m,
            {inboxes + 8 * BML_CUDA_X_IN, bytes[BML_CUDA_X_IN], 0},
            {inboxes + 8 * BML_CUDA_QKV_IN, bytes[BML_CUDA_QKV_IN], 0},
            {inboxes + 8 * BML_CUDA_STATES_IN, bytes[BML_CUDA_STATES_IN], 0},
            {inboxes + 8 * BML_CUDA_HIDDEN_IN, bytes[BML_CUDA_HIDDEN_IN], 0},
            (int)threadIdx.x / 4,
            lane % 4,
            base,
            {address_in(base, lane % 4), address_in(base, lane % 4 + 4)},
            address_in(base, warp),
            m.taken + warp * MAX_EACH * 256,
            {}};
        run_pass(w);
    } else if (threadIdx.x == COMPUTE) {
        fill<F, HEAD, N_EMBD, 2, abreast_for(N_EMBD)>(r, p, s, keys_of(p, s.rank));
    }
    __syncwarp();
    meet_cluster(); /* nobody leaves while another may still send to it */
#endif
}

template <bml_weight_format F> static const void *kernel_of(int n_embd, int head_dim)
{
    constexpr bml_weight_format head = bml_cuda_head_format(F);
    switch (width_of(n_embd, head_dim)) {
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
