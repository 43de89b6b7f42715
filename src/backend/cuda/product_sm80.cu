/*
 * The product on any chip with 16-bit matrix units, and for shapes the copy engine does not take:
 * tiles of 128 x 128, 32 of k at a time through two buffers, eight warps of 64 x 32.
 */
#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/mma_sm80.cuh"
#include "backend/cuda/product.h"

enum {
    TILE = 128,
    DEPTH = 32,
    THREADS = 256,
    PITCH = DEPTH + 8, /* rows in shared memory: eight of them start in different banks */
};

/* A buffer's worth of a matrix on its way to shared memory: TILE rows from ROW, DEPTH columns. */
template <typename T> struct carrier {
    enum { COUNT = TILE * DEPTH / 8 / THREADS, PER_ROW = DEPTH / 8 };
    uint4 held[COUNT];

    __device__ void load(const T *from, int pitch, int row, int n_rows, int column, int n_columns,
                         bool wide)
    {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int at = threadIdx.x + i * THREADS, r = row + at / PER_ROW;
            int c = column + at % PER_ROW * 8;
            held[i] = r < n_rows ? load_eight(from + (size_t)r * pitch, c, n_columns, wide)
                                 : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ void store(T *to) const
    {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int at = threadIdx.x + i * THREADS;
            *(uint4 *)(to + at / PER_ROW * PITCH + at % PER_ROW * 8) = held[i];
        }
    }
};

template <typename T>
static __global__ __launch_bounds__(THREADS,
                                    2) void product(const __grid_constant__ bml_cuda_product p,
                                                    bool wide_a, bool wide_w)
{
    __shared__ __align__(16) T a_tile[2][TILE * PITCH], w_tile[2][TILE * PITCH];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;
    int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    float d[4][16] = {};
    carrier<T> a, w;
    auto load = [&](int k) {
        a.load((const T *)p.a, p.a_pitch, row, p.m, k, p.k, wide_a);
        w.load((const T *)p.w, p.k, column, p.n, k, p.k, wide_w);
    };

    allow_next();
    await_previous();
    load(0);
    for (int k = 0, now = 0; k < p.k; k += DEPTH, now ^= 1) {
        a.store(a_tile[now]);
        w.store(w_tile[now]);
        __syncthreads();
        if (k + DEPTH < p.k)
            load(k + DEPTH);
#pragma unroll
        for (int j = 0; j < DEPTH; j += 16) {
            uint32_t a_blocks[4][4], w_blocks[2][4]; /* of w: 16 columns, two n8 blocks, each */
#pragma unroll
            for (int i = 0; i < 4; i++)
                load_blocks(a_blocks[i], a_tile[now] + (warp_row + 16 * i + lane % 16) * PITCH + j +
                                             lane / 16 * 8);
#pragma unroll
            for (int i = 0; i < 2; i++)
                load_blocks(w_blocks[i],
                            w_tile[now] +
                                (warp_column + 16 * i + lane / 16 * 8 + lane % 8) * PITCH + j +
                                lane / 8 % 2 * 8);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const uint32_t *b = w_blocks[i % 4 / 2] + i % 2 * 2;
                mma<T>(d[i / 4] + i % 4 * 4, a_blocks[i / 4], b[0], b[1]);
            }
        }
    }
    if (p.bias)
#pragma unroll
        for (int i = 0; i < 4; i++)
            add_bias<4>(d[i], p.bias + column + warp_column, p.n - column - warp_column);
    each_unit<4>(d[0], [&](int u, float *v) {
        finish_unit<T>(p, row + warp_row + 16 * u + lane / 4, column + warp_column, v);
    });
}

cudaError_t bml_cuda_product_sm80(const bml_cuda_product *p, cudaStream_t stream)
{
    bool wide_a = p->a_pitch % 8 == 0 && bml_cuda_aligned(p->a);
    bool wide_w = p->k % 8 == 0 && bml_cuda_aligned(p->w);
    dim3 grid((unsigned)((p->n + TILE - 1) / TILE), (unsigned)((p->m + TILE - 1) / TILE));
    void *arguments[] = {(void *)p, &wide_a, &wide_w};
    const void *kernel =
        p->type == BML_F16 ? (const void *)product<__half> : (const void *)product<__nv_bfloat16>;
    return bml_cuda_launch(kernel, grid, THREADS, 1, 0, arguments, stream);
}
