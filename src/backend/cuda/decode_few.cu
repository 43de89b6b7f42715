/*
 * The pass of two to eight tokens, each of a sequence of its own, as one launch: what decode.cu
 * does for one, whose weights, ring and exchanges these are. What differs:
 *
 *   The second operand of the matrix units has room for eight vectors. One token takes two of them,
 *   so that next to nothing is lost; here each token has one, in the type of the weights.
 *
 *   Warp t of a block has token t, of which it has the block's slice of x. Blocks tell each other
 *   the moments of their slices, norm these, and send what matrix units will want of them to all.
 *   Vectors that stand for no token are anything: nobody looks at their products.
 *
 *   Attention: block t of a cluster has token t, and all of its keys for the cluster's heads.
 */
#include "backend/cuda/decode_block.cuh"

#if __CUDA_ARCH__ >= 900

/* A block's shared memory, as its parts are called below. */
struct few_map {
    float2 *moments;    /* [FEW][CLUSTER], sent: means, and sums of squared deviations */
    uint16_t *normed;   /* [FEW][bml_cuda_few_pitch(n_embd)], sent */
    float *qkv;         /* [3 n_heads head_dim] of the block's token, sent */
    uint16_t *attended; /* [FEW][bml_cuda_few_pitch(n_heads head_dim)], sent */
    uint16_t *hidden;   /* [FEW][p.hidden]: the cluster's units, sent */
    uint16_t *own;      /* [FEW][HIDDEN tiles + 8]: the block's */
    float *partial;     /* [tiles][WARPS][TILE][FEW] */
    float *found;       /* [2048 / head_dim][head_dim + 8], or the head's second partial */
    float *ends;        /* [2][32] largest scores and sums that belong to FOUND */
    candidate *best;    /* [WARPS][FEW] */
    qkv_row *rows;      /* [TILE qkv_tiles] */
};

/* What a warp does. */
template <bml_weight_format F, int N_EMBD> struct few_worker : computing_warp<F, N_EMBD> {
    typedef computing_warp<F, N_EMBD> base;
    using base::attend_heads, base::CHUNKS, base::has, base::head_dim, base::KEY_STAGES, base::lane,
        base::n_embd, base::p, base::plan, base::r, base::s, base::sharing, base::slice,
        base::SLICE, base::slice_first, base::slice_tiles, base::sum_projection, base::TILES,
        base::warp;
    using typename base::format;
    static constexpr int ROUNDS = (SLICE * TILE / 4 + 7) / 8; /* of a warp through a slice */
    static constexpr int AT_ONCE = ROUNDS < 3 ? ROUNDS : 3;   /* as registers allow */

    const few_map &m;
    inbox moments_in, normed_in, qkv_in, attended_in, hidden_in;
    int vector, c; /* of an operand or of sums, as unit.cuh has them: lane / 4, lane % 4 */
    uint32_t own_base, bases[2], peer_base; /* of shared memory: here, in blocks C and C + 4, and in
                                               block WARP */
    float x[ROUNDS]; /* of token WARP and this block's slice: elements LANE, LANE + 32, ... */

    /* How many of the rounds the lane has an element in. */
    __device__ __forceinline__ int rounds() const
    {
        if constexpr (N_EMBD % (8 * 4 * CLUSTER) == 0 && N_EMBD > 0)
            return ROUNDS;
        return (slice() / 4 - vector + 7) / 8;
    }

    __device__ __forceinline__ int normed_pitch() const
    {
        return bml_cuda_few_pitch(n_embd);
    }

    __device__ __forceinline__ int attended_pitch() const
    {
        return bml_cuda_few_pitch(s.n_heads * head_dim);
    }

    __device__ __forceinline__ int own_pitch() const
    {
        return p.tiles * HIDDEN + 8;
    }

    /* The Ith tile's sums of all warps. */
    __device__ __forceinline__ float *partial_at(float *partial, int i) const
    {
        return partial + i * (WARPS * TILE * FEW);
    }

    /* ---- x ---- */

    /* Of a norm, what the lane's elements need, asked for long before. */
    struct norm_vectors {
        float weight[ROUNDS], bias[ROUNDS];
    };

    __device__ __forceinline__ norm_vectors vectors_of(int layer, int which) const
    {
        const float *from =
            p.vectors.data + layer * p.vectors.layer + 2 * which * n_embd + slice_first() + lane;
        norm_vectors v;
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            v.weight[j] = j < rounds() ? __ldg(from + 32 * j) : 0;
            v.bias[j] = j < rounds() ? __ldg(from + n_embd + 32 * j) : 0;
        }
        return v;
    }

    /* Norms the warp's x and sends it to all blocks of the cluster. */
    __device__ __forceinline__ void share(const norm_vectors &v)
    {
        /* Deviations from any element have no more than sqrt(n) deviations to cancel. */
        float pivot = __shfl_sync(~0u, x[0], 0), sum = 0, squares = 0;
#pragma unroll
        for (int j = 0; j < ROUNDS; j++)
            if (j < rounds()) {
                sum += x[j] - pivot;
                squares = fmaf(x[j] - pivot, x[j] - pivot, squares);
            }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            squares += __shfl_xor_sync(~0u, squares, step);
        }
        sum *= 1.0f / slice();
        if (lane < CLUSTER) {
            uint32_t peer = address_in(own_base, lane) - own_base;
            send_to(peer + shared_address(m.moments + warp * CLUSTER + s.rank),
                    make_float2(pivot + sum, squares - sum * sum * slice()),
                    peer + moments_in.barrier);
        }
        __syncwarp();
        moments_in.wait();
        int rank = lane % CLUSTER, n = TILE * slice_tiles(rank);
        float2 moments = m.moments[warp * CLUSTER + rank];
        float mean = moments.x * n;
