/*
 * The pass of two to eight tokens, each of a sequence of its own, as one launch: what decode.cu
 * does for one, whose weights, ring and exchanges these are. What differs:
 *
 *   The second operand of the matrix units has room for eight vectors. One token takes two of them,
 *   so that next to nothing is lost; here each token has one, in the type of the weights.
 *
 *   Block t of a cluster has token t: its x, whose norm it sends to all as matrix units want it,
 *   and all of its keys for the cluster's heads. Vectors that stand for no token are anything:
 *   nobody looks at their products.
 */
#include "backend/cuda/decode_block.cuh"

#if __CUDA_ARCH__ >= 900

/* A block's shared memory, as its parts are called below. */
struct few_map {
    float2 *moments;    /* [WARPS]: means of x, and sums of squared deviations */
    uint16_t *normed;   /* [FEW][bml_cuda_few_pitch(n_embd)], sent */
    float *qkv;         /* [3 n_heads head_dim] of the block's token, sent */
    uint16_t *attended; /* [FEW][bml_cuda_few_pitch(n_heads head_dim)], sent */
    uint16_t *hidden;   /* [FEW][p.hidden]: the cluster's units, sent */
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
        base::n_embd, base::p, base::plan, base::r, base::s, base::sharing, base::slice_first,
        base::slice_tiles, base::sum_projection, base::sums_of, base::TILES, base::warp,
        base::adding;
    using typename base::format;
    static constexpr int ROUNDS = (base::most / (4 * WARPS) + 31) / 32; /* of a warp through x */

    static constexpr int LOT = 4; /* stages of keys at most */

    const few_map &m;
    inbox normed_in, qkv_in, attended_in, hidden_in;
    int vector, c; /* of an operand or of sums, as unit.cuh has them: lane / 4, lane % 4 */
    uint32_t own_base, bases[CLUSTER / 2]; /* of shared memory: here, and in even lanes of blocks 0
                                              to 3, in odd ones of the others */
    float4 x[ROUNDS];                      /* of token RANK: quads QUAD, QUAD + 32, ... */
    ulonglong2 last[2][2 * ROUNDS];        /* what sums of these were */

    /* A warp's quads of x lie one behind the other. */
    __device__ __forceinline__ int quads() const
    {
        return n_embd / (4 * WARPS);
    }

    __device__ __forceinline__ bool has_quad(int j) const
    {
        return lane + 32 * j < quads();
    }

    __device__ __forceinline__ int quad(int j) const
    {
        return warp * quads() + lane + 32 * j;
    }

    __device__ __forceinline__ int normed_pitch() const
    {
        return bml_cuda_few_pitch(n_embd);
    }

    __device__ __forceinline__ int attended_pitch() const
    {
        return bml_cuda_few_pitch(s.n_heads * head_dim);
    }

    /* The Ith tile's sums of all warps. */
    __device__ __forceinline__ float *partial_at(float *partial, int i) const
    {
        return partial + i * (WARPS * TILE * FEW);
    }

    /* ---- x ---- */

    /* Of a norm, what the lane's elements need, asked for long before. */
    struct norm_vectors {
        float4 weight[ROUNDS], bias[ROUNDS];
    };

    __device__ __forceinline__ norm_vectors vectors_of(int layer, int which) const
    {
        const float4 *from =
            (const float4 *)(p.vectors.data + layer * p.vectors.layer + 2 * which * n_embd);
        norm_vectors v = {};
#pragma unroll
        for (int j = 0; j < ROUNDS; j++)
            if (has_quad(j)) {
                v.weight[j] = __ldg(from + quad(j));
                v.bias[j] = __ldg(from + n_embd / 4 + quad(j));
            }
        return v;
    }

