/*
 * The product on Hopper: blocks stay, and take one tile after another. A warp keeps a ring of tiles
 * of a and W filled through the copy engine; two warpgroups of 64 rows each multiply what is full
 * and hand it back. Blocks that share work form a cluster: a pair takes neighbouring rows and reads
 * W once for both; a split takes one tile and cuts k, and its sums meet in shared memory.
 */
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product.h"
#include "backend/cuda/sm90.cuh"
#include "backend/cuda/tensor_map.h"

enum {
    ROWS = 128,    /* of a tile */
    DEPTH = 64,    /* of k in a slot of the ring: one swizzled 128-byte row */
    CONSUMERS = 8, /* warps that multiply; of four more, which leave them registers, one loads */
    THREADS = 32 * (CONSUMERS + 4),
    BAND = 16, /* tiles of rows that are gone through together, for the L2 cache */
    SHARED = 226 << 10,
    BOX = DEPTH * 128, /* bytes of 64 columns of n-major W */
};

/* What follows from a tile's columns. Wide tiles are many, and read W in pairs; narrow ones are
 * few, and may be split. */
template <bool OUT_IN, int COLUMNS> struct sizes {
    enum {
        PAIR = COLUMNS >= 192 ? 2 : 1,
        A_BYTES = ROWS * DEPTH * 2,
        W_BYTES = OUT_IN ? COLUMNS * DEPTH * 2 : (COLUMNS + 63) / 64 * BOX,
        SLOT_BYTES = A_BYTES + W_BYTES,
        BIAS_BYTES = 4 * COLUMNS * (int)sizeof(float), /* two buffers of each warpgroup */
        REST = BIAS_BYTES + 2048,                      /* with alignment and barriers */
        SLOTS = (SHARED - REST) / SLOT_BYTES,
        BYTES = SLOTS * SLOT_BYTES + REST,
    };
};

/* Where tile INDEX lies: bands of rows, each gone through column by column. */
struct tile_at {
    int m, n;

    __device__ tile_at(int index, int tiles_m, int tiles_n)
    {
        int band = index / (BAND * tiles_n), first = band * BAND;
        int height = min(BAND, tiles_m - first), in_band = index - first * tiles_n;
        m = first + in_band % height;
        n = in_band / height;
    }
};

/* COLUMN and on of W, K and on, to shared memory: of a pair, each block loads a half for both. */
template <bool OUT_IN, int COLUMNS, int PAIR>
static __device__ __forceinline__ void load_w(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                              int column, int k, int rank)
{
    constexpr int lines = (OUT_IN ? COLUMNS : DEPTH) / PAIR, step = OUT_IN ? COLUMNS : 64;
    int first = PAIR > 1 ? rank * lines : 0;
#pragma unroll
    for (int c = 0; c < COLUMNS; c += step) {
        uint32_t at = to + c / 64 * BOX * !OUT_IN + first * 128;
        int x = OUT_IN ? k : column + c, y = (OUT_IN ? column : k) + first;
        if (PAIR > 1)
            load_box_multicast(at, map, barrier, x, y, (1 << PAIR) - 1);
        else
            load_box(at, map, barrier, x, y);
    }
}

/* Brings a tile of the residual stream to the L2 cache while its sums are made. */
template <int COLUMNS>
static __device__ __forceinline__ void prefetch_rows(const bml_cuda_product &p, int row, int column)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * (COLUMNS / 32); i += 32 * CONSUMERS) {
        int r = row + i / (COLUMNS / 32), c = column + i % (COLUMNS / 32) * 32;
        if (r < p.m && c < p.n)
            prefetch_line((const float *)p.out + (size_t)r * p.out_pitch + c);
    }
}

/*
 * The sums of a split tile meet: each block lays its own into the ring, which is idle by now, and
 * takes from all what it finishes, every SPLIT-th unit of 32 columns. Returns these units, a bit
 * each; AT is the thread's first 16 bytes.
 */
template <int COLUMNS>
static __device__ __forceinline__ uint32_t meet(float (&d)[COLUMNS / 2], uint32_t at, int rank,
                                                int split)
{
    uint32_t units = 0;
    barrier_sync(1, 32 * CONSUMERS);
#pragma unroll
    for (int j = 0; j < COLUMNS / 2; j += 4)
        store_shared(at + 512 * j, d[j], d[j + 1], d[j + 2], d[j + 3]);
    cluster_exchange();
#pragma unroll
    for (int g = 0; g < COLUMNS / 32; g++) {
        if (g % split != rank)
            continue;
        units |= 1u << g;
#pragma unroll
        for (int j = 16 * g; j < 16 * g + 16; j++)
            d[j] = 0.f;
        for (int other = 0; other < split; other++) {
#pragma unroll
            for (int j = 16 * g; j < 16 * g + 16; j += 4) {
                float4 v = load_cluster(at + 512 * j, other);
                d[j] += v.x;
                d[j + 1] += v.y;
                d[j + 2] += v.z;
                d[j + 3] += v.w;
            }
        }
    }
    return units;
}

