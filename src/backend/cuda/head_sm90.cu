/*
 * The head of a decoding batch: logits are looked at where they are made, in registers. A block has
 * 64 rows of a in shared memory for good; W passes through a ring, a tile of columns after another.
 * The blocks of up to 256 rows form a cluster, which reads W once: each loads a share for all.
 */
#include "backend/cuda/head.h"
#include "backend/cuda/kernels/common.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/sm90.cuh"
#include "backend/cuda/tensor_map.h"

enum {
    ROWS = 64,
    COLUMNS = 128, /* of a tile; a warpgroup has half of them */
    HALF = COLUMNS / 2,
    DEPTH = 64,      /* of k in a slot: one swizzled 128-byte row */
    CONSUMERS = 256, /* threads that multiply */
    THREADS = CONSUMERS + 32,
    A_BYTES = ROWS * DEPTH * 2,
    SLOT_BYTES = COLUMNS * DEPTH * 2,
    SHARED = 225 << 10,
    MAX_SLOTS = 8,
    MIN_SLOTS = 3,
    MAX_CLUSTER = 4,
    PART_THREADS = 64,
};

static __host__ __device__ int slots_beside(int k_blocks)
{
    return min((int)MAX_SLOTS, (SHARED - k_blocks * A_BYTES - 1024) / SLOT_BYTES);
}

/* Looks at a lane's logits of row H (0 or 1), from column FIRST on; those below N count. */
static __device__ __forceinline__ void look(candidate &best, const float (&d)[HALF / 2], int h,
                                            int first, int n)
{
#pragma unroll
    for (int j = 0; j < HALF / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float x = d[4 * j + 2 * h + i];
            int c = first + 8 * j + i;
            bool finite = isfinite(x);
            if (c < n && best.id >= 0 && (!finite || x > best.logit))
                best = candidate{x, finite ? c : -1};
        }
}

template <typename T>
static __global__ __launch_bounds__(THREADS, 1) void head(const __grid_constant__ CUtensorMap map_a,
                                                          const __grid_constant__ CUtensorMap map_w,
                                                          candidate *parts, int m, int n, int k,
                                                          int n_blocks)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char shared[];
    __shared__ uint64_t full[MAX_SLOTS], empty[MAX_SLOTS], a_full;
    __shared__ candidate first_half[ROWS];
    uint32_t a = (shared_address(shared) + 1023) & ~1023u;
    int k_blocks = (k + DEPTH - 1) / DEPTH, slots = slots_beside(k_blocks);
    uint32_t ring = a + k_blocks * A_BYTES;
    int rank = (int)cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int cluster = blockIdx.x / n_blocks, n_clusters = gridDim.x / n_blocks;
    int tiles = (n + COLUMNS - 1) / COLUMNS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < slots; i++) {
            barrier_init(shared_address(full + i), 1);
            barrier_init(shared_address(empty + i), CONSUMERS / 32 * n_blocks);
        }
        barrier_init(shared_address(&a_full), 1);
        barrier_init_fence();
    }
    cluster_exchange();
    allow_next();

    ring_place at = {0, 0};
    if (threadIdx.x >= CONSUMERS) {
        if (lane == 0) {
            int share = COLUMNS / n_blocks;
            bool waited = false;
            auto load_a = [&]() {
                await_previous();
                waited = true;
                barrier_expect(shared_address(&a_full), k_blocks * A_BYTES);
                for (int i = 0; i < k_blocks; i++)
                    load_box(a + i * A_BYTES, &map_a, shared_address(&a_full), i * DEPTH,
                             rank * ROWS);
            };
            for (int tile = cluster, i = 0; tile < tiles; tile += n_clusters)
                for (int b = 0; b < k_blocks; b++, i++, at.advance(slots)) {
                    uint32_t filled = shared_address(full + at.slot);
                    if (i == slots) /* what does not depend on a is on its way */
                        load_a();
                    barrier_wait(shared_address(empty + at.slot), at.parity ^ 1);
                    barrier_expect(filled, SLOT_BYTES);
                    uint32_t to = ring + at.slot * SLOT_BYTES + rank * share * 128;
                    int column = tile * COLUMNS + rank * share;
                    if (n_blocks > 1)
                        load_box_multicast(to, &map_w, filled, b * DEPTH, column,
                                           (uint16_t)((1 << n_blocks) - 1));
                    else
                        load_box(to, &map_w, filled, b * DEPTH, column);
                }
            if (!waited)
                load_a();
            /* The block stays until nobody will arrive at its barriers any more. */
            for (int i = 0; i < slots; i++, at.advance(slots))
                barrier_wait(shared_address(empty + at.slot), at.parity ^ 1);
        }
        __syncwarp();
    } else {
        int half = threadIdx.x / 128;
        candidate best[2] = {{-INFINITY, NO_ID}, {-INFINITY, NO_ID}};
        float d[HALF / 2];
        auto release = [&](int slot) {
            if (lane < n_blocks)
                barrier_arrive_at(shared_address(empty + slot), lane);
        };
        barrier_wait(shared_address(&a_full), 0);
        for (int tile = cluster; tile < tiles; tile += n_clusters) {
            int done = 0;
#pragma unroll 1
            for (int b = 0; b < k_blocks; b++, at.advance(slots)) {
                uint64_t tile_a = tile_descriptor(a + b * A_BYTES);
                uint64_t tile_w = tile_descriptor(ring + at.slot * SLOT_BYTES + half * HALF * 128);
                barrier_wait(shared_address(full + at.slot), at.parity);
                wgmma_begin();
#pragma unroll
                for (int j = 0; j < DEPTH / 16; j++)
                    wgmma<T, HALF>(d, tile_a + 2 * j, tile_w + 2 * j, b > 0 || j > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (b > 0)
                    release(done);
                done = at.slot;
            }
            wgmma_wait<0>();
            sums_ready(d);
            release(done);
#pragma unroll
            for (int h = 0; h < 2; h++)
                look(best[h], d, h, tile * COLUMNS + half * HALF + 2 * (lane % 4), n);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = warp % 4 * 16 + lane / 4 + 8 * h;
#pragma unroll
            for (int step = 1; step < 4; step *= 2)
                best[h] = better(best[h], candidate{__shfl_xor_sync(~0u, best[h].logit, step),
                                                    __shfl_xor_sync(~0u, best[h].id, step)});
            if (half == 0 && lane % 4 == 0)
                first_half[row] = best[h];
        }
        barrier_sync(1, CONSUMERS);
        await_previous(); /* what is written now may have been read before */
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = warp % 4 * 16 + lane / 4 + 8 * h;
            if (half == 1 && lane % 4 == 0 && rank * ROWS + row < m)
                parts[(size_t)(rank * ROWS + row) * n_clusters + cluster] =
                    better(first_half[row], best[h]);
        }
    }