    /* Norms x and sends it to all blocks of the cluster. */
    __device__ __forceinline__ void share(const norm_vectors &v)
    {
        /* Deviations from any element have no more than sqrt(n) deviations to cancel. */
        float pivot = __shfl_sync(~0u, x[0].x, 0), sum = 0, squares = 0;
#pragma unroll
        for (int j = 0; j < ROUNDS; j++)
            if (has_quad(j)) {
                float4 d = add4(x[j], make_float4(-pivot, -pivot, -pivot, -pivot));
                sum += (d.x + d.y) + (d.z + d.w);
                squares += fmaf(d.x, d.x, d.y * d.y) + fmaf(d.z, d.z, d.w * d.w);
            }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            squares += __shfl_xor_sync(~0u, squares, step);
        }
        float off = sum * WARPS * p.inverse_embd;
        if (lane == 0)
            m.moments[warp] = make_float2(pivot + off, fmaf(-sum, off, squares));
        wait_for_warps();
        float n = (float)(4 * quads());
        float2 moments = joined_moments(
            m.moments, [&](int) { return n; }, p.inverse_embd);
        float mean = moments.x, scale = rsqrtf(moments.y + p.epsilon);
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            float4 of = x[j], w = v.weight[j], b = v.bias[j];
            uint32_t two = format::both(fmaf((of.x - mean) * scale, w.x, b.x),
                                        fmaf((of.y - mean) * scale, w.y, b.y));
            uint32_t more = format::both(fmaf((of.z - mean) * scale, w.z, b.z),
                                         fmaf((of.w - mean) * scale, w.w, b.w));
            /* Of eight elements each of two lanes has four, and sends all to half of the blocks. */
            float mine[] = {__uint_as_float(two), __uint_as_float(more)};
            float other[] = {__shfl_xor_sync(~0u, mine[0], 1), __shfl_xor_sync(~0u, mine[1], 1)};
            float4 eight = lane % 2 ? make_float4(other[0], other[1], mine[0], mine[1])
                                    : make_float4(mine[0], mine[1], other[0], other[1]);
            uint32_t at = shared_address(m.normed + s.rank * normed_pitch() + quad(j) / 2 * 8);
            if (has_quad(j))
#pragma unroll
                for (int i = 0; i < CLUSTER / 2; i++)
                    send_to(bases[i] - own_base + at, eight,
                            bases[i] - own_base + normed_in.barrier);
        }
    }

    __device__ __forceinline__ void embed()
    {
        int t = s.rank;
        norm_vectors first = vectors_of(0, 0);
        if (t < p.n_tokens)
#pragma unroll
            for (int j = 0; j < ROUNDS; j++)
                if (has_quad(j))
                    x[j] = embedding_at(p.wpe, p.wpe_format, n_embd, p.position[t], quad(j));
        await_previous();
        if (t < p.n_tokens) {
            int token = p.from ? max(p.from[t], 0) : p.token[t]; /* -1 fails the pass before */
#pragma unroll
            for (int j = 0; j < ROUNDS; j++)
                if (has_quad(j))
                    x[j] = add4(x[j], embedding_at(p.wte, p.wte_format, n_embd, token, quad(j)));
        }
        __syncwarp();
        await_cluster();
        if (t < p.n_tokens && s.n_heads)
            share(first);
        __syncwarp();
    }

    /* Adds what all clusters have of a product to x, of which everybody gets the norm behind it,
     * but for the last. */
    __device__ __forceinline__ void add_product(int layer, int matrix, bool to_all)
    {
        if (s.rank >= p.n_tokens)
            return;
        const float4 *biases =
            (const float4 *)(p.vectors.data + layer * p.vectors.layer + p.vectors.bias[matrix]);
        norm_vectors next = vectors_of(layer + (matrix == CONTRACT), matrix == PROJECT);
        float4 bias[ROUNDS] = {};
        float2 got[2 * ROUNDS] = {};
#pragma unroll
        for (int j = 0; j < ROUNDS; j++)
            if (has_quad(j))
                bias[j] = __ldg(biases + quad(j));
        this->await_first_sum(matrix, s.rank, last[matrix == CONTRACT][0].x);
        get_sums(
            got, last[matrix == CONTRACT], sums_of(matrix, s.rank),
            [&](int i) { return has_quad(i / 2) ? 4 * quad(i / 2) + i % 2 * 2 : -1; },
            adding(matrix));
#pragma unroll
        for (int j = 0; j < ROUNDS; j++) {
            float2 a = got[2 * j], b = got[2 * j + 1];
            x[j] = add4(add4(x[j], bias[j]), make_float4(a.x, a.y, b.x, b.y));
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

    /* Whether the matrix units see keys. */
    __device__ static __forceinline__ bool multiplies_keys(const arguments &p)
    {
        return N_EMBD > 0 && p.kv != BML_F32;
    }

    /* How many stages of keys a lot has, that is filled and waited for as one: the ring has room
     * for two more. */
    __device__ static __forceinline__ int lot_of(const arguments &p)
    {
        return multiplies_keys(p) ? max(1, min((int)LOT, p.n_stages / KEY_STAGES - 2)) : 1;
    }

    /*
     * N of the warp's sixteens of a lot of HERE keys, which are every WARPSth, from the Ith on.
     * They are the rows of matrix instructions for their scores; of their values a lane has eight
     * elements of every fourth. K is KV's type.
     *
     * Of the halves of keys odd rows come in the other order, so that lanes read from all banks.
     * That is why two pairs of Q's vectors have one half each, as far as the type goes and what
     * that left: to each row's half one pair belongs.
     */
    template <int N, bml_weight_format K, class Kv>
    __device__ __forceinline__ void add_sixteens(softmax_state &own, const uint32_t (&q)[4],
                                                 int here, int i) const
    {
        constexpr int of_stage = keys_for(N_EMBD) / SIXTEEN;
        int last[N];
        const Kv *v[N];
        float score[N][2], most = own.top;
        bool in_order = (vector + c) % 2 == 0;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int at = warp + (i + j) * WARPS, stage = at / of_stage, in = at % of_stage * SIXTEEN;
            const Kv *k = (const Kv *)r.stage_at(stage * KEY_STAGES) + in * 64;
            v[j] = KEY_STAGES > 1 ? (const Kv *)r.stage_at(stage * KEY_STAGES + 1) + in * 64
                                  : k + keys_for(N_EMBD) * 64;
            last[j] = min(here - at * SIXTEEN, (int)SIXTEEN) - 1;
            const Kv *row = k + min(vector, last[j]) * 64,
                     *other = k + min(vector + 8, last[j]) * 64;
            float d[2][4] = {};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int part = (vector + h) % 2 * 32 + 8 * c;
                uint4 a = *(const uint4 *)(row + part), b = *(const uint4 *)(other + part);
                unit_format<K>::multiply(d[h], make_uint4(a.x, b.x, a.y, b.y), q[0], q[1]);
                unit_format<K>::multiply(d[h], make_uint4(a.z, b.z, a.w, b.w), q[2], q[3]);
            }
#pragma unroll
            for (int l = 0; l < 2; l++) {
                float of_half =
                    in_order ? d[0][2 * l] + d[0][2 * l + 1] : d[1][2 * l] + d[1][2 * l + 1];
                of_half += __shfl_xor_sync(~0u, of_half, 1);
                score[j][l] = vector + 8 * l <= last[j] ? of_half : -INFINITY;
                most = most_of(most, score[j][l]);
            }
        }
        most = largest_of_warp(most);
        float before = exp2_fast(own.top - most);
        own.top = most;
        own.sum *= before;
#pragma unroll
        for (int l = 0; l < 8; l++)
            own.v[l] *= before;
#pragma unroll
        for (int j = 0; j < N; j++) {
            float weight[2] = {exp2_fast(score[j][0] - most), exp2_fast(score[j][1] - most)};
            own.sum += weight[0] + weight[1];
#pragma unroll
            for (int l = 0; l < SIXTEEN / 4; l++) {
                int of = lane / 8 + 4 * l;
                float value[8], w = __shfl_sync(~0u, weight[l / 2], of % 8 * 4);
                load_cached(value, v[j] + min(of, last[j]) * 64 + lane % 8 * 8);
#pragma unroll
                for (int e = 0; e < 8; e++)
                    own.v[e] = fmaf(w, value[e], own.v[e]);
            }
        }
    }

    /* Many keys, for heads of 64, in lots of stages. */
    template <bml_weight_format K, class Kv>
    __device__ __forceinline__ void attend_keys(softmax_state &own, const float *query, int n_keys,
                                                float scale)
    {
        uint32_t q[4];
        float x[8];
        constexpr int keys = keys_for(N_EMBD);
        int lot_keys = lot_of(p) * keys;
        load_cached(x, query + vector / 2 % 2 * 32 + 8 * c);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float a = x[2 * j] * scale, b = x[2 * j + 1] * scale;
            uint32_t most = unit_format<K>::both(a, b);
            float2 there = unit_format<K>::apart(most);
            q[j] = vector % 2 ? unit_format<K>::both(a - there.x, b - there.y) : most;
        }
