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
#include "backend/cuda/decode.cuh"

#include "backend/cuda/kernels/ring.cuh"

#if __CUDA_ARCH__ >= 900

/* ---- shared memory --------------------------------------------------------------------------- */

struct shared {
    activations a;
    float *heads;       /* what attention gave, before it is joined */
    float *partial;     /* [2][WARPS][TILE] */
    float *states;      /* [WARPS][STATE] */
    float *query;       /* [3][MAX_DIM]: q, and k and v of this token */
    struct range *rows; /* of this block, of every product */
    struct part *parts; /* [SPLITS units][SPLITS warps] */
    uint32_t *warps;    /* [SPLITS units]: those that have the first unit, a bit each */
    uint16_t *finish;   /* [N_MATRICES][ROWS]: those whose sums make a row, a bit each; 0: too many
                           units for one go */
    float2 *norms;      /* [2 * WARPS]: mean and squares of 64 elements each */
};

__device__ static void wait_for_warps(void)
{
    asm volatile("bar.sync 1, %0;" ::"r"((int)COMPUTE) : "memory");
}

/* ---- the share of a block -------------------------------------------------------------------- */

struct range {
    int begin, n;

    range() = default;
    __device__ explicit range(unsigned n_rows)
        : begin((int)(n_rows * blockIdx.x / gridDim.x)),
          n((int)(n_rows * (blockIdx.x + 1) / gridDim.x) - begin)
    {
    }
};

/* What a warp has of some units of work: part PART of N of one of them. */
struct part {
    uint8_t unit, part, n, unused;
};

/* The run of keys that this block attends to; head < 0 for none. */
struct run {
    int head, split, begin, end;
};

__device__ static run run_of_block(const arguments &p)
{
    int n = p.n_head * p.n_splits;
    int unit = (int)((blockIdx.x * n + gridDim.x - 1) / gridDim.x);
    if (unit >= n || unit * gridDim.x / n != blockIdx.x)
        return {-1, 0, 0, 0};
    int split = unit % p.n_splits, begin = min(split * p.keys_of_split, p.position);
    return {unit / p.n_splits, split, begin, min(begin + p.keys_of_split, p.position)};
}

/* ---- the warp that fills the ring ------------------------------------------------------------ */

/*
 * The ring as the warp that fills it sees it. No more than a few stages are on their way at once,
 * what keeps the memory busy: more would only queue up, and what blocks tell each other would wait
 * in that queue.
 */
struct filler {
    ring next, oldest; /* that is on its way */
    int on_their_way, most;

    /* Waits until the next stage may be filled. */
    __device__ void make_room()
    {
        if (on_their_way == most) {
            barrier_wait(oldest.full_at(oldest.at), oldest.round);
            oldest.next();
        } else {
            on_their_way++;
        }
        barrier_wait(next.empty_at(next.at), next.round ^ 1);
    }
};

template <bml_weight_format F>
__device__ static void fill_rows(filler &f, const char *w, range mine, int n_in, slicing cut)
{
    typedef dot_format<F> format;
    int lane = threadIdx.x % 32, n_blocks = n_in / format::block_inputs;
    size_t row_bytes = bml_cuda_row_bytes(F, (size_t)n_in);
    for (int row = 0; row < mine.n; row += TILE)
        for (int b = 0; b < n_blocks; b += cut.blocks) {
            size_t from = format::packed ? bml_cuda_scales_at(F, b) : (size_t)format::at(b);
            size_t to = b + cut.blocks >= n_blocks ? row_bytes
                        : format::packed           ? bml_cuda_scales_at(F, b + cut.blocks)
                                                   : (size_t)format::at(b + cut.blocks);
            uint32_t bytes = (uint32_t)(to - from);
            int n = min(TILE, mine.n - row);
            f.make_room();
            ring &r = f.next;
            if (lane == 0)
                barrier_expect(r.full_at(r.at), bytes * n);
            __syncwarp();
            if (lane < n)
                bulk_copy(r.stage() + lane * cut.pitch,
                          w + (mine.begin + row + lane) * row_bytes + from, bytes, r.full_at(r.at),
                          true);
            r.next();
        }
}

