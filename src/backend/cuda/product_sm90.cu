/*
 * The product on Hopper: blocks stay, and take one tile after another. A warp keeps a ring of tiles
 * of a and W filled through the copy engine; warpgroups multiply what is full, 64 rows at once, and
 * hand it back. Blocks that share work form a cluster: a pair takes neighbouring rows and reads W
 * once for both; a split takes one tile and cuts k, and its sums meet in shared memory.
 */
#include "backend/cuda/epilogue_sm90.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/product.h"
#include "backend/cuda/tensor_map.h"

enum {
    DEPTH = 64, /* of k in a slot of the ring: one swizzled 128-byte row */
    BAND = 16,  /* tiles of rows that are gone through together, for the L2 cache */
    SHARED = 226 << 10,
    GROUP = 64, /* rows that a warpgroup multiplies at once */
};

/* What follows from a tile's rows and columns. Wide tiles are many, and PAIRs of them read W
 * together; narrow ones are few, and may be split. */
template <int ROWS, int COLUMNS> struct sizes {
    enum {
        CONSUMERS = ROWS / 16, /* warps that multiply; of four more, one loads */
        THREADS = 32 * (CONSUMERS + 4),
        A_BYTES = ROWS * DEPTH * 2,
        SLOT_BYTES = A_BYTES + COLUMNS * DEPTH * 2,
        NOTES_BYTES = 4 * (int)sizeof(notes<COLUMNS>),                /* each warpgroup has two */
        STAGES = COLUMNS >= 192 ? 1 : 2,                              /* of a warp's epilogue */
        REST = CONSUMERS * STAGES * STAGE_BYTES + NOTES_BYTES + 2048, /* alignment, barriers */
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
template <int COLUMNS, int PAIR>
static __device__ __forceinline__ void load_w(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                              int column, int k, int rank)
{
    if constexpr (PAIR > 1) {
        int first = rank * (COLUMNS / PAIR);
        load_box_multicast(to + first * 128, map, barrier, k, column + first, (1 << PAIR) - 1);
    } else {
        load_box(to, map, barrier, k, column);
    }
}

/* Brings a tile of the residual stream to the L2 cache while its sums are made. */
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void prefetch_rows(const bml_cuda_product &p, int row, int column,
                                                     int threads)
{
#pragma unroll 1
    for (int i = threadIdx.x % threads; i < ROWS * (COLUMNS / 32); i += threads) {
        int r = row + i / (COLUMNS / 32), c = column + i % (COLUMNS / 32) * 32;
        if (r < p.m && c < p.n)
            prefetch_line((const float *)p.out + (size_t)r * p.out_pitch + c);
    }
}

/*
 * The sums of a split tile meet: each block lays its own into the ring, which is idle by now, and
 * takes from all what it finishes, every SPLIT-th unit of 32 columns. Returns these units, a bit
 * each; AT is the thread's first 16 bytes. Leaves it to the caller to wait until all have read.
 */
template <int COLUMNS, int CONSUMERS>
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
    cluster_arrive();
    return units;
}

/*
 * Each warpgroup takes 64 of a tile's rows, or, with TURNS, whole tiles in turn with the other:
 * while one stores its sums, the other multiplies.
 */
template <typename T, int ROWS, int COLUMNS, int PAIR, bool TURNS>
static __global__ __launch_bounds__(sizes<ROWS, COLUMNS>::THREADS,
                                    1) void product(const __grid_constant__ CUtensorMap map_a,
                                                    const __grid_constant__ CUtensorMap map_w,
                                                    const __grid_constant__ CUtensorMap map_out,
                                                    const __grid_constant__ bml_cuda_product p,
                                                    int split)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using size = sizes<ROWS, COLUMNS>;
    constexpr int CONSUMERS = size::CONSUMERS;
    constexpr int HEIGHT = TURNS ? ROWS / GROUP : 1, slots = size::SLOTS;
    constexpr bool SPLITS = PAIR == 1 && !TURNS;
    extern __shared__ char shared[];
    uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    uint32_t stages = base + slots * size::SLOT_BYTES;
    uint32_t full = stages + CONSUMERS * size::STAGES * STAGE_BYTES, empty = full + 8 * slots;
    using tile_notes = notes<COLUMNS>;
    tile_notes *all_notes = (tile_notes *)(shared + (empty + 8 * slots - shared_address(shared)));

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t rank = PAIR * split > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        prefetch_map(&map_a);
        prefetch_map(&map_w);
        prefetch_map(&map_out);
        for (int i = 0; i < slots; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, (TURNS ? CONSUMERS / 2 : CONSUMERS) * PAIR);
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
    int tiles = tiles_m * tiles_n, k_blocks = (p.k + DEPTH - 1) / DEPTH;
    int k_begin = 0, k_end = k_blocks;
    if (SPLITS && split > 1) {
        k_begin = (int)rank * k_blocks / split;
        k_end = ((int)rank + 1) * k_blocks / split;
    }
    auto first_row = [&](const tile_at &tile) {
        return (tile.m * PAIR + (PAIR > 1 ? (int)rank : 0)) * ROWS;
    };
    ring_place at = {0, 0};

    if (warp >= CONSUMERS) {
        registers_shrink<TURNS ? 24 : 40>();
        if (warp == CONSUMERS && lane == 0) {
            /* Weights are there: the first are loaded before the wait for a. */
            int i = blockIdx.x / together, k = k_begin;
            tile_at tile(i, tiles_m, tiles_n);
            for (; k < k_end && k - k_begin < slots; k++) {
                int slot = k - k_begin;
                barrier_expect(full + 8 * slot, size::SLOT_BYTES);
                load_w<COLUMNS, PAIR>(base + slot * size::SLOT_BYTES + size::A_BYTES, &map_w,
                                      full + 8 * slot, tile.n * COLUMNS, k * DEPTH, (int)rank);
            }
            await_previous();
            for (int early = k_begin; early < k; early++, at.advance(slots))
                load_box(base + at.slot * size::SLOT_BYTES, &map_a, full + 8 * at.slot,
                         early * DEPTH, first_row(tile));
            for (; i < tiles; i += step, k = k_begin) {
                tile = tile_at(i, tiles_m, tiles_n);
                for (; k < k_end; k++, at.advance(slots)) {
                    uint32_t a = base + at.slot * size::SLOT_BYTES, filled = full + 8 * at.slot;
                    barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
                    barrier_expect(filled, size::SLOT_BYTES);
                    load_w<COLUMNS, PAIR>(a + size::A_BYTES, &map_w, filled, tile.n * COLUMNS,
                                          k * DEPTH, (int)rank);
                    load_box(a, &map_a, filled, k * DEPTH, first_row(tile));
                }
            }
            /* A pair's block stays until nobody will arrive at its barriers any more. */
            for (int slot = 0; PAIR > 1 && slot < slots; slot++, at.advance(slots))
                barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
        }
        __syncwarp();
        if (SPLITS && split > 1) {
            cluster_exchange();
            cluster_arrive();
        }
    } else {
        registers_grow<TURNS ? 240 : 232>();
        int group = warp / 4, thread = threadIdx.x % 128, row = warp % 4 * 16;
        uint32_t stage = stages + warp * size::STAGES * STAGE_BYTES;
        float d[HEIGHT][COLUMNS / 2];
        auto release = [&](uint32_t slot) {
            if (lane < PAIR)
                PAIR > 1 ? barrier_arrive_at(slot, lane) : barrier_arrive(slot);
        };
        tile_notes *notes = all_notes + 2 * group, *other_notes = notes + 1;
        int i = blockIdx.x / together;
        if (TURNS) {
            i += group * step;
            at.skip(slots, group * k_blocks);
        }
        await_previous();
        for (; i < tiles; i += TURNS ? 2 * step : step) {
            tile_at tile(i, tiles_m, tiles_n);
            int column = tile.n * COLUMNS;
            int first = first_row(tile) + (TURNS ? 0 : group * GROUP);
            notes->fetch(p, first, column, thread);
            if (p.epilogue == BML_CUDA_RESIDUAL)
                prefetch_rows<ROWS, COLUMNS>(p, first_row(tile), column,
                                             TURNS ? 128 : 32 * CONSUMERS);
            if (TURNS && i >= step) /* the other has seen all slots before this tile's full */
                barrier_sync(4 + group, 32 * CONSUMERS);
            uint32_t done = 0;
#pragma unroll(COLUMNS < 192 ? 4 : 1)
            for (int k = k_begin; k < k_end; k++, at.advance(slots)) {
                uint32_t slot = base + at.slot * size::SLOT_BYTES;
                uint64_t a = tile_descriptor(slot + (TURNS ? 0 : group * (GROUP * DEPTH * 2)));
                uint64_t w = tile_descriptor(slot + size::A_BYTES);
                barrier_wait(full + 8 * at.slot, at.parity);
                wgmma_begin();
#pragma unroll
                for (int j = 0; j < DEPTH / 16; j++) /* 32 bytes along k */
#pragma unroll
                    for (int h = 0; h < HEIGHT; h++)
                        wgmma<T, COLUMNS>(d[h], a + h * (GROUP * DEPTH * 2 >> 4) + 2 * j, w + 2 * j,
                                          k > k_begin || j > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (k > k_begin)
                    release(done);
                done = empty + 8 * at.slot;
            }
            if (TURNS && i + step < tiles)
                barrier_arrive(4 + (group ^ 1), 32 * CONSUMERS);
            wgmma_wait<0>();
#pragma unroll
            for (int h = 0; h < HEIGHT; h++)
                sums_ready(d[h]);
            release(done);
            if (TURNS)
                at.skip(slots, k_blocks);

            words_here();
            barrier_sync(2 + group, 128);
            if (p.bias && !(SPLITS && rank > 0))
#pragma unroll
                for (int h = 0; h < HEIGHT; h++)
                    add_bias<COLUMNS / 8>(d[h], notes->bias, COLUMNS);
            uint32_t units = ~0u;
            if constexpr (SPLITS)
                if (split > 1)
                    units = meet<COLUMNS, CONSUMERS>(
                        d[0], base + (group * COLUMNS * 16 + thread) * 16, (int)rank, split);
#pragma unroll
            for (int h = 0; h < HEIGHT; h++) {
                int strip = h * GROUP + row;
                finish<T, COLUMNS / 32, size::STAGES>(p, &map_out, stage, first + strip, column,
                                                      d[h], units, notes->slot + strip,
                                                      notes->position + strip);
            }
            tile_notes *used = notes; /* until all four warps have met again */
            notes = other_notes;
            other_notes = used;
        }
        if (lane == 0)
            boxes_written();
    }
    if (SPLITS && split > 1) /* no block leaves while another may read its sums */
        cluster_wait();
#else
    __trap(); /* this code was built for another chip */
#endif
}

template <typename T, int ROWS, int COLUMNS, int PAIR, bool TURNS>
static cudaError_t launch(const bml_cuda_product *p, int split, cudaStream_t stream)
{
    using size = sizes<ROWS, COLUMNS>;
    CUtensorMap map_a, map_w, map_out = {};
    uint64_t size_a[] = {(uint64_t)p->k, (uint64_t)p->m}, pitch_a = (uint64_t)p->a_pitch;
    uint64_t size_w[] = {(uint64_t)p->k, (uint64_t)p->n};
    uint64_t size_out[] = {(uint64_t)p->n, (uint64_t)p->m}, pitch_out = (uint64_t)p->out_pitch;
    bml_cuda_chip chip;
    cudaError_t error = bml_cuda_tensor_map(&map_a, p->type, p->a, 2, size_a, &pitch_a, ROWS);
    if (!error)
        error = bml_cuda_tensor_map(&map_w, p->type, p->w, 2, size_w, size_w, COLUMNS / PAIR);
    if (!error && p->epilogue == BML_CUDA_RESIDUAL)
        error = bml_cuda_tensor_map(&map_out, BML_F32, p->out, 2, size_out, &pitch_out, STAGE_ROWS);
    if (!error)
        error = bml_cuda_current_chip(&chip);
    if (error)
        return error;

    int tiles = bml_cuda_divided_up(p->m, ROWS * PAIR) * bml_cuda_divided_up(p->n, COLUMNS);
    int blocks = split > 1                   ? tiles * split
                 : tiles * PAIR < chip.units ? tiles * PAIR
                                             : chip.units / PAIR * PAIR;
    void *arguments[] = {&map_a, &map_w, &map_out, (void *)p, &split};
    return bml_cuda_launch((const void *)product<T, ROWS, COLUMNS, PAIR, TURNS>,
                           dim3((unsigned)blocks), size::THREADS, PAIR * split, size::BYTES,
                           arguments, stream);
}

template <typename T>
static cudaError_t launch_tile(const bml_cuda_product *p, bml_cuda_tile tile, cudaStream_t stream)
{
    if (tile.rows == 64)
        return launch<T, 64, 96, 1, false>(p, 1, stream);
    switch (tile.columns) {
    case 64:
        return launch<T, 128, 64, 1, false>(p, tile.split, stream);
    case 96:
        return launch<T, 128, 96, 1, false>(p, tile.split, stream);
    case 128:
        return tile.turns ? launch<T, 128, 128, 2, true>(p, 1, stream)
                          : launch<T, 128, 128, 1, false>(p, tile.split, stream);
    case 192:
        return tile.turns ? launch<T, 128, 192, 2, true>(p, 1, stream)
                          : launch<T, 128, 192, 2, false>(p, 1, stream);
    default:
        return launch<T, 128, 256, 2, false>(p, 1, stream);
    }
}

cudaError_t bml_cuda_product_sm90(const bml_cuda_product *p, bml_cuda_tile tile,
                                  cudaStream_t stream)
{
    return p->type == BML_F16 ? launch_tile<__half>(p, tile, stream)
                              : launch_tile<__nv_bfloat16>(p, tile, stream);
}
