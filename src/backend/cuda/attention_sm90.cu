/*
 * Causal attention on Hopper for heads of 64: a block takes 64 queries of one head, and goes
 * through the keys before them from the last to the first, 64 or 128 at a time, with a running
 * maximum and sum. One warp loads, four multiply. The scores of the next keys are made while the
 * values of the last are summed; both run while the exponentials of this block, or its neighbours,
 * are taken.
 */
#include "backend/cuda/attention.h"
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/sm90.cuh"
#include "backend/cuda/tensor_map.h"

enum {
    HEAD = 64,
    QUERIES = 64, /* of a block */
    RING = 2,     /* slots of each warpgroup */
};

/* What follows from the keys taken at a time, and from how many warpgroups take them in turn. */
template <int KEYS, int GROUPS> struct sizes {
    enum {
        THREADS = 128 * GROUPS + 32,
        KEY_BYTES = KEYS * HEAD * 2,
        SLOTS = RING * GROUPS,
        MEETING = (GROUPS - 1) * 128 * (HEAD / 2 + 4) * (int)sizeof(float),
        BYTES = QUERIES * HEAD * 2 + 2 * SLOTS * KEY_BYTES + MEETING + 2048,
    };
};

/* Each lane of four gives p[i] to lane i: columns 2 q of four blocks become 8 columns of block q.
 */
static __device__ __forceinline__ uint4 transpose_quad(uint32_t p0, uint32_t p1, uint32_t p2,
                                                       uint32_t p3)
{
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t a = __shfl_xor_sync(~0u, odd ? p0 : p1, 1), b = __shfl_xor_sync(~0u, odd ? p2 : p3, 1);
    (odd ? p0 : p1) = a;
    (odd ? p2 : p3) = b;
    a = __shfl_xor_sync(~0u, high ? p0 : p2, 2);
    b = __shfl_xor_sync(~0u, high ? p1 : p3, 2);
    (high ? p0 : p2) = a;
    (high ? p1 : p3) = b;
    return make_uint4(p0, p1, p2, p3);
}

/* The two rows a lane has part of: where they stand in the softmax. */
struct running {
    float top[2], sum[2]; /* sum: this lane's columns only */
};

/* Scores to weights relative to the new maximum; KEEP: what the old sums are worth now. LIMIT: the
 * last key each row sees, relative to the first score. */
template <int KEYS>
static __device__ __forceinline__ void soften(float (&s)[KEYS / 2], running &r, float (&keep)[2],
                                              float scale, bool masked, const int (&limit)[2])
{
    if (masked) {
        int column = 2 * (threadIdx.x & 3);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            if (i / 4 * 8 + column + (i & 1) > limit[i >> 1 & 1])
                s[i] = -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = r.top[h];
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 4)
            top = fmaxf(top, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        float zero = top == -INFINITY ? 0.f : top * scale; /* no key seen yet: weights of 0 */
        keep[h] = exp2_fast(r.top[h] * scale - zero);
        r.top[h] = top;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 4) {
            float *x = s + i + 2 * h;
            x[0] = exp2_fast(x[0] * scale - zero);
            x[1] = exp2_fast(x[1] * scale - zero);
            sum += x[0] + x[1];
        }
        r.sum[h] = r.sum[h] * keep[h] + sum;
    }
}

/*
 * The sums of the warpgroups, each over its own keys, become those of the first, which alone goes
 * on; AT: where they lie meanwhile.
 */
template <int GROUPS>
static __device__ __forceinline__ bool gather(uint32_t at, int group, float (&o)[HEAD / 2],
                                              running &r, float scale)
{
    enum { PART = 128 * 16 }; /* four numbers of each thread */
    at += threadIdx.x % 128 * 16;
    if (group > 0) {
        uint32_t own = at + (group - 1) * (HEAD / 8 + 1) * PART;
        store_shared(own, r.top[0], r.top[1], r.sum[0], r.sum[1]);
#pragma unroll
        for (int i = 0; i < HEAD / 2; i += 4)
            store_shared(own + (i / 4 + 1) * PART, o[i], o[i + 1], o[i + 2], o[i + 3]);
    }
    barrier_sync(2, 128 * GROUPS);
    if (group > 0)
        return false;
#pragma unroll
    for (int other = 0; other < GROUPS - 1; other++) {
        uint32_t from = at + other * (HEAD / 8 + 1) * PART;
        float4 theirs = load_shared(from);
        float tops[2] = {theirs.x, theirs.y}, sums[2] = {theirs.z, theirs.w}, keep[2], add[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = fmaxf(r.top[h], tops[h]), zero = top == -INFINITY ? 0.f : top * scale;
            keep[h] = exp2_fast(r.top[h] * scale - zero);
            add[h] = exp2_fast(tops[h] * scale - zero);
            r.top[h] = top;
            r.sum[h] = r.sum[h] * keep[h] + sums[h] * add[h];
        }
#pragma unroll
        for (int i = 0; i < HEAD / 2; i += 4) {
            float4 x = load_shared(from + (i / 4 + 1) * PART);
            o[i] = o[i] * keep[0] + x.x * add[0];
            o[i + 1] = o[i + 1] * keep[0] + x.y * add[0];
            o[i + 2] = o[i + 2] * keep[1] + x.z * add[1];
            o[i + 3] = o[i + 3] * keep[1] + x.w * add[1];
        }
    }
    return true;
}

