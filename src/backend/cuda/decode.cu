/*
 * The pass of one token as one launch: a block on nearly every multiprocessor, all of them there
 * from the first layer to the last, in clusters of eight.
 *
 * Each block has its share of every matrix (decode_plan.h). One of its warps streams it through a
 * ring in shared memory, in the order of the pass, layers ahead of what is being computed: reading
 * weights, or keys and values, never waits for activations (kernels/ring.cuh). The other warps
 * compute. Within a cluster blocks send what they have to each other's shared memory
 * (kernels/cluster.cuh). What clusters add to x they add up in global memory, in words that say for
 * themselves that they are complete (kernels/exchange.cuh); there is no barrier across clusters.
 * Per layer, for a cluster with heads:
 *
 *   x         every block waits for what was added to x; norm
 *   qkv       rows of the cluster's heads; sent to all blocks of the cluster
 *   attend    with many keys each block a run of them; what it gives is sent to all
 *   project   columns of the cluster's heads, a share of the rows   -> added to x
 *   x         as above
 *   expand    rows of the block's hidden units; sent to all
 *   contract  columns of the cluster's hidden units, a share of the rows -> added to x
 *
 * So a layer waits twice for other clusters, where five products one after the other would have to
 * five times. A cluster without heads has x, expand and contract.
 *
 * There are two sums of each element of x, one for each product that adds to it, so that nobody
 * adds to one before all have seen what the last layer added: that needs what every cluster added
 * to the other. The same holds for what is sent within a cluster, whose inboxes are used once a
 * layer.
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
    float *qkv;      /* [3 n_heads head_dim], sent */
    float *states;   /* [n_heads][CLUSTER][head_dim + 8], sent: v, the largest score, the sum */
    float *hidden;   /* [units of the cluster], sent, and zeros up to [p.hidden] */
    float *few;      /* [n_heads head_dim] */
    float *partial;  /* [MAX_TILES][PARTIAL] */
    float *found;    /* [2048 / head_dim][head_dim + 8]; other sums of warps */
    float *ends;     /* [2][32] largest scores and sums that belong to FOUND */
    float2 *moments; /* [WARPS]: means of x, and sums of squared deviations */
    char *taken;     /* [WARPS][MAX_EACH][256] */
    char *zeros;     /* [MAX_EACH][256] */
    qkv_row *rows;   /* [TILE qkv_tiles] */
    candidate *best; /* [WARPS] */
};

template <bml_weight_format F, bml_weight_format HEAD, int N_EMBD>
struct worker : computing_warp<F, N_EMBD> {
    typedef computing_warp<F, N_EMBD> base;
    using base::adding, base::attend_heads, base::chunks, base::CHUNKS, base::complete, base::has,
        base::head_dim, base::lane, base::most, base::n_embd, base::p, base::plan, base::r,
        base::row_scale, base::s, base::slice, base::SLICE, base::slice_first, base::slice_tiles,
        base::sum_projection, base::sums_of, base::TILES, base::warp;
    using typename base::format;

    const memory_map &m;
    inbox qkv_in, states_in, hidden_in;
    uint32_t own_base, peer_base;                  /* of shared memory: here, and in block WARP */
    char *taken;                                   /* the warp's */
    float2 x[CHUNKS];                              /* of each of the warp's chunks two elements */
    ulonglong2 last[2][CHUNKS];                    /* what sums of these were */
    float2 norm_weight[CHUNKS], norm_bias[CHUNKS]; /* of the next norm */

    /* Where most warps have one, all work on one, some on their first one again: waiting for each
     * other costs more than the work. */
    __device__ __forceinline__ bool works_on(int i) const
    {
        return N_EMBD && i * WARPS + WARPS / 2 <= most / CHUNK ? true : has(i);
    }

    /* Where the lane's elements of it are. */
    __device__ __forceinline__ int element(int i) const
    {
        return CHUNK * (has(i) ? warp + i * WARPS : warp) + 2 * lane;
    }

    /* ---- x ---- */

