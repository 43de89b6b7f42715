/*
 * The epilogue of wgmma's sums. A warp holds 16 rows of a tile; 32 columns at a time it lays them
 * into shared memory, from where whole stretches of rows go out: 16-bit results in pieces of 16
 * bytes, what is added to the residual stream through the copy engine, which adds where the rows
 * lie and lets nobody wait. Bytes 16 c and on of a row are swizzled, so that no banks are met
 * twice.
 */
#ifndef BML_BACKEND_CUDA_EPILOGUE_SM90_CUH
#define BML_BACKEND_CUDA_EPILOGUE_SM90_CUH

#include "backend/cuda/epilogue.cuh"
#include "backend/cuda/sm90.cuh"

enum { STAGE_BYTES = 2048, STAGE_ROWS = 16 };

/* What the epilogue of a tile needs, which comes while the sums are made. */
template <int COLUMNS> struct notes {
    float bias[COLUMNS];
    int32_t slot[128], position[128];

    /* Thread THREAD's part, of 128, for a tile from ROW and COLUMN. */
    __device__ __forceinline__ void fetch(const bml_cuda_product &p, int row, int column,
                                          int thread)
    {
        if (p.bias)
            for (int c = thread; c < COLUMNS; c += 128)
                copy_word(shared_address(bias + c), p.bias + column + c, column + c < p.n);
        if (p.epilogue == BML_CUDA_QKV) {
            bool there = row + thread < p.m;
            copy_word(shared_address(slot + thread), p.slot + row + thread, there);
            copy_word(shared_address(position + thread), p.position + row + thread, there);
        }
    }
};

/* Where a lane's pieces of a strip go: of rows ROW and ROW + 8, eight columns from FIRST, in each
 * unit 32 further. */
template <typename T> struct pieces {
    char *row[2];
    bool there[2];
    int column;

    __device__ __forceinline__ pieces(const bml_cuda_product &p, int r, int first) : column(first)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            there[h] = r + 8 * h < p.m;
            row[h] = (char *)p.out + (size_t)(r + 8 * h) * p.out_pitch * sizeof(T);
        }
    }

    /* Of columns from C, calls PUT with each row's place. */
    template <typename F>
    __device__ __forceinline__ void places(const bml_cuda_product &, int c, F put) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
            put(h, row[h] + c * (int)sizeof(T));
    }
};

/* The same where they are queries, keys and values: without branches, since a warp may hold columns
 * of two kinds. */
template <typename T> struct cached_pieces : pieces<T> {
    char *key[2]; /* of the rows' first heads */
    uint32_t divisor;

    /* SLOT and POSITION are those of row R. */
    __device__ __forceinline__ cached_pieces(const bml_cuda_product &p, int r, int first,
                                             const int32_t *slot, const int32_t *position)
        : pieces<T>(p, r, first), divisor(head_divisor(p))
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            size_t line = (size_t)cache_line(p.cache, slot[8 * h], position[8 * h]);
            key[h] = (char *)p.cache.k + line * p.cache.head_dim * sizeof(T);
        }
    }

    template <typename F>
    __device__ __forceinline__ void places(const bml_cuda_product &p, int c, F put) const
    {
        int head_dim = p.cache.head_dim, width = p.cache.n_head * head_dim;
        bool cached = c >= width, value = c >= 2 * width;
        int rest = c - (value ? 2 * width : cached ? width : 0);
        int head = head_dim > 1 ? (int)__umulhi((uint32_t)rest, divisor) : rest;
        int between = (p.cache.n_ctx - 1) * head_dim * (int)sizeof(T);
        int64_t in_cache = (int64_t)head * between;
        if (value)
            in_cache += (char *)p.cache.v - (char *)p.cache.k;
        int64_t at = (cached ? in_cache : 0) + rest * (int)sizeof(T);
#pragma unroll
        for (int h = 0; h < 2; h++)
            put(h, (cached ? key[h] : this->row[h]) + at);
    }
};