template <typename T, int KEYS, int GROUPS>
static __global__
    __launch_bounds__(128 * GROUPS + 32,
                      GROUPS > 1   ? 1
                      : KEYS == 64 ? 3
                                   : 2) void attention(const __grid_constant__ CUtensorMap map_q,
                                                       const __grid_constant__ CUtensorMap map_k,
                                                       const __grid_constant__ CUtensorMap map_v,
                                                       const __grid_constant__ bml_cuda_attention a)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = sizes<KEYS, GROUPS>;
    constexpr int KEY_BYTES = size::KEY_BYTES, SLOTS = size::SLOTS;
    extern __shared__ char shared[];
    uint32_t q = (shared_address(shared) + 1023) & ~1023u, k = q + QUERIES * HEAD * 2;
    uint32_t v = k + SLOTS * KEY_BYTES, meeting = v + SLOTS * KEY_BYTES;
    uint32_t q_full = meeting + size::MEETING, k_full = q_full + 8, v_full = k_full + 8 * SLOTS;
    uint32_t k_empty = v_full + 8 * SLOTS, v_empty = k_empty + 8 * SLOTS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_head = a.cache.n_head;

    if (threadIdx.x == 0) {
        prefetch_map(&map_q);
        prefetch_map(&map_k);
        prefetch_map(&map_v);
        barrier_init(q_full, 1);
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(v_full + 8 * i, 1);
            barrier_init(k_empty + 8 * i, 4);
            barrier_init(v_empty + 8 * i, 4);
        }
        barrier_init_fence();
    }
    __syncthreads();
    allow_next();

    /* Blocks that start first see most keys: heads vary fastest, tiles come longest first. */
    int head = blockIdx.x % n_head, part = blockIdx.x / n_head;
    bml_cuda_query_tile tile = a.tiles[part / 2];
    int skip = part % 2 ? 0 : QUERIES;
    tile.token += skip;
    tile.position += skip;
    tile.count = min(tile.count - skip, (int)QUERIES);
    if (tile.count <= 0)
        return;
    int n_keys = tile.position + tile.count, last = (n_keys - 1) / KEYS;
    await_previous();

    if (warp == 4 * GROUPS) {
        if (lane == 0) {
            int line = tile.slot * n_head + head;
            ring_place at = {0, 0};
            barrier_expect(q_full, QUERIES * HEAD * 2);
            load_box(q, &map_q, q_full, head * HEAD, tile.token);
            for (int j = last; j >= 0; j--, at.advance(SLOTS)) {
                barrier_wait(k_empty + 8 * at.slot, at.parity ^ 1);
                barrier_expect(k_full + 8 * at.slot, KEY_BYTES);
                load_box(k + at.slot * KEY_BYTES, &map_k, k_full + 8 * at.slot, 0, j * KEYS, line);
                barrier_wait(v_empty + 8 * at.slot, at.parity ^ 1);
                barrier_expect(v_full + 8 * at.slot, KEY_BYTES);
                load_box(v + at.slot * KEY_BYTES, &map_v, v_full + 8 * at.slot, 0, j * KEYS, line);
            }
        }
        return;
    }

    int group = GROUPS > 1 ? warp / 4 : 0, row = warp % 4 * 16 + lane / 4;
    float scale = a.scale * 1.44269504f;
    float o[HEAD / 2] = {}, s[KEYS / 2], keep[2];
    running softmax = {{-INFINITY, -INFINITY}, {0, 0}};
    ring_place k_at = {group, 0}, v_at = {group, 0};
    uint64_t q_rows = tile_descriptor(q);

    auto multiply_keys = [&]() {
        uint64_t keys = tile_descriptor(k + k_at.slot * KEY_BYTES);
        barrier_wait(k_full + 8 * k_at.slot, k_at.parity);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < HEAD / 16; i++)
            wgmma<T, KEYS>(s, q_rows + 2 * i, keys + 2 * i, i > 0);
        wgmma_commit();
    };
    auto soften_block = [&](int j) {
        int limit[2] = {tile.position + row - j * KEYS, tile.position + row + 8 - j * KEYS};
        soften<KEYS>(s, softmax, keep, scale, (j + 1) * KEYS > tile.position + 1, limit);
    };
    auto release = [&](uint32_t barriers, ring_place &at) {
        if (lane == 0)
            barrier_arrive(barriers + 8 * at.slot);
        at.advance(SLOTS, GROUPS);
    };
    uint32_t weights[KEYS / 16][4];
    auto pack_weights = [&]() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
            weights[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
    };
    auto multiply_values = [&](int j) {
        uint32_t at = v + v_at.slot * KEY_BYTES;
        uint64_t values = tile_descriptor(at);
        barrier_wait(v_full + 8 * v_at.slot, v_at.parity);
        if (j == last && n_keys % KEYS) { /* a weight of 0 must meet a number */
            for (int i = n_keys % KEYS * 8 + threadIdx.x; i < KEYS * 8; i += 128)
                store_shared(at + 16 * i, 0.f, 0.f, 0.f, 0.f);
            shared_written_fence();
            barrier_sync(1, 128);
        }
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) /* 16 rows of 128 bytes */
            wgmma_rows<T>(o, weights[i], values + 128 * i);
        wgmma_commit();
    };

    barrier_wait(q_full, 0);
    int first = last - group;
    bool any = GROUPS == 1 || first >= 0; /* keys for this group */
    if (any) {
        multiply_keys();
        wgmma_wait<0>();
        sums_ready(s);
        release(k_empty, k_at);
        soften_block(first);
        pack_weights();
    }
    for (int j = first - GROUPS; j >= 0; j -= GROUPS) {
        multiply_keys();
        multiply_values(j + GROUPS);
        wgmma_wait<1>();
        sums_ready(s);
        release(k_empty, k_at);
        soften_block(j);
        wgmma_wait<0>();
        sums_ready(o);
        release(v_empty, v_at);
#pragma unroll
        for (int i = 0; i < HEAD / 2; i++)
            o[i] *= keep[i >> 1 & 1];
        pack_weights();
    }
    if (any) {
        multiply_values(first % GROUPS);
        wgmma_wait<0>();
        sums_ready(o);
    }
    if (GROUPS > 1 && !gather<GROUPS>(meeting, group, o, softmax, scale))
        return;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = softmax.sum[h];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float part_of = 1.f / sum;
        T *out = (T *)a.out + (size_t)(tile.token + row + 8 * h) * n_head * HEAD + head * HEAD;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *x = o + 16 * i + 2 * h;
            uint4 eight = transpose_quad(
                pack<T>(x[0] * part_of, x[1] * part_of), pack<T>(x[4] * part_of, x[5] * part_of),
                pack<T>(x[8] * part_of, x[9] * part_of), pack<T>(x[12] * part_of, x[13] * part_of));
            if (row + 8 * h < tile.count)
                *(uint4 *)(out + 32 * i + 8 * (lane & 3)) = eight;
        }
    }