#pragma unroll 1
        for (int n = n_keys; n > 0; n -= lot_keys) {
            int here = min(n, lot_keys), stages = (here + keys - 1) / keys;
            int sixteens = (here + SIXTEEN - 1) / SIXTEEN;
            int mine = (sixteens - warp + WARPS - 1) / WARPS; /* 0, too, if there are fewer */
            barrier_wait(r.full_now(), r.round);
#pragma unroll 1
            for (int i = 0; i < mine;)
                if (i + 2 <= mine) {
                    add_sixteens<2, K, Kv>(own, q, here, i);
                    i += 2;
                } else {
                    add_sixteens<1, K, Kv>(own, q, here, i++);
                }
            this->release(stages * KEY_STAGES);
        }
#pragma unroll
        for (int step = 4; step < 32; step *= 2) /* a lane's is of two keys of each sixteen */
            own.sum += __shfl_xor_sync(~0u, own.sum, step);
    }

    /* Of what four lanes have of the same eight elements, of other keys each, two elements. */
    __device__ __forceinline__ float2 pair_of(const float (&v)[8]) const
    {
        float four[4], two[2];
#pragma unroll
        for (int i = 0; i < 4; i++)
            four[i] =
                (lane & 8 ? v[4 + i] : v[i]) + __shfl_xor_sync(~0u, lane & 8 ? v[i] : v[4 + i], 8);
#pragma unroll
        for (int i = 0; i < 2; i++)
            two[i] = (lane & 16 ? four[2 + i] : four[i]) +
                     __shfl_xor_sync(~0u, lane & 16 ? four[i] : four[2 + i], 16);
        return make_float2(two[0], two[1]);
    }

    /* Adds the token's own key. Of v the lane has the two elements from AT on. */
    __device__ __forceinline__ void add_own(float &top, float &sum, float2 &v, const float *query,
                                            float scale, int at)
    {
        float part[8];
        load_cached(part, query + lane % 8 * 8);
#pragma unroll
        for (int j = 0; j < 8; j++)
            part[j] *= scale;
        float score = this->score_of(part, query + 64 + lane % 8 * 8), most = most_of(top, score);
        float before = exp2_fast(top - most), weight = exp2_fast(score - most);
        float2 value = *(const float2 *)(query + 2 * 64 + at);
        top = most;
        sum = fmaf(sum, before, weight);
        v = make_float2(fmaf(v.x, before, weight * value.x), fmaf(v.y, before, weight * value.y));
    }

    /* Joins what the warps have. */
    __device__ __forceinline__ float join_warps(softmax_state &own, const float *query, float scale,
                                                float &top, float &sum)
    {
        int pitch = bml_cuda_state_pitch(64), e = threadIdx.x / 4, of = threadIdx.x % 4;
        int at = lane % 8 * 8 + lane / 8 % 2 * 4 + lane / 16 * 2;
        float2 v = pair_of(own.v);
        if (warp == WARPS - 1)
            add_own(own.top, own.sum, v, query, scale, at);
        *(float2 *)(m.found + warp * pitch + at) = v;
        if (lane == 0) {
            m.ends[warp] = own.top;
            m.ends[32 + warp] = own.sum;
        }
        wait_for_warps();
        return joined<WARPS / 4>(4, m.found + of * pitch + e, m.ends + of, m.ends + 32 + of, 4,
                                 pitch, 4, top, sum);
    }

    /* As attend_heads(). */
    __device__ __forceinline__ float attend_keys(const float *query, int n_keys, float scale,
                                                 float &top, float &sum)
    {
        if constexpr (N_EMBD > 0)
            if (multiplies_keys(p)) {
                softmax_state own;
                if (p.kv == BML_BF16)
                    attend_keys<BML_WEIGHTS_BF16, __nv_bfloat16>(own, query, n_keys, scale);
                else
                    attend_keys<BML_WEIGHTS_F16, __half>(own, query, n_keys, scale);
                return join_warps(own, query, scale, top, sum);
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
    __device__ __forceinline__ void project(int)
    {
        typename format::sums sum[TILES];
        const uint16_t *from = m.attended + vector * attended_pitch();
        sum_projection(sum, [&](int part) { return chunk_of(from + part * CHUNK); });
        add_sums(PROJECT, sum);
    }

    /* Adds the warp's tiles of what the cluster has to the sums of all clusters. Of two lanes with
     * two outputs of two tokens each the first one gets the even output of all four, so that
     * neighbouring lanes add to neighbouring words. */
    __device__ __forceinline__ void add_sums(int matrix, const typename format::sums (&sum)[TILES])
    {
        bool odd = c % 2;
        int t = c / 2 * 4;
        uint64_t *to = sums_of(matrix, t) + slice_first() + TILE * warp + 2 * vector + odd;
#pragma unroll
        for (int i = 0; i < TILES; i++)
            if (warp + i * WARPS < slice_tiles(s.rank)) {
                float4 v = sum[i].of_vectors();
                float a = __shfl_xor_sync(~0u, odd ? v.x : v.z, 1);
                float b = __shfl_xor_sync(~0u, odd ? v.y : v.w, 1);
                float of_tokens[4] = {odd ? a : v.x, odd ? b : v.y, odd ? v.z : a, odd ? v.w : b};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (t + j < p.n_tokens)
                        add_to(to + j * n_embd + i * WARPS * TILE, of_tokens[j]);
            }
    }

    /* Hidden units: sent to all blocks of the cluster. */
    __device__ __forceinline__ void expand(int layer)
    {
        const float *biases = p.vectors.data + layer * p.vectors.layer + p.vectors.bias[EXPAND] +
                              HIDDEN * s.hidden_first;
        int n = HIDDEN * s.hidden_tiles * FEW, i = threadIdx.x, t = i % FEW, unit = lane / FEW;
        float bias = i < n ? __ldg(biases + i / FEW) : 0;
        uint32_t at =
            shared_address(m.hidden + t * p.hidden + HIDDEN * (s.hidden_first - s.clusters_first)) -
            own_base;
        typename format::row_x v[CHUNKS];
        take_norm(v);
        keep_rows(v, s.hidden_tiles, m.partial);
        wait_for_warps();
#pragma unroll 1
        for (; i < n; i += COMPUTE) { /* all lanes or none */
            if (i >= COMPUTE)
                bias = __ldg(biases + i / FEW);
            /* Four units are in four lanes, each of which sends all to two of the blocks. */
            float mine = activate(output_of(m.partial, i) + bias, p.activation);
            float next = __shfl_xor_sync(~0u, mine, FEW);
            uint32_t two = unit % 2 ? format::both(next, mine) : format::both(mine, next);
            uint32_t other = __shfl_xor_sync(~0u, two, 2 * FEW);
            float2 four = make_float2(__uint_as_float(unit < 2 ? two : other),
                                      __uint_as_float(unit < 2 ? other : two));
            if (t < p.n_tokens)
#pragma unroll
                for (int rank = 0; rank < CLUSTER; rank += 4) {
                    uint32_t peer = address_in(own_base, rank + unit);
                    send_to(peer + at + i / (4 * FEW) * 8, four,
                            peer + hidden_in.barrier - own_base);
                }
        }
        __syncwarp();
    }

    __device__ __forceinline__ void contract(int)
    {
        typename format::sums sum[TILES];
        constexpr int bytes = format::unit.col_bytes, stage_tiles = BML_CUDA_STAGE_TILES;
        int n = slice_tiles(s.rank);
        const uint16_t *from = m.hidden + vector * p.hidden + 4 * c;
        if (s.clusters_tiles) {
            hidden_in.wait();
            /* A block without hidden units sends none: its inbox might fill again before a warp of
             * its own has seen that it was full. */
            if (!s.hidden_tiles)
                wait_for_warps();
        }
        this->template for_columns<1>([&](int first, int tiles) {
            const char *at = r.stage() + warp * bytes + lane * 16;
            uint2 x[stage_tiles];
#pragma unroll
            for (int k = 0; k < stage_tiles; k++) /* what is not there: zeros, and the first tile */
                x[k] = k < tiles ? *(const uint2 *)(from + (first + k) * HIDDEN) : uint2{};
#pragma unroll
            for (int k = 0; k < stage_tiles; k++) {
                const char *unit = k < tiles ? at + k * n * bytes : at;
#pragma unroll
                for (int i = 0; i < TILES; i++)
                    if (warp + i * WARPS < n)
                        format::multiply(k % 2 ? sum[i].e : sum[i].d,
                                         *(const uint4 *)(unit + i * WARPS * bytes), x[k].x,
                                         x[k].y);
            }
        });
        add_sums(CONTRACT, sum);
        __syncwarp();
    }

    /* ---- the head ---- */

    /* Joins the candidates of threads, whose token is threadIdx.x % FEW, and of blocks: the first
     * few blocks choose a token each. */
    __device__ __forceinline__ void choose(candidate mine)
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
            put(this->record_at(lane, blockIdx.x), record_of(mine));
        }
        __syncwarp();
        if (blockIdx.x < p.n_tokens)
            this->choose_token(blockIdx.x, m.best);
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
            choose(mine);
    }
};

