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
    CONSUMERS = 8, /* warps that multiply; four more, the first warpgroup, load */
    THREADS = 384,
    BAND = 16, /* tiles of rows that are gone through together, for the L2 cache */
    SHARED = 226 << 10,
    BOX = DEPTH * 128, /* bytes of 64 columns of n-major W */
};

/* Sizes that follow from a tile's columns. */
template <bool OUT_IN, int COLUMNS> struct ring {
    enum {
        A_BYTES = ROWS * DEPTH * 2,
        W_BYTES = OUT_IN ? COLUMNS * DEPTH * 2 : (COLUMNS + 63) / 64 * BOX,
        SLOT_BYTES = A_BYTES + W_BYTES,
        SLOTS = (SHARED - 2048) / SLOT_BYTES < 8 ? (SHARED - 2048) / SLOT_BYTES : 8,
        BYTES = SLOTS * SLOT_BYTES + 2048, /* with alignment and barriers */
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

template <typename T, bool OUT_IN, int COLUMNS, int PAIR>
__global__ __launch_bounds__(THREADS, 1) void product(const __grid_constant__ CUtensorMap map_a,
                                                      const __grid_constant__ CUtensorMap map_w,
                                                      const __grid_constant__ bml_cuda_product p,
                                                      int split)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using sizes = ring<OUT_IN, COLUMNS>;
    constexpr int slots = sizes::SLOTS;
    extern __shared__ char shared[];
    uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    uint32_t full = base + slots * sizes::SLOT_BYTES, empty = full + 8 * slots;

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
        cluster_sync();
    else
        __syncthreads();
    allow_next();
    await_previous();

    /* A cluster's blocks go through the same tiles: of a pair, each its own of two rows. */
    int together = PAIR * split, step = gridDim.x / together;
    int tiles_m = (p.m + ROWS * PAIR - 1) / (ROWS * PAIR), tiles_n = (p.n + COLUMNS - 1) / COLUMNS;
    int k_blocks = (p.k + DEPTH - 1) / DEPTH, k_begin = 0, k_end = k_blocks;
    if (PAIR == 1 && split > 1) {
        k_begin = (int)rank * k_blocks / split;
        k_end = ((int)rank + 1) * k_blocks / split;
    }
    ring_place at = {0, 0};

    if (warp < 4) {
        registers_shrink<40>();
        if (threadIdx.x == 0) {
            for (int i = blockIdx.x / together; i < tiles_m * tiles_n; i += step) {
                tile_at tile(i, tiles_m, tiles_n);
                int row = (tile.m * PAIR + (PAIR > 1 ? (int)rank : 0)) * ROWS;
                for (int k = k_begin; k < k_end; k++, at.advance(slots)) {
                    uint32_t a = base + at.slot * sizes::SLOT_BYTES, w = a + sizes::A_BYTES;
                    uint32_t filled = full + 8 * at.slot;
                    barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
                    barrier_expect(filled, sizes::SLOT_BYTES);
                    load_box(a, &map_a, filled, k * DEPTH, row);
                    if (OUT_IN && PAIR == 1) {
                        load_box(w, &map_w, filled, k * DEPTH, tile.n * COLUMNS);
                    } else if (OUT_IN) {
                        int part = (int)rank * (COLUMNS / PAIR);
                        load_box_multicast(w + part * DEPTH * 2, &map_w, filled, k * DEPTH,
                                           tile.n * COLUMNS + part, (1 << PAIR) - 1);
                    } else if (PAIR == 1) {
                        for (int c = 0; c < COLUMNS; c += 64)
                            load_box(w + c / 64 * BOX, &map_w, filled, tile.n * COLUMNS + c,
                                     k * DEPTH);
                    } else {
                        int part = (int)rank * (COLUMNS / PAIR);
                        for (int c = part; c < part + COLUMNS / PAIR; c += 64)
                            load_box_multicast(w + c / 64 * BOX, &map_w, filled,
                                               tile.n * COLUMNS + c, k * DEPTH, (1 << PAIR) - 1);
                    }
                }
            }
        }
        __syncwarp();
        if (PAIR == 1 && split > 1)
            cluster_sync();
    } else {
        registers_grow<232>();
        int half = warp / 4 - 1, thread = threadIdx.x % 128;
        float d[COLUMNS / 2];
        for (int i = blockIdx.x / together; i < tiles_m * tiles_n; i += step) {
            uint32_t done = 0;
            for (int k = k_begin; k < k_end; k++, at.advance(slots)) {
                uint32_t slot = base + at.slot * sizes::SLOT_BYTES;
                uint64_t a = tile_descriptor(slot + half * (64 * DEPTH * 2));
                uint64_t w = tile_descriptor(slot + sizes::A_BYTES, OUT_IN ? 16 : BOX);
                barrier_wait(full + 8 * at.slot, at.parity);
                wgmma_begin();
                for (int j = 0; j < DEPTH / 16; j++) /* 32 bytes along k, or 16 rows of 128 */
                    wgmma<T, COLUMNS, !OUT_IN>(d, a + 2 * j, w + (OUT_IN ? 2 : 128) * j,
                                               k > k_begin || j > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (k > k_begin && lane < PAIR)
                    PAIR > 1 ? barrier_arrive_at(done, lane) : barrier_arrive(done);
                done = empty + 8 * at.slot;
            }
            wgmma_wait<0>();
            if (lane < PAIR)
                PAIR > 1 ? barrier_arrive_at(done, lane) : barrier_arrive(done);

            uint32_t sums = base + (half * (COLUMNS / 2) * 128 + thread) * 4;
            if (PAIR == 1 && split > 1) { /* the ring is idle: the sums go there */
                barrier_sync(1, 256);
#pragma unroll
                for (int j = 0; j < COLUMNS / 2; j++)
                    asm volatile("st.shared.f32 [%0], %1;" ::"r"(sums + 512 * j), "f"(d[j]));
                cluster_sync();
            }
            tile_at tile(i, tiles_m, tiles_n);
            int row = (tile.m * PAIR + (PAIR > 1 ? (int)rank : 0)) * ROWS + half * 64 +
                      warp % 4 * 16 + lane / 4;
#pragma unroll
            for (int g = 0; g < COLUMNS / 32; g++) {
                if (PAIR == 1 && split > 1) {
                    if (g % split != (int)rank)
                        continue;
#pragma unroll
                    for (int j = 16 * g; j < 16 * g + 16; j++) {
                        d[j] = load_cluster(sums + 512 * j, 0);
                        for (int other = 1; other < split; other++)
                            d[j] += load_cluster(sums + 512 * j, other);
                    }
                }
                finish<T, true>(p, row, tile.n * COLUMNS + 32 * g, d + 16 * g);
            }
        }
    }
    /* No block leaves while another may still arrive at its barriers or read its sums. */
    if (PAIR * split > 1)
        cluster_sync();
#endif
}

template <typename T, bool OUT_IN, int COLUMNS, int PAIR>
static cudaError_t launch(const bml_cuda_product *p, int split, cudaStream_t stream)
{
    CUtensorMap map_a, map_w;
    uint64_t size_a[] = {(uint64_t)p->k, (uint64_t)p->m}, pitch_a = (uint64_t)p->a_pitch;
    uint64_t size_w[] = {(uint64_t)(OUT_IN ? p->k : p->n), (uint64_t)(OUT_IN ? p->n : p->k)};
    int device, units;
    cudaError_t error = bml_cuda_tensor_map(&map_a, p->type, p->a, 2, size_a, &pitch_a, ROWS);
    if (!error)
        error = bml_cuda_tensor_map(&map_w, p->type, p->w, 2, size_w, size_w,
                                    OUT_IN ? COLUMNS / PAIR : DEPTH);
    if (!error)
        error = cudaGetDevice(&device);
    if (!error)
        error = cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device);
    if (error)
        return error;

    int tiles = (p->m + ROWS * PAIR - 1) / (ROWS * PAIR) * ((p->n + COLUMNS - 1) / COLUMNS);
    int blocks = split > 1              ? tiles * split
                 : tiles * PAIR < units ? tiles * PAIR
                                        : units / PAIR * PAIR;
    void *arguments[] = {&map_a, &map_w, (void *)p, &split};
    return bml_cuda_launch((const void *)product<T, OUT_IN, COLUMNS, PAIR>, dim3((unsigned)blocks),
                           THREADS, PAIR * split, ring<OUT_IN, COLUMNS>::BYTES, arguments, stream);
}

template <typename T, bool OUT_IN>
static cudaError_t launch_columns(const bml_cuda_product *p, bml_cuda_tile tile,
                                  cudaStream_t stream)
{
    switch (tile.columns) {
    case 64:
        return launch<T, OUT_IN, 64, 1>(p, tile.split, stream);
    case 96:
        return launch<T, OUT_IN, 96, 1>(p, tile.split, stream);
    case 128:
        return launch<T, OUT_IN, 128, 1>(p, tile.split, stream);
    case 192:
        return launch<T, OUT_IN, 192, 1>(p, tile.split, stream);
    default:
        return tile.pair == 2 ? launch<T, OUT_IN, 256, 2>(p, 1, stream)
                              : launch<T, OUT_IN, 256, 1>(p, tile.split, stream);
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
