/*
 * Products of a decoding batch, where each kernel is short and what counts is the way through it. A
 * block makes 64 rows of some columns, of all of k or a part of it. Its part of W lies in shared
 * memory whole, asked for before the kernel in front of this one has ended; a passes through a
 * ring. Two warpgroups multiply, each every other step along k.
 */
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product_batch.h"
#include "backend/cuda/sm90.cuh"
#include "backend/cuda/tensor_map.h"

enum {
    ROWS = 64,
    DEPTH = 64,               /* of k in a step: one swizzled 128-byte row */
    GROUPS = 2,               /* warpgroups that multiply */
    CONSUMERS = 128 * GROUPS, /* their threads */
    THREADS = CONSUMERS + 32, /* the last warp loads */
    MIN_SLOTS = 7,            /* of the ring */
    MAX_SLOTS = 16,
    A_BYTES = ROWS * DEPTH * 2,
    SHARED = 224 << 10,
    AHEAD_QUERIES = 96, /* at most, every eighth, whose keys are brought to L2 */
    AHEAD_APART = 8,
    AHEAD_BYTES = 64 << 10, /* of keys, and of values, of one */
    AHEAD_PIECE = AHEAD_BYTES / 16,
};

/* What a block has in shared memory, from a multiple of 1024 on; sums take the ring's place. */
template <int COLUMNS> struct sizes {
    enum {
        QUADS = COLUMNS / 4,             /* of columns in a row */
        EACH = ROWS * QUADS / CONSUMERS, /* that a thread finishes */
        PITCH = COLUMNS + 8,             /* floats: rows of sums lie in other banks */
        W_BYTES = COLUMNS * DEPTH * 2,   /* of a step */
        SUMS_BYTES = ROWS * PITCH * (int)sizeof(float),
    };
    static_assert(GROUPS * (int)SUMS_BYTES <= MIN_SLOTS * A_BYTES, "room for the sums");

    static __host__ __device__ int slots(int steps)
    {
        int fit = min((SHARED - 1024 - steps * W_BYTES) / A_BYTES, (int)MAX_SLOTS);
        if (fit >= steps)
            return min(fit, max(steps, (int)MIN_SLOTS));
        /* A slot that is used again stays with one warpgroup, which so waits for each of its
         * phases: who had not seen the last one could take it for the next. */
        return fit / GROUPS * GROUPS;
    }

    static int bytes(int steps)
    {
        return slots(steps) * A_BYTES + steps * W_BYTES + 1024;
    }
};

/* Four columns of a row: where they go, and what they begin with. */
struct quad {
    void *to; /* NULL: nowhere */
    float4 v;
};

template <typename T, bml_cuda_epilogue EPILOGUE>
static __device__ __forceinline__ quad quad_at(const bml_cuda_product &p, int row, int column,
                                               int part)
{
    quad q = {NULL, make_float4(0, 0, 0, 0)};
    if (row >= p.m || column >= p.n)
        return q;
    if (p.bias && part == 0)
        q.v = __ldg((const float4 *)(p.bias + column));
    if constexpr (EPILOGUE == BML_CUDA_STORE32)
        q.to = (float *)p.out + ((size_t)part * p.m + row) * p.out_pitch + column;
    else
        q.to = place16<T, EPILOGUE == BML_CUDA_QKV>(p, row, column, head_divisor(p));
    return q;
}

template <typename T, bml_cuda_epilogue EPILOGUE>
static __device__ __forceinline__ void put(const quad &q, float4 one, float4 two,
                                           bml_activation activation)
{
    float4 v = make_float4(q.v.x + (one.x + two.x), q.v.y + (one.y + two.y),
                           q.v.z + (one.z + two.z), q.v.w + (one.w + two.w));
    if (!q.to)
        return;
    if constexpr (EPILOGUE == BML_CUDA_STORE32) {
        *(float4 *)q.to = v;
    } else {
        if (EPILOGUE == BML_CUDA_ACTIVATION)
            activate<4>(&v.x, activation);
        *(uint2 *)q.to = make_uint2(pack<T>(v.x, v.y), pack<T>(v.z, v.w));
    }
}

/* Brings this block's part of what comes next to L2, by a warp: of every few queries one's first
 * keys and values. Were it those of all, less of each, all would wait for memory at the same time;
 * were it more, it would still be on its way when the kernels that follow want their own. */
static __device__ void bring_keys(const bml_cuda_keys_ahead &ahead, int lane)
{
    int n_blocks = gridDim.x * gridDim.y * gridDim.z;
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int n = min(ahead.n_queries / AHEAD_APART, (int)AHEAD_QUERIES), h = ahead.cache.n_head;
    for (int i = block; i < n; i += n_blocks) {
        int t = i * AHEAD_APART / h, row_bytes = 2 * ahead.cache.head_dim;
        size_t head = (size_t)ahead.slot[t] * h + i * AHEAD_APART % h;
        const char *of = (const char *)(lane < 16 ? ahead.cache.k : ahead.cache.v);
        int bytes = min(ahead.position[t] * row_bytes, (int)AHEAD_BYTES),
            at = lane % 16 * AHEAD_PIECE;
        if (at < bytes)
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                             of + head * ahead.cache.n_ctx * row_bytes + at),
                         "r"(min(bytes - at, (int)AHEAD_PIECE)));
    }
}