/* A stage of keys, then one of the same tokens' values. */
__device__ static void fill_keys(filler &f, const arguments &p, const layer &l, run keys)
{
    size_t key_bytes = p.head_dim * (p.kv == BML_F32 ? 4 : 2);
    size_t head = ((size_t)p.slot * p.n_head + keys.head) * p.n_ctx;
    for (int key = keys.begin; key < keys.end; key += p.keys_of_stage)
        for (int values = 0; values < 2; values++) {
            uint32_t bytes = (uint32_t)(min(p.keys_of_stage, keys.end - key) * key_bytes);
            f.make_room();
            ring &r = f.next;
            if (threadIdx.x % 32 == 0) {
                barrier_expect(r.full_at(r.at), bytes);
                bulk_copy(r.stage(), (values ? l.v : l.k) + (head + key) * key_bytes, bytes,
                          r.full_at(r.at), false);
            }
            __syncwarp();
            r.next();
        }
}

template <bml_weight_format F, bml_weight_format HEAD>
__device__ static void fill(ring &r, const arguments &p, const shared &s)
{
    run keys = run_of_block(p);
    filler f = {r, r, 0, p.on_their_way};
    int c = p.n_embd;
    for (int i = 0; i < p.n_layer; i++) {
        const layer &l = p.layers[i];
        for (int m = 0; m < N_MATRICES; m++) {
            if (m == PROJECT && keys.head >= 0)
                fill_keys(f, p, l, keys);
            fill_rows<F>(f, l.rows[m], s.rows[m], m == CONTRACT ? p.n_inner : c, p.layers_slicing);
        }
    }
    if (p.want_row)
        fill_rows<HEAD>(f, p.head, s.rows[N_MATRICES], c, p.head_slicing);
}

/* ---- products -------------------------------------------------------------------------------- */

/* What a thread needs of a layer's vectors is asked for a phase ahead: the bias and the scale of
 * the row that it finishes, and four elements of a norm. */
struct row_constants {
    float bias, scale;

    template <bml_weight_format F>
    __device__ void load(const arguments &p, int layer, int m, range mine)
    {
        const float *at = p.vectors.data + layer * p.vectors.layer + mine.begin + threadIdx.x;
        if ((int)threadIdx.x < mine.n) {
            bias = at[p.vectors.bias[m]];
            scale = F == BML_WEIGHTS_Q4 ? at[p.vectors.row_scale[m]] : 1;
        }
    }

    __device__ float finish(float sum) const
    {
        return fmaf(sum, scale, bias);
    }
};

struct norm_constants {
    float4 weight, bias;

    __device__ void load(const arguments &p, int layer, int which)
    {
        const float *at = p.vectors.data + layer * p.vectors.layer + 2 * which * p.n_embd;
        if (4 * (int)threadIdx.x < p.n_embd) {
            weight = ((const float4 *)at)[threadIdx.x];
            bias = ((const float4 *)(at + p.n_embd))[threadIdx.x];
        }
    }
};

/* The warps, a bit each, whose sums over UNITS units from BEGUN on make a row. */
__device__ static uint32_t warps_of_row(const shared &s, const product &m, int row, int begun,
                                        int units)
{
    uint32_t warps = 0;
    int from = max(row / TILE * m.n_slices - begun, 0);
    int to = min((row / TILE + 1) * m.n_slices - begun, units);
    for (int u = from; u < to; u++)
        warps |= s.warps[units] << u;
    return warps;
}

/*
 * This block's rows of a product with the activations in s.a. FINISH(row, sum) is called once for
 * every row by one thread: for row i of the block by thread i modulo ROWS. KNOWN are the warps that
 * make each row, if that is known.
 *
 * A stage, a tile's slice, is a unit of work; up to p.units of them are shared out, each to as many
 * warps as there are for it, and given back together.
 */