#pragma unroll
        for (int step = 1; step < CLUSTER; step *= 2)
            mean += __shfl_xor_sync(~0u, mean, step);
        mean *= p.inverse_embd;
        float off = moments.x - mean, variance = fmaf(off * off, n, moments.y);
#pragma unroll
        for (int step = 1; step < CLUSTER; step *= 2)
            variance += __shfl_xor_sync(~0u, variance, step);
        variance *= p.inverse_embd;
        float scale = rsqrtf((variance < 0 ? 0 : variance) + p.epsilon);
        uint32_t at = shared_address(m.normed + warp * normed_pitch() + slice_first() + 4 * vector);
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            bool there = j < rounds();
            float mine = there ? fmaf((x[j] - mean) * scale, v.weight[j], v.bias[j]) : 0;
            float next = __shfl_xor_sync(~0u, mine, 1);
            uint32_t two = c % 2 ? format::both(next, mine) : format::both(mine, next);
            uint32_t other = __shfl_xor_sync(~0u, two, 2);
            float2 four = make_float2(__uint_as_float(c < 2 ? two : other),
                                      __uint_as_float(c < 2 ? other : two));
            if (there)
#pragma unroll
                for (int i = 0; i < CLUSTER / 4; i++)
                    send_to(bases[i] - own_base + at + j * 64, four,
                            bases[i] - own_base + normed_in.barrier);
        }
    }

    __device__ __forceinline__ void embed()
    {
        if (warp < p.n_tokens) {
            int token =
                p.from ? max(p.from[warp], 0) : p.token[warp]; /* -1 fails the pass before */
#pragma unroll
            for (int j = 0; j < ROUNDS; j++)
                if (j < rounds()) {
                    int i = slice_first() / 4 + vector + 8 * j;
                    float4 v = add4(embedding_at(p.wte, p.wte_format, n_embd, token, i),
                                    embedding_at(p.wpe, p.wpe_format, n_embd, p.position[warp], i));
                    x[j] = c < 2 ? c ? v.y : v.x : c == 2 ? v.z : v.w;
                }
            if (s.n_heads)
                share(vectors_of(0, 0));
        }
        __syncwarp();
    }

    /* Where PART cluster's sums of token T are. */
    __device__ __forceinline__ float *part_of(int matrix, uint32_t use, int part, int t) const
    {
        float *all = matrix == PROJECT ? p.out.project : p.out.contract;
        return all + (((use & 1) * PARTS + part) * p.n_tokens + t) * n_embd;
    }

    /* Of four neighbouring lanes' sums, element C. */
    __device__ __forceinline__ float sum_over_four(float4 v) const
    {
        float2 mine = c & 2 ? make_float2(v.z, v.w) : make_float2(v.x, v.y);
        float2 others = c & 2 ? make_float2(v.x, v.y) : make_float2(v.z, v.w);
        mine.x += __shfl_xor_sync(~0u, others.x, 2);
        mine.y += __shfl_xor_sync(~0u, others.y, 2);
        float one = c & 1 ? mine.y : mine.x, other = c & 1 ? mine.x : mine.y;
        return one + __shfl_xor_sync(~0u, other, 1);
    }

    /* Adds what all clusters have of a product to x, of which everybody gets the norm behind it,
     * but for the last. */
    __device__ __forceinline__ void add_product(int layer, int matrix, uint32_t use, bool to_all)
    {
        if (warp >= p.n_tokens)
            return;
        int first = slice_first() + 4 * vector;
        const float *biases =
            p.vectors.data + layer * p.vectors.layer + p.vectors.bias[matrix] + first + c;
        norm_vectors next = vectors_of(layer + (matrix == CONTRACT), matrix == PROJECT);
        int n_parts = matrix == PROJECT ? min(plan.n_head, plan.n_clusters) : plan.n_clusters;
#pragma unroll
        for (int j = 0; j < ROUNDS; j += AT_ONCE) {
            float bias[AT_ONCE];
            float4 sum[AT_ONCE];
            int n = min(rounds() - j, (int)AT_ONCE);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                bias[i] = i < n ? __ldg(biases + 32 * (j + i)) : 0;
            get_sums(sum, part_of(matrix, use, 4 * c, warp) + first + 32 * j, 32, n,
                     p.n_tokens * n_embd, n_parts - 4 * c, tag_of(use));
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (j + i < ROUNDS)
                    x[j + i] += bias[i] + sum_over_four(sum[i]);
        }
        if (to_all)
            share(next);
        __syncwarp();
    }

    /* Waits for all tokens' norms, and gives the warp's chunks of them. */
    __device__ __forceinline__ void take_norm(typename format::row_x (&out)[CHUNKS])
    {
        const uint16_t *from = m.normed + vector * normed_pitch() + warp * CHUNK;
        normed_in.wait();
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (has(i))
                out[i] = chunk_of(from + i * WARPS * CHUNK);
    }

    /* The lane's share of a chunk of its vector. */
    __device__ __forceinline__ typename format::row_x chunk_of(const uint16_t *chunk) const
    {
        typename format::row_x v;
        v.x[0] = *(const uint4 *)(chunk + 8 * c);
        v.x[1] = *(const uint4 *)(chunk + 32 + 8 * c);
        return v;
    }

    /* ---- products ---- */

    /* Of two neighbouring vectors' lanes, each of which has two outputs of two tokens, four of one
     * token: TOKEN_OF_FOUR, from output FIRST_OF_FOUR on. */
    __device__ __forceinline__ float4 four_of(float4 v) const
    {
        bool odd = vector % 2;
        float a = odd ? v.x : v.y, b = odd ? v.z : v.w;
        a = __shfl_xor_sync(~0u, a, 4);
        b = __shfl_xor_sync(~0u, b, 4);
        return odd ? make_float4(a, b, v.y, v.w) : make_float4(v.x, v.z, a, b);
    }

    __device__ __forceinline__ int token_of_four() const
    {
        return 2 * c + vector % 2;
    }

    __device__ __forceinline__ int first_of_four() const
    {
        return vector / 2 * 4;
    }

    /* What the warp has of N tiles of rows goes to PARTIAL. */
    __device__ __forceinline__ void keep_rows(const typename format::row_x (&v)[CHUNKS], int n,
                                              float *partial)
    {
        float *to = partial + (warp * TILE + 2 * vector) * FEW + 2 * c;
        this->template sum_rows<format>(
            v, n, [&](int tile, const typename format::sums &sum, bool is_there) {
                float4 four = sum.of_vectors();
                if (is_there) {
                    *(float2 *)partial_at(to, tile) = make_float2(four.x, four.y);
                    *(float2 *)(partial_at(to, tile) + FEW) = make_float2(four.z, four.w);
                }
            });
    }

    /* Output I of those in PARTIAL: row I / FEW of token I % FEW. */
    __device__ __forceinline__ float output_of(float *partial, int i) const
    {
        const float *at = partial_at(partial, i / (TILE * FEW)) + i % (TILE * FEW);
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            sum += at[w * TILE * FEW];
        return sum;
    }

    /* q, k and v of the cluster's heads: each token's to its block, and k and v cached. */
    __device__ __forceinline__ void project_heads(int layer_number, const layer &l)
    {
        const float *biases = p.vectors.data + layer_number * p.vectors.layer + p.vectors.bias[QKV];
        int n = TILE * s.qkv_tiles * FEW, i = threadIdx.x, t = i % FEW;
        float bias = i < n ? __ldg(biases + m.rows[i / FEW].row) : 0;
        typename format::row_x v[CHUNKS];
        take_norm(v);
        keep_rows(v, s.qkv_tiles, m.partial);
        wait_for_warps();
        if (t < p.n_tokens) {
            uint32_t peer = address_in(own_base, t) - own_base;
            uint32_t to = shared_address(m.qkv + TILE * s.qkv_first) + peer;
            size_t at = ((size_t)p.slot[t] * plan.n_head * p.n_ctx + p.position[t]) * head_dim;
#pragma unroll 1
            for (; i < n; i += COMPUTE) {
                qkv_row row = m.rows[i / FEW];
                if (i >= COMPUTE)
                    bias = __ldg(biases + row.row);
                float v = output_of(m.partial, i) + bias;
                if (row.cached >= 0) {
                    v = to_cache_and_back(v, p.kv);
                    store_cached(row.row < 2 * n_embd ? l.k : l.v, at + row.cached, v, p.kv);
                }
                send_to(to + 4 * (i / FEW), v, qkv_in.barrier + peer);
            }
        }
        __syncwarp();
    }

    /*
     * Many keys: a warp takes sixteen of each two groups of stages. They are the rows of a matrix
     * instruction for their scores; of their values a lane has eight elements of every fourth.
     * Needs heads of 64, so that a stage has room for KEYS of them. K is KV's type.
     */
    template <bml_weight_format K, class Kv>
    __device__ __forceinline__ void attend_keys(softmax_state &own, const float *query, int n_keys,
                                                float scale)
    {
        constexpr int each = 16;
        uint32_t q[8]; /* even vectors: q as far as the type goes; odd ones: what that left */
        float sum = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[8];
            load_cached(x, query + 32 * h + 8 * c);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float a = x[2 * j] * scale, b = x[2 * j + 1] * scale;
                uint32_t most = unit_format<K>::both(a, b);
                float2 there = unit_format<K>::apart(most);
                uint32_t left = unit_format<K>::both(a - there.x, b - there.y);
                q[4 * h + j] = vector % 2 ? left : most;
            }
        }