template <typename T, int COLUMNS, bml_cuda_epilogue EPILOGUE>
static __global__ __launch_bounds__(THREADS, 1) void product(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_w,
    const __grid_constant__ bml_cuda_product p, const __grid_constant__ bml_cuda_keys_ahead ahead)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = sizes<COLUMNS>;
    extern __shared__ char shared[];
    __shared__ uint64_t full[MAX_SLOTS], empty[MAX_SLOTS], w_full;
    char *base = shared + (-shared_address(shared) & 1023);
    int k_blocks = (p.k + DEPTH - 1) / DEPTH, part = blockIdx.z, split = gridDim.z;
    int begin = part * k_blocks / split, steps = (part + 1) * k_blocks / split - begin;
    int slots = size::slots((k_blocks + split - 1) / split);
    uint32_t ring = shared_address(base), w = ring + slots * A_BYTES;
    int row = blockIdx.y * ROWS, column = blockIdx.x * COLUMNS;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; i++) {
            barrier_init(shared_address(full + i), 1);
            barrier_init(shared_address(empty + i), 4);
        }
        barrier_init(shared_address(&w_full), 1);
        barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x >= CONSUMERS) {
        if (lane == 0)
            barrier_expect(shared_address(&w_full), steps * size::W_BYTES);
        __syncwarp();
        for (int i = lane; i < steps; i += 32)
            load_box(w + i * size::W_BYTES, &map_w, shared_address(&w_full), (begin + i) * DEPTH,
                     column);
        await_previous();
        auto load_a = [&](int slot, int i) {
            barrier_expect(shared_address(full + slot), A_BYTES);
            load_box(ring + slot * A_BYTES, &map_a, shared_address(full + slot),
                     (begin + i) * DEPTH, row);
        };
        if (lane < slots && lane < steps) /* at once */
            load_a(lane, lane);
        ring_place at = {0, 0};
        if (lane == 0)
            for (int i = slots; i < steps; i++, at.advance(slots)) {
                barrier_wait(shared_address(empty + at.slot), at.parity);
                load_a(at.slot, i);
            }
        __syncwarp();
        allow_next(); /* not before: what it loads would be in the way */
        bring_keys(ahead, lane);
        return;
    }
    quad quads[size::EACH];
#pragma unroll
    for (int i = 0; i < size::EACH; i++) {
        int at = threadIdx.x + i * CONSUMERS;
        quads[i] =
            quad_at<T, EPILOGUE>(p, row + at / size::QUADS, column + at % size::QUADS * 4, part);
    }
    int group = warp / 4, last = 0;
    float d[COLUMNS / 2] = {};
    ring_place at = {0, 0};
    barrier_wait(shared_address(&w_full), 0);
#pragma unroll 1
    for (int i = 0; i < steps; i++, at.advance(slots)) {
        if (i % GROUPS != group)
            continue;
        uint64_t tile_a = tile_descriptor(ring + at.slot * A_BYTES);
        uint64_t tile_w = tile_descriptor(w + i * size::W_BYTES);
        barrier_wait(shared_address(full + at.slot), at.parity);
        wgmma_begin();
#pragma unroll
        for (int j = 0; j < DEPTH / 16; j++)
            wgmma<T, COLUMNS>(d, tile_a + 2 * j, tile_w + 2 * j, 1);
        wgmma_commit();
        wgmma_wait<1>();
        if (i >= GROUPS && lane == 0)
            barrier_arrive(shared_address(empty + last));
        last = at.slot;
    }
    wgmma_wait<0>();
    sums_ready(d);

    /* The sums change hands, so that a thread has four columns side by side. */
    barrier_sync(1, CONSUMERS);
    float *sums = (float *)base;
    float *line = sums + (group * ROWS + 16 * (warp % 4) + lane / 4) * size::PITCH + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
        *(float2 *)(line + 8 * j) = make_float2(d[4 * j], d[4 * j + 1]);
        *(float2 *)(line + 8 * j + 8 * size::PITCH) = make_float2(d[4 * j + 2], d[4 * j + 3]);
    }
    barrier_sync(1, CONSUMERS);
    await_previous(); /* what it reads may be what is written now */
#pragma unroll
    for (int i = 0; i < size::EACH; i++) {
        int e = threadIdx.x + i * CONSUMERS;
        const float *own = sums + e / size::QUADS * size::PITCH + e % size::QUADS * 4;
        put<T, EPILOGUE>(quads[i], *(const float4 *)own,
                         *(const float4 *)(own + ROWS * size::PITCH), p.activation);
    }
#else
    __trap(); /* this code was built for another chip */
#endif
}