template <typename T, bool OUT_IN, int COLUMNS>
static __global__
__launch_bounds__(THREADS, 1) void product(const __grid_constant__ CUtensorMap map_a,
                                           const __grid_constant__ CUtensorMap map_w,
                                           const __grid_constant__ bml_cuda_product p, int split)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = sizes<OUT_IN, COLUMNS>;
    constexpr int PAIR = size::PAIR;
    constexpr bool SPLITS = PAIR == 1;
    constexpr int slots = size::SLOTS;
    extern __shared__ char shared[];
    uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    uint32_t full = base + slots * size::SLOT_BYTES, empty = full + 8 * slots;
    float *biases = (float *)(shared + (empty + 8 * slots - shared_address(shared)));

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t rank = PAIR * split > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_w);
        for (int i = 0; i < slots; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, CONSUMERS * PAIR);
        }
        barrier_init_fence();
    }
    if (PAIR * split > 1)
        cluster_meet();
    else
        __syncthreads();
    allow_next();

    /* A cluster's blocks go through the same tiles: of a pair, each its own of two rows. */
    int together = PAIR * split, step = gridDim.x / together;
    int tiles_m = (p.m + ROWS * PAIR - 1) / (ROWS * PAIR), tiles_n = (p.n + COLUMNS - 1) / COLUMNS;
    int k_blocks = (p.k + DEPTH - 1) / DEPTH, k_begin = 0, k_end = k_blocks;
    if (SPLITS && split > 1) {
        k_begin = (int)rank * k_blocks / split;
        k_end = ((int)rank + 1) * k_blocks / split;
    }
    auto first_row = [&](const tile_at &tile) {
        return (tile.m * PAIR + (PAIR > 1 ? (int)rank : 0)) * ROWS;
    };
    ring_place at = {0, 0};

    if (warp >= CONSUMERS) {
        registers_shrink<40>();
        if (warp == CONSUMERS && lane == 0) {
            /* Weights are there: the first are loaded before the wait for a. */
            int i = blockIdx.x / together, k = k_begin;
            tile_at tile(i, tiles_m, tiles_n);
            for (; k < k_end && k - k_begin < slots; k++) {
                int slot = k - k_begin;
                barrier_expect(full + 8 * slot, size::SLOT_BYTES);
                load_w<OUT_IN, COLUMNS, PAIR>(base + slot * size::SLOT_BYTES + size::A_BYTES,
                                              &map_w, full + 8 * slot, tile.n * COLUMNS, k * DEPTH,
                                              (int)rank);
            }
            await_previous();
            for (int early = k_begin; early < k; early++, at.advance(slots))
                load_box(base + at.slot * size::SLOT_BYTES, &map_a, full + 8 * at.slot,
                         early * DEPTH, first_row(tile));
            for (; i < tiles_m * tiles_n; i += step, k = k_begin) {
                tile = tile_at(i, tiles_m, tiles_n);
                for (; k < k_end; k++, at.advance(slots)) {
                    uint32_t a = base + at.slot * size::SLOT_BYTES, filled = full + 8 * at.slot;
                    barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
                    barrier_expect(filled, size::SLOT_BYTES);
                    load_w<OUT_IN, COLUMNS, PAIR>(a + size::A_BYTES, &map_w, filled,
                                                  tile.n * COLUMNS, k * DEPTH, (int)rank);
                    load_box(a, &map_a, filled, k * DEPTH, first_row(tile));
                }
            }
        }
        __syncwarp();
        if (SPLITS && split > 1)
            cluster_exchange();
    } else {
        registers_grow<232>();
        int half = warp / 4, thread = threadIdx.x % 128;
        float d[COLUMNS / 2];
        auto release = [&](uint32_t slot) {
            if (lane < PAIR)
                PAIR > 1 ? barrier_arrive_at(slot, lane) : barrier_arrive(slot);
        };
        float *bias = biases + half * 2 * COLUMNS, *other_bias = bias + COLUMNS;
        bool biased = p.bias && !(SPLITS && rank > 0);
        await_previous();
        for (int i = blockIdx.x / together; i < tiles_m * tiles_n; i += step) {
            tile_at tile(i, tiles_m, tiles_n);
            int column = tile.n * COLUMNS;
            if (biased)
                for (int c = thread; c < COLUMNS; c += 128)
                    bias[c] = column + c < p.n ? __ldg(p.bias + column + c) : 0.f;
            if (p.epilogue == BML_CUDA_RESIDUAL)
                prefetch_rows<COLUMNS>(p, first_row(tile), column);
            uint32_t done = 0;
#pragma unroll(COLUMNS < 192 ? 4 : 1)
            for (int k = k_begin; k < k_end; k++, at.advance(slots)) {
                uint32_t slot = base + at.slot * size::SLOT_BYTES;
                uint64_t a = tile_descriptor(slot + half * (64 * DEPTH * 2));
                uint64_t w = tile_descriptor(slot + size::A_BYTES, OUT_IN ? 16 : BOX);
                barrier_wait(full + 8 * at.slot, at.parity);
                wgmma_begin();
#pragma unroll
                for (int j = 0; j < DEPTH / 16; j++) /* 32 bytes along k, or 16 rows of 128 */
                    wgmma<T, COLUMNS, !OUT_IN>(d, a + 2 * j, w + (OUT_IN ? 2 : 128) * j,
                                               k > k_begin || j > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (k > k_begin)
                    release(done);
                done = empty + 8 * at.slot;
            }
            wgmma_wait<0>();
            sums_ready(d);
            release(done);

            if (biased) {
                barrier_sync(2 + half, 128);
                add_bias<COLUMNS / 8>(d, bias, COLUMNS);
                float *used = bias; /* until all four warps have met again */
                bias = other_bias;
                other_bias = used;
            }
            uint32_t units = ~0u;
            if (SPLITS && split > 1)
                units =
                    meet<COLUMNS>(d, base + (half * COLUMNS * 16 + thread) * 16, (int)rank, split);
            finish<T, true, COLUMNS / 32, 0, 32>(
                p, first_row(tile) + half * 64 + warp % 4 * 16 + lane / 4, column, d, units);
            __syncwarp();
        }
    }
    /* No block leaves while another may still arrive at its barriers or read its sums. */
    if (PAIR * split > 1)
        cluster_meet();
#else
    __trap(); /* this code was built for another chip */
#endif
}