#pragma unroll 1
        for (int n = n_keys; n > 0; n -= 2 * KEYS) {
            bool two = n > KEYS;
            barrier_wait(r.full_now(), r.round);
            if (two)
                barrier_wait(r.full_at(KEY_STAGES), r.round_at(KEY_STAGES));
            int first = warp * each % KEYS, last = min(n - warp * each, each) - 1;
            if (last >= 0) {
                int place = warp * each / KEYS * KEY_STAGES;
                const Kv *k = (const Kv *)r.stage_at(place) + first * 64;
                const Kv *v =
                    KEY_STAGES > 1 ? (const Kv *)r.stage_at(place + 1) + first * 64 : k + KEYS * 64;
                float d[4] = {}, e[4] = {};
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const Kv *part = k + 32 * h + 8 * c;
                    uint4 a = *(const uint4 *)(part + min(vector, last) * 64);
                    uint4 b = *(const uint4 *)(part + min(vector + 8, last) * 64);
                    unit_format<K>::multiply(d, make_uint4(a.x, b.x, a.y, b.y), q[4 * h],
                                             q[4 * h + 1]);
                    unit_format<K>::multiply(e, make_uint4(a.z, b.z, a.w, b.w), q[4 * h + 2],
                                             q[4 * h + 3]);
                }
                float score[2] = {(d[0] + d[1]) + (e[0] + e[1]), (d[2] + d[3]) + (e[2] + e[3])};
                score[0] = vector <= last ? score[0] : -INFINITY;
                score[1] = vector + 8 <= last ? score[1] : -INFINITY;
                float most = most_of(own.top, most_of(score[0], score[1]));
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    most = most_of(most, __shfl_xor_sync(~0u, most, step));
                float before = exp2_fast(own.top - most);
                float weight[2] = {exp2_fast(score[0] - most), exp2_fast(score[1] - most)};
                own.top = most;
                sum = fmaf(sum, before, weight[0] + weight[1]);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    own.v[j] *= before;
#pragma unroll
                for (int i = 0; i < each / 4; i++) {
                    int of = lane / 8 + 4 * i;
                    float value[8], w = __shfl_sync(~0u, weight[i / 2], of % 8 * 4);
                    load_cached(value, v + min(of, last) * 64 + lane % 8 * 8);
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        own.v[j] = fmaf(w, value[j], own.v[j]);
                }
            }
            this->release((two ? 2 : 1) * KEY_STAGES);
        }
        /* A lane's sum is of two keys of sixteen. join() wants that of the keys whose values the
         * lane has, or any that together are the same. */
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
            sum += __shfl_xor_sync(~0u, sum, step);
        own.sum = lane < 8 ? sum : 0;
        if (warp == WARPS - 1) { /* the token's own key */
            float part[8];
            const float *value = query + 2 * 64 + lane % 8 * 8;
            load_cached(part, query + lane % 8 * 8);
#pragma unroll
            for (int j = 0; j < 8; j++)
                part[j] *= scale;
            float score = this->score_of(part, query + 64 + lane % 8 * 8);
            own.add(lane < 8 ? score : -INFINITY, -INFINITY, value, value);
        }
    }

    /* As attend_heads(). */
    __device__ __forceinline__ float attend_keys(const float *query, int n_keys, float scale,
                                                 float &top, float &sum)
    {
        if constexpr (N_EMBD > 0)
            if (p.kv != BML_F32) {
                softmax_state own;
                if (p.kv == BML_BF16)
                    attend_keys<BML_WEIGHTS_BF16, __nv_bfloat16>(own, query, n_keys, scale);
                else
                    attend_keys<BML_WEIGHTS_F16, __half>(own, query, n_keys, scale);
                return this->join(own, 1, m.found, m.ends, top, sum);
            }
        return attend_heads(query, 1, n_keys, true, scale, m.found, m.ends, top, sum);
    }

    __device__ __forceinline__ void attend(const layer &l)
    {
        int e = threadIdx.x / sharing(), q_of = threadIdx.x % sharing();
        float scale = l.scale * 1.44269504f;
        if (s.rank < p.n_tokens) {
            uint32_t to =
                shared_address(m.attended + s.rank * attended_pitch() + e / 2 * 2) - own_base;
            qkv_in.wait();
#pragma unroll 1
            for (int i = 0; i < s.n_heads; i++) {
                float top, sum;
                float v =
                    attend_keys(m.qkv + i * 3 * head_dim, p.position[s.rank], scale, top, sum);
                v = __fdividef(v, sum);
                float next = __shfl_down_sync(~0u, v, sharing());
                if (e % 2 == 0) {
                    float two = __uint_as_float(format::both(v, next));
#pragma unroll 1
                    for (int rank = q_of; rank < CLUSTER; rank += sharing()) {
                        uint32_t there = address_in(own_base, rank);
                        send_to(there + to + i * head_dim * (int)sizeof(uint16_t), two,
                                there + attended_in.barrier - own_base);
                    }
                }
                if (i + 1 < s.n_heads)
                    wait_for_warps();
            }
        }
        attended_in.wait();
    }

    /* What the cluster adds to x. */
    __device__ __forceinline__ void project(uint32_t use)
    {
        typename format::sums sum[TILES];
        const uint16_t *from = m.attended + vector * attended_pitch();
        sum_projection(sum, [&](int part) { return chunk_of(from + part * CHUNK); });
        put_sums(PROJECT, use, sum);
    }

    /* The warp's tiles of what the cluster adds to x go to where all clusters look. */
    __device__ __forceinline__ void put_sums(int matrix, uint32_t use,
                                             const typename format::sums (&sum)[TILES])
    {
        float *to = part_of(matrix, use, s.cluster, token_of_four()) + slice_first() + TILE * warp +
                    first_of_four();
#pragma unroll
        for (int i = 0; i < TILES; i++)
            if (warp + i * WARPS < slice_tiles(s.rank)) {
                float4 four = four_of(sum[i].of_vectors());
                if (token_of_four() < p.n_tokens)
                    put(to + i * WARPS * TILE, four, tag_of(use));
            }
    }

    /* Hidden units: sent to all blocks of the cluster, to block W by warp W. */
    __device__ __forceinline__ void expand(int layer)
    {
        const float *biases = p.vectors.data + layer * p.vectors.layer + p.vectors.bias[EXPAND] +
                              HIDDEN * s.hidden_first;
        int n = HIDDEN * s.hidden_tiles * FEW, i = threadIdx.x;
        float bias = i < n ? __ldg(biases + i / FEW) : 0;
        typename format::row_x v[CHUNKS];
        take_norm(v);
        keep_rows(v, s.hidden_tiles, m.partial);
        wait_for_warps();
        uint16_t *to = m.own + i % FEW * own_pitch();
#pragma unroll 1
        for (; i < n; i += COMPUTE) {
            if (i >= COMPUTE)
                bias = __ldg(biases + i / FEW);
            float sum = activate(output_of(m.partial, i) + bias, p.activation);
            to[i / FEW] = (uint16_t)format::both(sum, 0);
        }
        wait_for_warps();
        uint32_t peer = peer_base - own_base;
        uint32_t at =
            shared_address(m.hidden + HIDDEN * (s.hidden_first - s.clusters_first)) + peer;
#pragma unroll 1
        for (int k = lane; k < HIDDEN / 8 * s.hidden_tiles * FEW; k += 32) {
            int t = k % FEW, eight = k / FEW * 8;
            if (t < p.n_tokens)
                send_to(at + 2 * (t * p.hidden + eight),
                        *(const float4 *)(m.own + t * own_pitch() + eight),
                        hidden_in.barrier + peer);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void contract(uint32_t use)
    {
        typename format::sums sum[TILES];
        constexpr int bytes = format::unit.col_bytes, stage_tiles = BML_CUDA_STAGE_TILES;
        int n = slice_tiles(s.rank), tiles = s.clusters_tiles;
        const uint16_t *from = m.hidden + vector * p.hidden + 4 * c;
        if (tiles) {
            hidden_in.wait();
            /* A block without hidden units sends none: its inbox might fill again before a warp of
             * its own has seen that it was full. */
            if (!s.hidden_tiles)
                wait_for_warps();
        }
#pragma unroll 1
        for (int stage = 0; stage < tiles; stage += stage_tiles) {
            const char *at = r.stage() + warp * bytes + lane * 16;
            uint2 x[stage_tiles];
#pragma unroll
            for (int k = 0; k < stage_tiles; k++) /* what is not there: zeros, and the first tile */
                x[k] = stage + k < tiles ? *(const uint2 *)(from + (stage + k) * HIDDEN) : uint2{};
            barrier_wait(r.full_now(), r.round);
#pragma unroll
            for (int k = 0; k < stage_tiles; k++) {
                const char *unit = stage + k < tiles ? at + k * n * bytes : at;
#pragma unroll
                for (int i = 0; i < TILES; i++)
                    if (warp + i * WARPS < n)
                        format::multiply(k % 2 ? sum[i].e : sum[i].d,
                                         *(const uint4 *)(unit + i * WARPS * bytes), x[k].x,
                                         x[k].y);
            }
            this->release(1);
        }
        put_sums(CONTRACT, use, sum);
        __syncwarp();
    }

    /* ---- the head ---- */

    /* Where block B's candidate for token T is. */
    __device__ __forceinline__ float *record_at(int t, int b) const
    {
        return p.out.best + ((size_t)t * gridDim.x + b) * RECORD;
    }

    /* Joins the candidates of threads, whose token is threadIdx.x % FEW, and of blocks. */
    __device__ __forceinline__ void choose(candidate mine, uint32_t tag)
    {
#pragma unroll
        for (int step = 16; step >= FEW; step /= 2)
            mine = better(mine, candidate{__shfl_xor_sync(~0u, mine.logit, step),
                                          __shfl_xor_sync(~0u, mine.id, step)});
        if (lane < FEW)
            m.best[warp * FEW + lane] = mine;
        wait_for_warps();
        if (threadIdx.x < p.n_tokens) {
            for (int w = 0; w < WARPS; w++)
                mine = better(mine, m.best[w * FEW + lane]);
            put(record_at(lane, blockIdx.x), record_of(mine), tag);
        }
        __syncwarp();
        if (blockIdx.x > 0 || warp >= p.n_tokens)
            return;
        mine = {-INFINITY, NO_ID};
        for (int b = lane; b < gridDim.x; b += 32)
            mine = better(mine, candidate_of(get(record_at(warp, b), tag)));
        __syncwarp();
        mine = best_of_warp(mine);
        if (lane == 0)
            p.ids[warp] = *p.host_id[warp] = mine.id;
    }

    __device__ __forceinline__ void head()
    {
        candidate mine = {-INFINITY, NO_ID};
        typename format::row_x v[CHUNKS];
        take_norm(v);
        float *partial = m.partial, *other = m.found;
        int t = threadIdx.x % FEW;
#pragma unroll 1
        for (int tile = 0; tile < s.vocab_tiles; tile += p.tiles) {
            int n = min(s.vocab_tiles - tile, p.tiles);
            keep_rows(v, n, partial);
            wait_for_warps();
#pragma unroll 1
            for (int i = threadIdx.x; i < TILE * n * FEW && t < p.n_tokens; i += COMPUTE) {
                float logit = output_of(partial, i);
                int id = TILE * (s.vocab_first + tile) + i / FEW;
                if (id < p.n_valid)
                    mine = better(mine, candidate{logit, isfinite(logit) ? id : -1});
                if (!p.n_valid && id < plan.vocab_size)
                    p.logits[(size_t)t * plan.vocab_size + id] = logit;
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

template <bml_weight_format F, int N_EMBD>
static __global__ void __launch_bounds__(THREADS, 1) decode_few(const __grid_constant__ arguments p)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char memory[];
    const bml_cuda_plan &plan = p.plan;
    bml_cuda_share s = bml_cuda_share_of(&plan, blockIdx.x);
    uint64_t *barriers = (uint64_t *)(memory + p.n_stages * p.stage_bytes);
    uint32_t full = shared_address(barriers), empty = full + p.n_stages * 8;
    uint32_t inboxes = empty + p.n_stages * 8;
    ring r = {memory, full, empty, p.n_stages, p.stage_bytes, 0, 0};
    uint32_t bytes[BML_CUDA_FEW_INBOXES];
#pragma unroll
    for (int i = 0; i < BML_CUDA_FEW_INBOXES; i++)
        bytes[i] = bml_cuda_few_inbox_bytes(&plan, &s, i, p.n_tokens);
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.n_stages; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, WARPS * ARRIVALS);
        }
        for (int i = 0; i < BML_CUDA_FEW_INBOXES; i++)
            barrier_init(inboxes + 8 * i, 1);
        barrier_init_fence();
        for (int i = 0; i < BML_CUDA_FEW_INBOXES; i++)
            barrier_expect(inboxes + 8 * i, bytes[i]);
    }
    few_map m;
    m.moments = (float2 *)(barriers + 2 * p.n_stages + BML_CUDA_FEW_INBOXES + 1);
    m.normed = (uint16_t *)(m.moments + FEW * CLUSTER);
    m.qkv = (float *)(m.normed + FEW * bml_cuda_few_pitch(plan.n_embd));
    m.attended = (uint16_t *)(m.qkv + s.n_heads * 3 * plan.head_dim);
    m.hidden = (uint16_t *)((char *)m.qkv + p.inbox_bytes);
    m.own = m.hidden + FEW * p.hidden;
    m.partial = (float *)(m.own + FEW * (p.tiles * HIDDEN + 8));
    m.found = m.partial + p.tiles * WARPS * TILE * FEW;
    m.ends = m.found + max((int)FOUND, p.tiles * WARPS * TILE * FEW);
    m.best = (candidate *)(m.ends + 64);
    m.rows = (qkv_row *)(m.best + WARPS * FEW);
    meet_cluster();
    if (threadIdx.x < COMPUTE) {
        for (int i = threadIdx.x; i < TILE * s.qkv_tiles; i += COMPUTE)
            m.rows[i] = qkv_row_of(p, s, i);
        wait_for_warps();
        int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0); /* uniform */
        uint32_t base = shared_address(memory);
        few_worker<F, N_EMBD> w = {{shape<N_EMBD>(plan), p, plan, s, r, warp, lane},
                                   m,
                                   {inboxes + 8 * BML_CUDA_X_IN, bytes[BML_CUDA_X_IN], 0},
                                   {inboxes + 8 * BML_CUDA_NORMED_IN, bytes[BML_CUDA_NORMED_IN], 0},
                                   {inboxes + 8 * BML_CUDA_QKV_IN, bytes[BML_CUDA_QKV_IN], 0},
                                   {inboxes + 8 * BML_CUDA_STATES_IN, bytes[BML_CUDA_STATES_IN], 0},
                                   {inboxes + 8 * BML_CUDA_HIDDEN_IN, bytes[BML_CUDA_HIDDEN_IN], 0},
                                   lane / 4,
                                   lane % 4,
                                   base,
                                   {address_in(base, lane % 4), address_in(base, lane % 4 + 4)},
                                   address_in(base, warp),
                                   {}};
        run_pass(w);
    } else if (threadIdx.x == COMPUTE) {
        run keys = {};
        if (s.rank < p.n_tokens)
            keys = {p.slot[s.rank], 0, p.position[s.rank]};
        fill<F, F, N_EMBD, 3, 1>(r, p, s, keys);
    }
    __syncwarp();
    meet_cluster(); /* nobody leaves while another may still send to it */
#endif
}

template <bml_weight_format F> static const void *kernel_of(int n_embd, int head_dim)
{
    if (n_embd > 1280) /* little of the ring would be left */
        return nullptr;
    switch (width_of(n_embd, head_dim)) {
    case 768:
        return (const void *)decode_few<F, 768>;
    case 1024:
        return (const void *)decode_few<F, 1024>;
    case 1280:
        return (const void *)decode_few<F, 1280>;
    }
    return (const void *)decode_few<F, 0>;
}

const void *bml_cuda_decode_few_kernel(bml_weight_format format, int n_embd, int head_dim)
{
    switch (format) {
    case BML_WEIGHTS_BF16:
        return kernel_of<BML_WEIGHTS_BF16>(n_embd, head_dim);
    case BML_WEIGHTS_F16:
        return kernel_of<BML_WEIGHTS_F16>(n_embd, head_dim);
    default:
        return nullptr;
    }
}