static int steps_of(const bml_cuda_product *p, int split)
{
    return bml_cuda_divided_up(bml_cuda_divided_up(p->k, DEPTH), split);
}

/* Nanoseconds, by a model of what was measured on an H200: steps along k, a beginning and an end,
 * and what the sums of parts cost that are written and read again. 0: cannot be. */
template <int COLUMNS> static int64_t cost_of(const bml_cuda_product *p, int split, int units)
{
    int steps = steps_of(p, split);
    if (split > bml_cuda_divided_up(p->k, DEPTH) || sizes<COLUMNS>::slots(steps) < MIN_SLOTS)
        return 0;
    int64_t blocks =
        (int64_t)bml_cuda_divided_up(p->m, ROWS) * bml_cuda_divided_up(p->n, COLUMNS) * split;
    int64_t sums = p->epilogue == BML_CUDA_STORE32 ? (int64_t)split * p->m * p->n / 5 / units : 0;
    return (blocks + units - 1) / units * (100 * steps + 300) + sums;
}

bml_cuda_cut bml_cuda_batch_cut(const bml_cuda_product *p, int max_split)
{
    bml_cuda_chip chip;
    bml_cuda_cut best = {0, 0};
    bool kind = p->epilogue == BML_CUDA_QKV || p->epilogue == BML_CUDA_ACTIVATION ||
                p->epilogue == BML_CUDA_STORE32;
    bool fits = kind && p->k % 8 == 0 && p->n % 4 == 0 && p->out_pitch % 4 == 0 &&
                p->a_pitch % 8 == 0 && bml_cuda_aligned(p->a) && bml_cuda_aligned(p->w) &&
                bml_cuda_aligned(p->out) && bml_cuda_aligned(p->bias) &&
                (p->epilogue != BML_CUDA_QKV || p->cache.head_dim % 4 == 0);
    if (!fits || bml_cuda_current_chip(&chip) || chip.major != 9)
        return best;
    int64_t least = 0;
    for (int split = 1; split <= (p->epilogue == BML_CUDA_STORE32 ? max_split : 1); split *= 2)
        for (int i = 0; i < 2;
             i++) { /* of equals the first; many rows are read less in wide ones */
            bool wide = (i == 0) == (p->m > 2 * ROWS);
            int64_t cost =
                wide ? cost_of<96>(p, split, chip.units) : cost_of<48>(p, split, chip.units);
            if (cost && (!least || cost < least)) {
                least = cost;
                best = {wide ? 96 : 48, split};
            }
        }
    return best;
}

template <typename T, int COLUMNS>
static cudaError_t launch(const bml_cuda_product *p, int split, const bml_cuda_keys_ahead *ahead,
                          cudaStream_t stream)
{
    CUtensorMap map_a, map_w;
    uint64_t size_a[] = {(uint64_t)p->k, (uint64_t)p->m}, pitch_a = (uint64_t)p->a_pitch;
    uint64_t size_w[] = {(uint64_t)p->k, (uint64_t)p->n};
    cudaError_t error = bml_cuda_tensor_map(&map_w, p->type, p->w, 2, size_w, size_w, COLUMNS);
    if (!error)
        error = bml_cuda_tensor_map(&map_a, p->type, p->a, 2, size_a, &pitch_a, ROWS);
    if (error)
        return error;
    bml_cuda_keys_ahead nothing = {};
    void *arguments[] = {&map_a, &map_w, (void *)p, ahead ? (void *)ahead : &nothing};
    dim3 grid((unsigned)bml_cuda_divided_up(p->n, COLUMNS),
              (unsigned)bml_cuda_divided_up(p->m, ROWS), (unsigned)split);
    int steps = steps_of(p, split);
    const void *kernel = p->epilogue == BML_CUDA_QKV
                             ? (const void *)product<T, COLUMNS, BML_CUDA_QKV>
                         : p->epilogue == BML_CUDA_ACTIVATION
                             ? (const void *)product<T, COLUMNS, BML_CUDA_ACTIVATION>
                             : (const void *)product<T, COLUMNS, BML_CUDA_STORE32>;
    return bml_cuda_launch_within(kernel, grid, THREADS, 1, (size_t)sizes<COLUMNS>::bytes(steps),
                                  SHARED, arguments, stream);
}

template <typename T>
static cudaError_t launch_columns(const bml_cuda_product *p, bml_cuda_cut cut,
                                  const bml_cuda_keys_ahead *ahead, cudaStream_t stream)
{
    return cut.columns == 48 ? launch<T, 48>(p, cut.split, ahead, stream)
                             : launch<T, 96>(p, cut.split, ahead, stream);
}

cudaError_t bml_cuda_product_batch(const bml_cuda_product *p, bml_cuda_cut cut,
                                   const bml_cuda_keys_ahead *ahead, cudaStream_t stream)
{
    return p->type == BML_F16 ? launch_columns<__half>(p, cut, ahead, stream)
                              : launch_columns<__nv_bfloat16>(p, cut, ahead, stream);
}