    /* Asks for what the next norm needs. */
    __device__ __forceinline__ void ask_for_norm(int layer, int which)
    {
        const float *weight = p.vectors.data + layer * p.vectors.layer + 2 * which * n_embd;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                norm_weight[i] = __ldg((const float2 *)(weight + element(i)));
                norm_bias[i] = __ldg((const float2 *)(weight + n_embd + element(i)));
            }
    }

    /* The lane's elements of row ROW of an embedding. */
    __device__ __forceinline__ void embedding(float2 (&out)[CHUNKS], const char *rows,
                                              bml_weight_format format, int row) const
    {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                float4 four = embedding_at(rows, format, n_embd, row, element(i) / 4);
                out[i] = lane % 2 ? make_float2(four.z, four.w) : make_float2(four.x, four.y);
            }
    }

    __device__ __forceinline__ void embed()
    {
        float2 of_token[CHUNKS];
        ask_for_norm(0, 0);
        embedding(x, p.wpe, p.wpe_format, p.position[0]);
        await_previous();
        int token = p.from ? max(*p.from, 0) : p.token[0]; /* -1 fails the pass before */
        if (p.wte_format == HEAD) /* known when compiling: all loads at once */
            embedding(of_token, p.wte, HEAD, token);
        else
            embedding(of_token, p.wte, p.wte_format, token);
        __syncwarp();
        await_cluster();
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                x[i].x += of_token[i].x;
                x[i].y += of_token[i].y;
            }
    }

    /* Adds what all clusters have of a product to x. */
    __device__ __forceinline__ void add_product(int layer, int matrix, bool)
    {
        const float *biases = p.vectors.data + layer * p.vectors.layer + p.vectors.bias[matrix];
        float2 bias[CHUNKS], got[CHUNKS];
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i))
                bias[i] = __ldg((const float2 *)(biases + element(i)));
        ask_for_norm(layer + (matrix == CONTRACT), matrix == PROJECT);
        this->await_first_sum(matrix, 0, last[matrix == CONTRACT][0].x);
        get_sums(
            got, last[matrix == CONTRACT], sums_of(matrix, 0),
            [&](int i) { return works_on(i) ? element(i) : -1; }, adding(matrix));
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                x[i].x += bias[i].x + got[i].x;
                x[i].y += bias[i].y + got[i].y;
            }
    }

    /* Gives the warp's chunks of x's norm. */
    template <class Format>
    __device__ __forceinline__ void norm(typename Format::row_x (&out)[CHUNKS])
    {
        /* Deviations from any element have no more than sqrt(n) deviations to cancel. */
        float pivot = __shfl_sync(~0u, x[0].x, 0), sum = 0, squares = 0;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                float a = x[i].x - pivot, b = x[i].y - pivot;
                sum += has(i) ? a + b : 0;
                squares += has(i) ? fmaf(a, a, b * b) : 0;
            }