template <bml_weight_format F, class Finish>
__device__ static void multiply(ring &r, const arguments &p, const shared &s, const product &m,
                                range mine, int pitch, const uint16_t *known, Finish finish)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parity = 0;
    for (int first = 0; first < mine.n; first += m.rows_at_once) {
        int n = min(m.rows_at_once, mine.n - first), n_stages = (n + TILE - 1) / TILE * m.n_slices;
        int row = (threadIdx.x - first) % ROWS; /* of these, that this thread finishes */
        bool finishes = threadIdx.x < ROWS && row < n;
        float total = 0;
        for (int begun = 0; begun < n_stages; begun += p.units, parity ^= 1) {
            int units = min(p.units, n_stages - begun);
            float *partial = s.partial + parity * WARPS * TILE;
            part mine = s.parts[units * SPLITS + warp];
            int slice = begun + mine.unit, at = r.at + mine.unit, wraps = at >= r.n_stages;
            while (slice >= m.n_slices)
                slice -= m.n_slices;
            slice *= m.slice;
            at -= wraps ? r.n_stages : 0;
            const char *weights = r.stages + at * r.stage_bytes + lane / 4 * pitch;
            int n_blocks = min(m.slice, m.n_blocks - slice);
            typename dot_format<F>::sums sums;
            barrier_wait(r.full_at(at), r.round ^ wraps);
#pragma unroll 4
            for (int b = mine.part; b < n_blocks; b += mine.n)
                dot_format<F>::add(sums, weights, b, slice, s.a, p.levels);
            dot_format<F>::put(sums, partial + warp * TILE);
            wait_for_warps();
            if (threadIdx.x >= COMPUTE - units) { /* all have read them */
                int done = r.at + COMPUTE - 1 - threadIdx.x;
                barrier_arrive(r.empty_at(done < r.n_stages ? done : done - r.n_stages));
            }
            r.skip(units);
            if (finishes) { /* the slices of its tile that are among the units */
                uint32_t warps = known ? known[row] : 0;
                if (!warps)
                    warps = warps_of_row(s, m, row, begun, units);
#pragma unroll
                for (int w = 0; w < WARPS; w++)
                    total += warps >> w & 1 ? partial[w * TILE + row % TILE] : 0;
            }
        }
        if (finishes)
            finish(mine.begin + first + row, total);
    }
}

/* ---- activations ----------------------------------------------------------------------------- */

/* Mean and summed squared deviations of N numbers; join() is Chan's: nothing cancels. */
struct moments {
    float mean, squares;

    __device__ void join(float other_mean, float other_squares, float n)
    {
        float apart = other_mean - mean;
        squares += other_squares + apart * apart * (n / 2);
        mean += apart / 2;
    }
};

/* Keeps the norm of x for a product; thread i has elements 4i .. 4i + 3 in V. */
template <bml_weight_format F>
__device__ static void keep_norm(const arguments &p, const shared &s, float4 v,
                                 const norm_constants &k)
{
    /* Half a warp has 64 elements, all of them or none. */
    int i = threadIdx.x, n_halves = p.n_embd / 64;
    moments own;
    own.mean = 0.25f * (v.x + v.y + v.z + v.w);
    float4 d = make_float4(v.x - own.mean, v.y - own.mean, v.z - own.mean, v.w - own.mean);
    own.squares = d.x * d.x + d.y * d.y + d.z * d.z + d.w * d.w;
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
        own.join(__shfl_xor_sync(~0u, own.mean, step), __shfl_xor_sync(~0u, own.squares, step),
                 4.0f * step);
    if (i % 16 == 0)
        s.norms[i / 16] = make_float2(own.mean, own.squares);
    wait_for_warps();
    float mean = 0, squares = 0;
#pragma unroll 4
    for (int h = 0; h < n_halves; h++)
        mean += s.norms[h].x;
    mean *= p.inverse_halves;
#pragma unroll 4
    for (int h = 0; h < n_halves; h++) {
        float apart = s.norms[h].x - mean;
        squares += s.norms[h].y + 64 * apart * apart;
    }
    float scale = rsqrtf(squares * p.inverse_embd + p.epsilon);
    if (4 * i < p.n_embd)
        dot_format<F>::keep(s.a, i,
                            make_float4(fmaf((v.x - mean) * scale, k.weight.x, k.bias.x),
                                        fmaf((v.y - mean) * scale, k.weight.y, k.bias.y),
                                        fmaf((v.z - mean) * scale, k.weight.z, k.bias.z),
                                        fmaf((v.w - mean) * scale, k.weight.w, k.bias.w)));
    wait_for_warps();
}