template <typename T, bool OUT_IN, int COLUMNS>
static cudaError_t launch(const bml_cuda_product *p, int split, cudaStream_t stream)
{
    enum { PAIR = sizes<OUT_IN, COLUMNS>::PAIR };
    CUtensorMap map_a, map_w;
    uint64_t size_a[] = {(uint64_t)p->k, (uint64_t)p->m}, pitch_a = (uint64_t)p->a_pitch;
    uint64_t size_w[] = {(uint64_t)(OUT_IN ? p->k : p->n), (uint64_t)(OUT_IN ? p->n : p->k)};
    bml_cuda_chip chip;
    cudaError_t error = bml_cuda_tensor_map(&map_a, p->type, p->a, 2, size_a, &pitch_a, ROWS);
    if (!error)
        error = bml_cuda_tensor_map(&map_w, p->type, p->w, 2, size_w, size_w,
                                    (OUT_IN ? COLUMNS : DEPTH) / PAIR);
    if (!error)
        error = bml_cuda_current_chip(&chip);
    if (error)
        return error;

    int tiles = (p->m + ROWS * PAIR - 1) / (ROWS * PAIR) * ((p->n + COLUMNS - 1) / COLUMNS);
    int blocks = split > 1                   ? tiles * split
                 : tiles * PAIR < chip.units ? tiles * PAIR
                                             : chip.units / PAIR * PAIR;
    void *arguments[] = {&map_a, &map_w, (void *)p, &split};
    return bml_cuda_launch((const void *)product<T, OUT_IN, COLUMNS>, dim3((unsigned)blocks),
                           THREADS, PAIR * split, sizes<OUT_IN, COLUMNS>::BYTES, arguments, stream);
}

template <typename T, bool OUT_IN>
static cudaError_t launch_columns(const bml_cuda_product *p, bml_cuda_tile tile,
                                  cudaStream_t stream)
{
    switch (tile.columns) {
    case 64:
        return launch<T, OUT_IN, 64>(p, tile.split, stream);
    case 96:
        return launch<T, OUT_IN, 96>(p, tile.split, stream);
    case 128:
        return launch<T, OUT_IN, 128>(p, tile.split, stream);
    case 192:
        return launch<T, OUT_IN, 192>(p, 1, stream);
    default:
        return launch<T, OUT_IN, 256>(p, 1, stream);
    }
}

cudaError_t bml_cuda_product_sm90(const bml_cuda_product *p, bml_cuda_tile tile,
                                  cudaStream_t stream)
{
    if (p->type == BML_F16)
        return p->out_in ? launch_columns<__half, true>(p, tile, stream)
                         : launch_columns<__half, false>(p, tile, stream);
    return p->out_in ? launch_columns<__nv_bfloat16, true>(p, tile, stream)
                     : launch_columns<__nv_bfloat16, false>(p, tile, stream);
}