#pragma unroll
        for (int step = 16; step; step /= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            squares += __shfl_xor_sync(~0u, squares, step);
        }
        auto of_warp = [&](int w) { return (float)((chunks - w + WARPS - 1) / WARPS * CHUNK); };
        float off = __fdividef(sum, of_warp(warp));
        if (lane == 0)
            m.moments[warp] = warp < chunks ? make_float2(pivot + off, fmaf(-sum, off, squares))
                                            : make_float2(0, 0);
        wait_for_warps();
        float2 moments = joined_moments(m.moments, of_warp, p.inverse_embd);
        float mean = moments.x, scale = rsqrtf(moments.y + p.epsilon);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (works_on(i)) {
                float2 w = norm_weight[i], b = norm_bias[i];
                Format::keep(out[i], taken + i * 256,
                             make_float2(fmaf((x[i].x - mean) * scale, w.x, b.x),
                                         fmaf((x[i].y - mean) * scale, w.y, b.y)));
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
        norm<format>(v);
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

    __device__ __forceinline__ void project(int layer)
    {
        typename format::sums sum[TILES];
        row_scales scales = scales_of(layer, PROJECT);
        sum_projection(sum, [&](int part) {
            typename format::row_x v;
            format::keep(v, taken, ((const float2 *)(m.few + part * CHUNK))[lane]);
            __syncwarp();
            format::take(v, format::share_of(taken, m.zeros));
            return v;
        });
        add_sums(PROJECT, scales, [&](int i) { return sum[i].result(); });
    }

    /* Of the warp's tiles of the slice the row that the lane adds: lanes 4 g and 4 g + 1 have rows
     * 2 g and 2 g + 1. */
    __device__ __forceinline__ int added_row(int i) const
    {
        return slice_first() + TILE * (warp + i * WARPS) + lane / 4 * 2 + lane % 2;
    }

    /* What these rows' sums are to be multiplied by. */
    struct row_scales {
        float of[TILES];
    };

    __device__ __forceinline__ row_scales scales_of(int layer, int matrix) const
    {
        row_scales scales;
#pragma unroll
        for (int i = 0; i < TILES; i++)
            scales.of[i] =
                warp + i * WARPS < slice_tiles(s.rank) ? row_scale(layer, matrix, added_row(i)) : 0;
        return scales;
    }

    /* Adds the warp's tiles of what the cluster has to the sums of all clusters. */
    template <class Sum>
    __device__ __forceinline__ void add_sums(int matrix, const row_scales &scales, Sum sum)
    {
#pragma unroll
        for (int i = 0; i < TILES; i++)
            if (warp + i * WARPS < slice_tiles(s.rank)) {
                float2 v = sum(i);
                float other = __shfl_up_sync(~0u, v.y, 1), mine = lane % 2 ? other : v.x;
                if (lane % 4 < 2)
                    add_to(sums_of(matrix, 0) + added_row(i), mine * scales.of[i]);
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
        norm<format>(v);
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

    __device__ __forceinline__ void contract(int layer)
    {
        if (s.clusters_tiles)
            hidden_in.wait();
        if constexpr (format::half_width && N_EMBD > 1280)
            contract_rows(layer);
        else
            contract_units(layer);
        __syncwarp();
    }

    /* Of the slice's tiles of rows the warp's, as of the projection: little comes behind the last
     * weights, which large models wait for. */
    __device__ __forceinline__ void contract_rows(int layer)
    {
        constexpr int bytes = format::unit.col_bytes, stage_tiles = BML_CUDA_STAGE_TILES;
        typename format::sums sum[TILES];
        int n = slice_tiles(s.rank);
        this->template for_columns<0>([&](int first, int tiles) {
#pragma unroll 1
            for (int tile = 0; tile < tiles; tile += stage_tiles) {
                const char *at = r.stage_at(tile / stage_tiles) + warp * bytes;
                typename format::columns_x v[stage_tiles / 2];
#pragma unroll
                for (int j = 0; j < stage_tiles / 2; j++)
                    v[j] = format::columns(m.hidden + (first + tile + 2 * j) * HIDDEN, true);
#pragma unroll
                for (int j = 0; j < stage_tiles / 2; j++) {
                    int k = 2 * j; /* what is not there is the first one, times zeros */
                    const char *one = tile + k < tiles ? at + k * n * bytes : at;
                    const char *other = tile + k + 1 < tiles ? at + (k + 1) * n * bytes : at;
                    typename format::column_units units(one, other);
#pragma unroll
                    for (int i = 0; i < TILES; i++)
                        if (warp + i * WARPS < n)
                            format::add_columns(sum[i], units, i * WARPS, v[j], p.levels);
                }
            }
        });
        add_sums(CONTRACT, scales_of(layer, CONTRACT),
                 [&](int i) { return sum[i].result_of_columns(); });
    }

    /* A warp has every WARPSth of the cluster's tiles of hidden units, or of pairs of them, for all
     * of the slice's rows: the least code, and what it makes of units it makes once. */
    __device__ __forceinline__ void contract_units(int layer)
    {
        constexpr int bytes = format::unit.col_bytes, stage_tiles = BML_CUDA_STAGE_TILES;
        constexpr int each = format::pairs ? 2 : 1, pitch = TILE * SLICE;
        typename format::sums sum[SLICE];
        int n = slice_tiles(s.rank), i = threadIdx.x, row = slice_first() + i;
        float scale = i < slice() ? row_scale(layer, CONTRACT, row) : 0;
        this->template for_columns<0>([&](int first, int tiles) {
#pragma unroll 1
            for (int k = warp * each; k < tiles; k += WARPS * each) {
                bool pair = format::pairs && k + 1 < tiles;
                const char *at = r.stage_at(k / stage_tiles) + k % stage_tiles * n * bytes;
                typename format::columns_x v =
                    format::columns(m.hidden + (first + k) * HIDDEN, pair);
                typename format::column_units units(at, pair ? at + n * bytes : at);
#pragma unroll
                for (int j = 0; j < SLICE; j++)
                    if (j < n)
                        format::add_columns(sum[j], units, j, v, p.levels);
            }
        });
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
        if (i < slice()) {
            float v = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                v += m.found[w * pitch + i];
            add_to(sums_of(CONTRACT, 0) + row, v * scale);
        }
    }

    /* ---- the head ---- */

    /* Joins the candidates of threads and blocks. */
    __device__ __forceinline__ void choose(candidate mine)
    {
        mine = this->best_of_block(mine, m.best);
        if (threadIdx.x == 0)
            put(this->record_at(0, blockIdx.x), record_of(mine));
        if (blockIdx.x == 0)
            this->choose_token(0, m.best);
    }

    __device__ __forceinline__ void head()
    {
        typedef unit_format<HEAD> format;
        candidate mine = {-INFINITY, NO_ID};
        typename format::row_x v[CHUNKS];
        norm<format>(v);
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
            choose(mine);
    }
};

#endif

template <bml_weight_format F, bml_weight_format HEAD, int N_EMBD>
static __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ arguments p)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const bml_cuda_plan &plan = p.plan;
    allow_next();
    bml_cuda_share s = bml_cuda_share_of(&plan, blockIdx.x);
    uint64_t *barriers = (uint64_t *)(memory + p.n_stages * p.stage_bytes);
    uint32_t full = shared_address(barriers), empty = full + p.n_stages * 8;
    uint32_t inboxes = empty + p.n_stages * 8;
    ring r = {memory, full, empty, p.n_stages, p.stage_bytes, 0, 0};
    if (threadIdx.x < COMPUTE)
        init_barriers(full, p.n_stages, WARPS, BML_CUDA_INBOXES, COMPUTE);
    __syncwarp();
    arrive_at_cluster();
    if (threadIdx.x < COMPUTE) {
        auto inbox_of = [&](int i) {
            return inbox(inboxes + 8 * i, bml_cuda_inbox_bytes(&plan, &s, i, shares_keys(p)));
        };
        memory_map m;
        m.qkv = (float *)(barriers + 2 * p.n_stages + BML_CUDA_INBOXES + 1);
        m.states = m.qkv + s.n_heads * 3 * plan.head_dim;
        m.few = m.qkv + p.inbox_bytes / 4;
        m.hidden = m.few + p.few;
        m.partial = m.hidden + p.hidden;
        m.found = m.partial + MAX_TILES * PARTIAL;
        m.ends = m.found + FOUND;
        m.moments = (float2 *)(m.ends + 64);
        m.taken = (char *)(m.moments + WARPS);
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
        worker<F, HEAD, N_EMBD> w = {{shape<N_EMBD>(plan), p, plan, s, r, warp, lane},
                                     m,
                                     inbox_of(BML_CUDA_QKV_IN),
                                     inbox_of(BML_CUDA_STATES_IN),
                                     inbox_of(BML_CUDA_HIDDEN_IN),
                                     base,
                                     address_in(base, warp),
                                     m.taken + warp * MAX_EACH * 256,
                                     {},
                                     {},
                                     {},
                                     {}};
        run_pass(w);
    } else {
        await_cluster();
        if (lane_speaks())
            fill<F, HEAD, N_EMBD, abreast_for(N_EMBD)>(r, p, s, keys_of(p, s.rank), 1);
    }
    __syncwarp();
    arrive_at_cluster();
    await_cluster(); /* nobody leaves while another may still send to it */
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