/* A unit of 16-bit results to its place; two rows share 128 bytes of the stage. */
template <typename P>
__device__ __forceinline__ void store_unit16(const bml_cuda_product &p, uint32_t stage, int u,
                                             const uint32_t (&v)[8], const P &pieces)
{
    int lane = threadIdx.x % 32, c = pieces.column + 32 * u;
    auto at = [&](int r, int chunk) {
        return stage + r / 2 * 128 + r % 2 * 64 + ((chunk ^ (r / 2 & 3)) << 4);
    };
#pragma unroll
    for (int h = 0; h < 2; h++)
        store_blocks(at(8 * h + lane % 8, lane / 8), v[4 * h], v[4 * h + 1], v[4 * h + 2],
                     v[4 * h + 3]);
    __syncwarp();
    pieces.places(p, c, [&](int h, char *to) {
        store_if(pieces.there[h] && c < p.n, to, load_shared(at(8 * h + lane / 4, lane % 4)));
    });
}

/* Adds a unit to the residual stream; MAP is that of its boxes. */
__device__ __forceinline__ void add_unit(const CUtensorMap *map, uint32_t stage, int row,
                                         int column, const float *d)
{
    int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; i++) { /* by blocks of columns, then rows */
        int chunk = i / 2 * 2 + c / 2;
        store_shared(stage + (r + i % 2 * 8) * 128 + ((chunk ^ r) << 4) + c % 2 * 8, d[2 * i],
                     d[2 * i + 1]);
    }
    shared_written_fence();
    __syncwarp();
    if (lane == 0)
        add_box(map, stage, column, row);
}

/*
 * The epilogue of a warp's sums, rows from ROW, COUNT units from COLUMN; those of UNITS, a bit
 * each. STAGES of its own lie at STAGE; SLOT and POSITION are those of its rows, for QKV. What a
 * pass often does stands there COUNT times, each short. Units alternate between two places, so that
 * one is written while the other is read.
 */
template <typename T, int COUNT, int STAGES>
__device__ __forceinline__ void finish(const bml_cuda_product &p, const CUtensorMap *map,
                                       uint32_t stage, int row, int column, float *d,
                                       uint32_t units, const int32_t *slot, const int32_t *position)
{
    int lane = threadIdx.x % 32;
    auto each = [&](auto act) {
#pragma unroll
        for (int u = 0; u < COUNT; u++)
            if (units >> u & 1)
                act(u, d + 16 * u);
    };
    uint32_t place = 0;
    auto store = [&](int u, const float *v, const auto &places) {
        uint32_t packed[8]; /* by rows */
#pragma unroll
        for (int i = 0; i < 8; i++)
            packed[i] = pack<T>(v[i % 4 * 4 + i / 4 * 2], v[i % 4 * 4 + i / 4 * 2 + 1]);
        store_unit16(p, stage + place, u, packed, places);
        place ^= STAGE_BYTES / 2;
    };
    int piece_row = row + lane / 4, piece_column = column + lane % 4 * 8;
    if (p.epilogue == BML_CUDA_RESIDUAL) {
        bool first = true;
        each([&](int u, float *v) {
            if (lane == 0 && first)
                boxes_read<0>();
            else if (lane == 0)
                boxes_read<STAGES - 1>();
            __syncwarp();
            add_unit(map, stage + place, row, column + 32 * u, v);
            place ^= (STAGES - 1) * STAGE_BYTES;
            first = false;
        });
    } else if (p.epilogue == BML_CUDA_QKV) {
        cached_pieces<T> places(p, piece_row, piece_column, slot + lane / 4, position + lane / 4);
        each([&](int u, float *v) { store(u, v, places); });
    } else if (p.epilogue == BML_CUDA_ACTIVATION && p.activation == BML_ACT_GELU_TANH) {
        pieces<T> places(p, piece_row, piece_column);
        each([&](int u, float *v) {
            activate<16>(v, BML_ACT_GELU_TANH);
            store(u, v, places);
        });
    } else {
        pieces<T> places(p, piece_row, piece_column);
        each_unit<COUNT>(d, [&](int u, float *v) {
            if (!(units >> u & 1))
                return;
            if (p.epilogue == BML_CUDA_STORE32) {
                put32<false>(p, piece_row, column + 32 * u, v);
                return;
            }
            activate<16>(v, p.activation);
            store(u, v, places);
        });
    }
    __syncwarp();
}

#endif