/* Elements 4i .. 4i + 3 of a row of an embedding. */
__device__ static float4 embedding_at(const char *rows, bml_weight_format format, int n_embd,
                                      int row, int i)
{
    const char *at = rows + row * bml_cuda_row_bytes(format, (size_t)n_embd);
    if (format == BML_WEIGHTS_F32)
        return ((const float4 *)at)[i];
    if (format == BML_WEIGHTS_Q8)
        return make_float4(weight_at(rows, format, n_embd, row, 4 * i),
                           weight_at(rows, format, n_embd, row, 4 * i + 1),
                           weight_at(rows, format, n_embd, row, 4 * i + 2),
                           weight_at(rows, format, n_embd, row, 4 * i + 3));
    uint2 v = ((const uint2 *)at)[i];
    if (format == BML_WEIGHTS_BF16)
        return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                           __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
    float2 low = __half22float2(*(const __half2 *)&v.x),
           high = __half22float2(*(const __half2 *)&v.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

/* ---- attention ------------------------------------------------------------------------------- */

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

/* q.k, of which each of LANES lanes has eight products. */
__device__ static float score_of(const float q[8], const float k[8], int lanes)
{
    float score = 0;
#pragma unroll
    for (int j = 0; j < 8; j++)
        score = fmaf(q[j], k[j], score);
    for (int step = lanes / 2; step; step /= 2)
        score += __shfl_xor_sync(~0u, score, step);
    return score;
}

/* One run of keys of one head: waits for the token's q, k and v, stores k and v, and hands out the
 * run's state. Eight elements of a key to a lane. */
__device__ static void attend(ring &r, const arguments &p, const shared &s, const layer &l,
                              run keys, uint32_t tag)
{
    int d = p.head_dim, lanes = 1 << p.lanes_log2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int part = lane & (lanes - 1), i = threadIdx.x;
    if (4 * i < 3 * d) {
        int which = (4 * i >= d) + (4 * i >= 2 * d), at = 4 * i - which * d;
        float4 v = get(p.out.qkv + which * p.n_embd + keys.head * d + at, tag);
        if (which) {
            v = make_float4(to_cache_and_back(v.x, p.kv), to_cache_and_back(v.y, p.kv),
                            to_cache_and_back(v.z, p.kv), to_cache_and_back(v.w, p.kv));
        }
        *(float4 *)(s.query + which * MAX_DIM + at) = v;
    }
    wait_for_warps();
    bool last = keys.split == p.n_splits - 1; /* which has this token's own key */
    if (last && i >= COMPUTE - d) {
        int e = i - (COMPUTE - d);
        size_t at = (((size_t)p.slot * p.n_head + keys.head) * p.n_ctx + p.position) * d + e;
        store_cached(l.k, at, s.query[MAX_DIM + e], p.kv);
        store_cached(l.v, at, s.query[2 * MAX_DIM + e], p.kv);
    }

    state own = {-INFINITY, 0, {}};
    float q[8];
    load_cached(q, (const char *)s.query, part, BML_F32);
#pragma unroll
    for (int j = 0; j < 8; j++)
        q[j] *= l.scale;
    size_t key_bytes = d * (p.kv == BML_F32 ? 4 : 2);
    int each = 32 >> p.lanes_log2,
        key_of_lane = lane >> p.lanes_log2; /* a warp takes EACH keys at once */
    if (last && warp == WARPS - 1) {
        float kk[8], vv[8];
        load_cached(kk, (const char *)(s.query + MAX_DIM), part, BML_F32);
        load_cached(vv, (const char *)(s.query + 2 * MAX_DIM), part, BML_F32);
        float score = score_of(q, kk, lanes);
        if (lane < lanes)
            own.add(score, vv);
    }
    for (int first = keys.begin; first < keys.end; first += p.keys_of_stage) {
        const char *k = r.stage();
        uint32_t k_full = r.full_at(r.at), k_empty = r.empty_at(r.at);
        uint32_t k_round = r.round;
        r.next();
        const char *v = r.stage();
        int m = min(p.keys_of_stage, keys.end - first);
        barrier_wait(k_full, k_round);
        barrier_wait(r.full_at(r.at), r.round);
        for (int at = warp * each; at < m; at += WARPS * each) {
            int key = at + key_of_lane;
            float kk[8], vv[8];
            load_cached(kk, k + min(key, m - 1) * key_bytes, part, p.kv);
            load_cached(vv, v + min(key, m - 1) * key_bytes, part, p.kv);
            float score = score_of(q, kk, lanes);
            if (key < m)
                own.add(score, vv);
        }
        wait_for_warps();
        if (i == 0) {
            barrier_arrive(k_empty);
            barrier_arrive(r.empty_at(r.at));
        }
        r.next();
    }
    for (int step = lanes; step < 32; step *= 2)
        own.join(step);
    float *mine = s.states + warp * STATE;
    if (lane < lanes) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            mine[8 * part + j] = own.v[j];
        mine[MAX_DIM] = own.max;
        mine[MAX_DIM + 1] = own.sum;
    }
    wait_for_warps();
    if (i < (d + 4 + 31) / 32 * 32) { /* the sums are against a maximum that can carry the tag */
        float own_max = lane < WARPS ? s.states[lane * STATE + MAX_DIM] : -INFINITY, top = own_max;
#pragma unroll
        for (int step = 16; step; step /= 2)
            top = larger(top, __shfl_xor_sync(~0u, top, step));
        top = tagged(top, tag);
        float weight = own_max == -INFINITY ? 0 : __expf(own_max - top), total = 0;
        const float *column = s.states + (i < d ? i : MAX_DIM + 1);
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total = fmaf(__shfl_sync(~0u, weight, w), column[w * STATE], total);
        float *to = p.out.heads + (keys.head * p.n_splits + keys.split) * (d + 4);
        /* d: the sum; d + 2 and d + 3 only fill up */
        if (i < d + 4)
            put(to + i, i == d + 1 ? top : total, tag);
    }
}

/* Waits for all runs of all heads, and keeps what they give together. */
template <bml_weight_format F>
__device__ static void keep_heads(const arguments &p, const shared &s, uint32_t tag)
{
    int d = p.head_dim, pitch = d + 4, n = p.n_head * p.n_splits * pitch, i = threadIdx.x;
    use_all<QUADS>(p.out.heads, n / 4, i, COMPUTE, tag,
                   [&](int at, float4 v) { ((float4 *)s.heads)[at] = v; });
    wait_for_warps();
    if (4 * i < p.n_embd) {
        int head = 4 * i >> (p.lanes_log2 + 3);
        const float *runs = s.heads + head * p.n_splits * pitch;
        float top = -INFINITY, sum = 0;
        for (int run = 0; run < p.n_splits; run++)
            top = larger(top, runs[run * pitch + d + 1]);
        float4 total = make_float4(0, 0, 0, 0);
        for (int run = 0; run < p.n_splits; run++) {
            const float *one = runs + run * pitch;
            float weight = __expf(one[d + 1] - top);
            float4 v = *(const float4 *)(one + (4 * i & (d - 1)));
            sum = fmaf(weight, one[d], sum);
            total = make_float4(fmaf(weight, v.x, total.x), fmaf(weight, v.y, total.y),
                                fmaf(weight, v.z, total.z), fmaf(weight, v.w, total.w));
        }
        float share = 1 / sum;
        dot_format<F>::keep(
            s.a, i,
            make_float4(total.x * share, total.y * share, total.z * share, total.w * share));
    }
    wait_for_warps();
}

/* Waits for the hidden activations and keeps them. */
template <bml_weight_format F>
__device__ static void keep_hidden(const arguments &p, const shared &s, uint32_t tag)
{
    use_all<QUADS>(p.out.hidden, p.n_inner / 4, threadIdx.x, COMPUTE, tag,
                   [&](int at, float4 v) { dot_format<F>::keep(s.a, at, v); });
    wait_for_warps();
}

/* ---- the head -------------------------------------------------------------------------------- */

/* The best candidate of all threads; ALL has one for each warp. */
__device__ static candidate best_of_block(candidate *all, candidate best)
{
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0)
        all[threadIdx.x / 32] = best;
    wait_for_warps();
    for (int w = 0; w < WARPS; w++)
        best = better(best, all[w]);
    return best;
}