#else
    __trap(); /* this code was built for another chip */
#endif
}

/* The best of each row's parts. */
static __global__ void choose(bml_cuda_choice choice, const candidate *parts, int n_parts)
{
    __shared__ candidate all[PART_THREADS / 32];
    candidate best = {-INFINITY, NO_ID};
    allow_next();
    await_previous();
    for (int i = threadIdx.x; i < n_parts; i += PART_THREADS)
        best = better(best, parts[(size_t)blockIdx.x * n_parts + i]);
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0)
        all[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < PART_THREADS / 32; i++)
            best = better(best, all[i]);
        give(choice, blockIdx.x, best.id);
    }
}

/* The blocks whose 64 rows each are all of them: 1, 2 or 4. */
static int cluster_for(int m)
{
    return m <= ROWS ? 1 : m <= 2 * ROWS ? 2 : MAX_CLUSTER;
}

static const void *kernel_for(bml_dtype type)
{
    return type == BML_F16 ? (const void *)head<__half> : (const void *)head<__nv_bfloat16>;
}

static size_t bytes_for(int k)
{
    int k_blocks = bml_cuda_divided_up(k, DEPTH);
    return (size_t)k_blocks * A_BYTES + slots_beside(k_blocks) * SLOT_BYTES + 1024;
}

/* How many clusters the chip holds at once; none, where it has too few multiprocessors together. */
static cudaError_t resident_clusters(int *n, const bml_cuda_head *h)
{
    const void *kernel = kernel_for(h->type);
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)cluster_for(h->m);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)cluster_for(h->m));
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes_for(h->k);
    config.attrs = &cluster;
    config.numAttrs = 1;
    cudaError_t error = bml_cuda_allow_shared(kernel, SHARED);
    return error ? error : cudaOccupancyMaxActiveClusters(n, kernel, &config);
}

bool bml_cuda_takes_head(const bml_cuda_head *h)
{
    bml_cuda_chip chip;
    if (h->m <= 0 || h->m > MAX_CLUSTER * ROWS || h->n <= 1 || h->k % 8 != 0 ||
        !bml_cuda_aligned(h->a) || !bml_cuda_aligned(h->w) ||
        slots_beside(bml_cuda_divided_up(h->k, DEPTH)) < MIN_SLOTS ||
        bml_cuda_current_chip(&chip) || chip.major != 9)
        return false;
    int n_clusters = 0;
    if (cluster_for(h->m) == 1)
        return true;
    if (resident_clusters(&n_clusters, h))
        cudaGetLastError(); /* which nobody else must find */
    return n_clusters > 0;
}

cudaError_t bml_cuda_head_argmax(const bml_cuda_head *h, cudaStream_t stream)
{
    CUtensorMap map_a, map_w;
    int n_blocks = cluster_for(h->m), m = h->m, n = h->n, k = h->k, n_clusters = 0;
    uint64_t size_a[] = {(uint64_t)k, (uint64_t)m}, size_w[] = {(uint64_t)k, (uint64_t)n};
    cudaError_t error = bml_cuda_tensor_map(&map_a, h->type, h->a, 2, size_a, size_a, ROWS);
    if (!error)
        error = bml_cuda_tensor_map(&map_w, h->type, h->w, 2, size_w, size_w, COLUMNS / n_blocks);
    if (!error)
        error = resident_clusters(&n_clusters, h);
    if (error)
        return error;
    n_clusters = min(n_clusters, bml_cuda_divided_up(n, COLUMNS));
    candidate *parts = (candidate *)h->parts;
    void *arguments[] = {&map_a, &map_w, &parts, &m, &n, &k, &n_blocks};
    error = bml_cuda_launch_within(kernel_for(h->type), dim3((unsigned)(n_clusters * n_blocks)),
                                   THREADS, n_blocks, bytes_for(k), SHARED, arguments, stream);
    bml_cuda_choice choice = h->choice;
    void *chosen[] = {&choice, &parts, &n_clusters};
    return error ? error
                 : bml_cuda_launch((const void *)choose, dim3((unsigned)m), PART_THREADS, 1, 0,
                                   chosen, stream);
}