#else
    __trap(); /* this code was built for another chip */
#endif
}

template <typename T, int KEYS, int GROUPS>
static cudaError_t launch(const bml_cuda_attention *a, cudaStream_t stream)
{
    const bml_cuda_cache16 *c = &a->cache;
    CUtensorMap map_q, map_k, map_v;
    uint64_t size_q[] = {(uint64_t)c->n_head * HEAD, (uint64_t)a->n_tokens};
    uint64_t pitch_q = (uint64_t)a->q_pitch;
    uint64_t size[] = {HEAD, (uint64_t)c->n_ctx, (uint64_t)c->n_slots * c->n_head};
    uint64_t pitch[] = {HEAD, HEAD * (uint64_t)c->n_ctx};
    cudaError_t error = bml_cuda_tensor_map(&map_q, a->type, a->q, 2, size_q, &pitch_q, QUERIES);
    if (!error)
        error = bml_cuda_tensor_map(&map_k, a->type, c->k, 3, size, pitch, KEYS);
    if (!error)
        error = bml_cuda_tensor_map(&map_v, a->type, c->v, 3, size, pitch, KEYS);
    if (error)
        return error;
    unsigned blocks = (unsigned)(a->n_tiles * 2 * c->n_head);
    void *arguments[] = {&map_q, &map_k, &map_v, (void *)a};
    return bml_cuda_launch((const void *)attention<T, KEYS, GROUPS>, dim3(blocks),
                           sizes<KEYS, GROUPS>::THREADS, 1, sizes<KEYS, GROUPS>::BYTES, arguments,
                           stream);
}

template <typename T>
static cudaError_t launch_steps(const bml_cuda_attention *a, bml_cuda_steps steps,
                                cudaStream_t stream)
{
    if (steps.groups > 1)
        return launch<T, 64, 3>(a, stream);
    return steps.keys == 64 ? launch<T, 64, 1>(a, stream) : launch<T, 128, 1>(a, stream);
}

cudaError_t bml_cuda_attention_sm90(const bml_cuda_attention *a, bml_cuda_steps steps,
                                    cudaStream_t stream)
{
    return a->type == BML_F16 ? launch_steps<__half>(a, steps, stream)
                              : launch_steps<__nv_bfloat16>(a, steps, stream);
}