/* Joins the candidates of all threads, and then of all blocks in the first one. A logit's 32 bits
 * go in halves: all of them count, and each word carries a tag. */
__device__ static void choose(const arguments &p, const shared &s, candidate best, uint32_t tag)
{
    candidate *all = (candidate *)s.states; /* one of each warp */
    int i = threadIdx.x;
    best = best_of_block(all, best);
    if (i == 0) {
        uint32_t bits = __float_as_uint(best.logit),
                 words[RECORD] = {bits >> 16, bits & 0xffff, (uint32_t)best.id, 0};
        for (int j = 0; j < RECORD; j++)
            put_word(p.out.best + blockIdx.x * RECORD + j, __uint_as_float(words[j] << 1 | tag));
    }
    if (blockIdx.x)
        return;
    best = {-INFINITY, NO_ID};
    if (i < gridDim.x) {
        float4 v = get(p.out.best + i * RECORD, tag);
        uint32_t bits = __float_as_uint(v.x) >> 1 << 16 | __float_as_uint(v.y) >> 1;
        best = {__uint_as_float(bits), (int)__float_as_uint(v.z) >> 1};
    }
    best = best_of_block(all + WARPS, best);
    if (i == 0) {
        *p.id = best.id;
        *p.host_id = best.id;
    }
}