#endif

template <bml_weight_format F, int N_EMBD>
static __global__ void __launch_bounds__(THREADS, 1) decode_few(const __grid_constant__ arguments p)
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
        init_barriers(full, p.n_stages, WARPS, BML_CUDA_FEW_INBOXES, COMPUTE);
    __syncwarp();
    few_map m;
    m.moments = (float2 *)(barriers + 2 * p.n_stages + BML_CUDA_FEW_INBOXES);
    m.normed = (uint16_t *)(m.moments + WARPS);
    m.qkv = (float *)(m.normed + FEW * bml_cuda_few_pitch(plan.n_embd));
    m.attended = (uint16_t *)(m.qkv + s.n_heads * 3 * plan.head_dim);
    m.hidden = (uint16_t *)((char *)m.qkv + p.inbox_bytes);
    m.partial = (float *)(m.hidden + FEW * p.hidden);
    m.found = m.partial + p.tiles * WARPS * TILE * FEW;
    m.ends = m.found + max((int)FOUND, p.tiles * WARPS * TILE * FEW);
    m.best = (candidate *)(m.ends + 64);
    m.rows = (qkv_row *)(m.best + WARPS * FEW);
    arrive_at_cluster();
    if (threadIdx.x < COMPUTE) {
        for (int i = threadIdx.x; i < TILE * s.qkv_tiles; i += COMPUTE)
            m.rows[i] = qkv_row_of(p, s, i);
        wait_for_warps();
        int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0); /* uniform */
        uint32_t base = shared_address(memory);
        auto inbox_of = [&](int i) {
            return inbox(inboxes + 8 * i, bml_cuda_few_inbox_bytes(&plan, &s, i, p.n_tokens));
        };
        few_worker<F, N_EMBD> w = {{shape<N_EMBD>(plan), p, plan, s, r, warp, lane},
                                   m,
                                   inbox_of(BML_CUDA_NORMED_IN),
                                   inbox_of(BML_CUDA_QKV_IN),
                                   inbox_of(BML_CUDA_STATES_IN),
                                   inbox_of(BML_CUDA_HIDDEN_IN),
                                   lane / 4,
                                   lane % 4,
                                   base,
                                   {},
                                   {},
                                   {}};
        for (int i = 0; i < CLUSTER / 2; i++)
            w.bases[i] = address_in(base, lane % 2 * (CLUSTER / 2) + i);
        run_pass(w);
    } else {
        run keys = {};
        if (s.rank < p.n_tokens)
            keys = {p.slot[s.rank], 0, p.position[s.rank]};
        await_cluster();
        if (lane_speaks())
            fill<F, F, N_EMBD, 1>(r, p, s, keys, few_worker<F, N_EMBD>::lot_of(p));
    }
    __syncwarp();
    arrive_at_cluster();
    await_cluster(); /* nobody leaves while another may still send to it */
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
