/* The warp of decode.cu that fills the ring, with the block's weights and its heads' keys and
 * values, in the order of the pass. */
#ifndef BML_BACKEND_CUDA_DECODE_FILL_CUH
#define BML_BACKEND_CUDA_DECODE_FILL_CUH

#include "backend/cuda/decode.cuh"
#include "backend/cuda/kernels/ring.cuh"

#if __CUDA_ARCH__ >= 900

/* The keys that a block attends to. */
struct run {
    int begin, end;

    __device__ run(int position, int rank) : begin(0), end(position)
    {
        if (shared_out(position)) {
            begin = position * rank / CLUSTER;
            end = position * (rank + 1) / CLUSTER;
        }
    }

    __device__ static bool shared_out(int position)
    {
        return position > TOGETHER;
    }
};

/*
 * One thread that sees the ring from the other side. Stages that are used together arrive at the
 * first one's mbarrier. No more than two such groups are on their way at once, what keeps the
 * memory busy: more would only queue up, and what blocks tell each other would wait in that queue.
 */
struct filler {
    const arguments &p;
    const bml_cuda_share &s;
    ring next;
    bool short_ring;        /* its stages are in use again two groups later: one must do */
    uint32_t group, parity; /* mbarrier of this group, and of the one before; 0: none yet */
    uint32_t before, before_parity;
    const char *from;

    /* Begins a group of which BYTES will come. */
    __device__ void begin_group(uint32_t bytes)
    {
        if (short_ring && group)
            barrier_wait(group, parity);
        else if (before)
            barrier_wait(before, before_parity);
        before = group;
        before_parity = parity;
        group = next.full_now();
        parity = next.round;
        barrier_wait(next.empty_now(), next.round ^ 1);
        barrier_expect(group, bytes);
    }

    /* Makes room for one stage more of the group. */
    __device__ void more()
    {
        next.next();
        barrier_wait(next.empty_now(), next.round ^ 1);
        barrier_arrive(next.full_now()); /* nothing comes to this one: on to its next use */
    }

    /* N tiles, TOGETHER of them in a group, each of STAGES stages: FIRST bytes, and SECOND. */
    __device__ void tiles(int n, int together, int stages, uint32_t first, uint32_t second)
    {
#pragma unroll 1
        for (int i = 0; i < n; i += together) {
            int here = min(together, n - i);
            begin_group(here * (first + second));
#pragma unroll 1
            for (int j = 0; j < here * stages; j++) {
                uint32_t bytes = j % 2 ? second : first;
                if (j)
                    more();
                bulk_copy(next.stage(), from, bytes, group, true);
                from += bytes;
            }
            next.next();
        }
    }

    /* A stage of keys, and one of the same tokens' values. */
    __device__ void keys(const layer &l)
    {
        size_t key_bytes = p.plan.head_dim * (p.kv == BML_F32 ? 4 : 2);
        run keys(p.position, s.rank);
        for (int j = 0; j < s.n_heads; j++) {
            size_t head = (size_t)p.slot * p.plan.n_head + s.cluster + j * p.plan.n_clusters;
            for (int key = keys.begin; key < keys.end; key += p.keys_of_stage) {
                uint32_t bytes = (uint32_t)(min(p.keys_of_stage, keys.end - key) * key_bytes);
                size_t at = (head * p.n_ctx + key) * key_bytes;
                begin_group(2 * bytes);
                bulk_copy(next.stage(), l.k + at, bytes, group, false);
                more();
                bulk_copy(next.stage(), l.v + at, bytes, group, false);
                next.next();
            }
        }
    }
};

template <bml_weight_format F, bml_weight_format HEAD, int N_EMBD>
__device__ static void fill(const ring &r, const arguments &p, const bml_cuda_share &s)
{
    enum { QKV_TILES, KEYS_OF_HEADS, PROJECT_CHUNKS, EXPAND_TILES, CONTRACT_TILES, HEAD_TILES };
    constexpr bml_cuda_unit u = bml_cuda_unit_of(F), head = bml_cuda_unit_of(HEAD);
    uint32_t columns = bml_cuda_column_bytes(&p.plan, u);
    filler f = {p, s, r, r.n_stages < 4 * together_for(N_EMBD), 0, 0, 0, 0, nullptr};
#pragma unroll 1
    for (int i = 0; i < p.n_layer + p.want_row; i++) {
        bool last = i == p.n_layer;
        f.from = p.stream + i * p.layer_bytes + (last ? p.head_begin : p.begin)[blockIdx.x];
#pragma unroll 1 /* once in the program, however often in the pass */
        for (int what = last ? HEAD_TILES : QKV_TILES; what < (last ? HEAD_TILES + 1 : HEAD_TILES);
             what++) {
            int n = what == QKV_TILES    ? s.qkv_tiles
                    : what == HEAD_TILES ? s.vocab_tiles
                                         : s.hidden_tiles;
            if (what == KEYS_OF_HEADS)
                f.keys(p.layers[i]);
            else if (what == PROJECT_CHUNKS)
                f.tiles(bml_cuda_proj_stages(&p.plan, &s), 1, 1, bml_cuda_proj_bytes(&s, u), 0);
            else if (what == CONTRACT_TILES)
                f.tiles(n, 1, 2, columns, columns);
            else
                f.tiles(n, together_for(N_EMBD), 2,
                        p.chunks * (what == HEAD_TILES ? head : u).first_bytes,
                        p.chunks * (what == HEAD_TILES ? head : u).second_bytes);
        }
    }
}

#endif

#endif