/* ---- the pass -------------------------------------------------------------------------------- */

/* One loop for all products, so that the processor's instruction cache holds it: every layer runs
 * through each phase but once. */
template <bml_weight_format F, bml_weight_format HEAD>
__device__ static void compute(ring &r, const arguments &p, const shared &s)
{
    int i = threadIdx.x;
    bool has_x = 4 * i < p.n_embd;
    run keys = run_of_block(p);
    norm_constants norm = {};
    norm.load(p, 0, 0);
    row_constants row, next = {};
    next.load<F>(p, 0, QKV, s.rows[QKV]);
    float4 x = make_float4(0, 0, 0, 0);
    if (has_x) {
        float4 position = embedding_at(p.wpe, p.wpe_format, p.n_embd, p.position, i);
        int token = p.from ? max(*p.from, 0) : p.token; /* -1 fails the pass before */
        x = embedding_at(p.wte, p.wte_format, p.n_embd, token, i);
        x = make_float4(x.x + position.x, x.y + position.y, x.z + position.z, x.w + position.w);
        ((float4 *)s.heads)[i] = x; /* free until attention has something to say */
    }
    wait_for_warps();
    float own_x = i < s.rows[PROJECT].n ? s.heads[s.rows[PROJECT].begin + i] : 0;
    uint32_t tag = p.use & 1;
    for (int step = 0;; step++) {
        int index = step / N_MATRICES, m = step % N_MATRICES;
        if (m == QKV || m == EXPAND) {
            if (step && has_x)
                x = get(p.out.x[m == QKV] + 4 * i, tag);
            keep_norm<F>(p, s, x, norm);
            if (index == p.n_layer)
                break;
            norm.load(p, index + (m == EXPAND), m == QKV);
            tag ^= m == QKV;
        } else if (m == PROJECT) {
            if (keys.head >= 0)
                attend(r, p, s, p.layers[index], keys, tag);
            keep_heads<F>(p, s, tag);
        } else {
            keep_hidden<F>(p, s, tag);
        }
        row = next;
        if (step + 1 < N_MATRICES * p.n_layer)
            next.load<F>(p, (step + 1) / N_MATRICES, (m + 1) % N_MATRICES,
                         s.rows[(m + 1) % N_MATRICES]);
        multiply<F>(r, p, s, p.products[m], s.rows[m], p.layers_slicing.pitch, s.finish + m * ROWS,
                    [&](int i, float sum) {
                        float y = row.finish(sum);
                        float *to = m == QKV      ? p.out.qkv
                                    : m == EXPAND ? p.out.hidden
                                                  : p.out.x[m == CONTRACT];
                        if (m == EXPAND)
                            y = activate(y, p.activation);
                        else if (m != QKV)
                            y = own_x += y;
                        put(to + i, y, tag);
                    });
    }
    if (!p.want_row)
        return;
    candidate best = {-INFINITY, NO_ID};
    multiply<HEAD>(r, p, s, p.products[N_MATRICES], s.rows[N_MATRICES], p.head_slicing.pitch,
                   nullptr, [&](int id, float sum) {
                       if (!p.n_valid)
                           p.logits[id] = sum;
                       else if (id < p.n_valid)
                           best = better(best, candidate{sum, isfinite(sum) ? id : -1});
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
    ring r = {memory, 0, 0, p.n_stages, p.stage_bytes, 0, 0};
    uint64_t *barriers = (uint64_t *)(memory + p.n_stages * p.stage_bytes);
    r.full = shared_address(barriers);
    r.empty = r.full_at(p.n_stages);
    shared s;
    s.a = activations((char *)(barriers + 2 * p.n_stages), widest);
    s.norms = (float2 *)(s.a.memory + activations::bytes_for(widest));
    s.parts = (part *)(s.norms + 2 * WARPS);
    s.rows = (range *)(s.parts + SPLITS * SPLITS);
    s.warps = (uint32_t *)(s.rows + 6);
    s.finish = (uint16_t *)(s.warps + SPLITS);
    s.heads = (float *)(s.finish + N_MATRICES * ROWS);
    s.partial = s.heads + p.n_head * p.n_splits * (d + 4);
    s.states = s.partial + 2 * WARPS * TILE;
    s.query = s.states + WARPS * STATE;
    if (threadIdx.x <= N_MATRICES) {
        const int heights[] = {3 * p.n_embd, p.n_embd, p.n_inner, p.n_embd, p.vocab_size};
        s.rows[threadIdx.x] = range(heights[threadIdx.x]);
    }
    int units = threadIdx.x / SPLITS, warp = threadIdx.x % SPLITS;
    if (units && units < SPLITS)
        s.parts[threadIdx.x] = {(uint8_t)(warp % units), (uint8_t)(warp / units),
                                (uint8_t)((WARPS - warp % units + units - 1) / units), 0};
    if (units && units < SPLITS && warp == 0) {
        uint32_t warps = 0;
        for (int w = 0; w < WARPS; w += units)
            warps |= 1u << w;
        s.warps[units] = warps;
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.n_stages; i++) {
            barrier_init(r.full_at(i), 1);
            barrier_init(r.empty_at(i), 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < N_MATRICES * ROWS) {
        const product &m = p.products[threadIdx.x / ROWS];
        int n = s.rows[threadIdx.x / ROWS].n, units = (n + TILE - 1) / TILE * m.n_slices;
        s.finish[threadIdx.x] =
            units > p.units ? 0 : (uint16_t)warps_of_row(s, m, threadIdx.x % ROWS, 0, units);
    }
    __syncthreads();
    if (threadIdx.x < COMPUTE)
        compute<F, HEAD>(r, p, s);
    else
        fill<F, HEAD>(r, p, s);
#endif
}

const void *bml_cuda_decode_kernel(bml_weight_format format)
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
