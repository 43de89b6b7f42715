/* The warp of decode.cu and decode_few.cu that fills the ring, with the block's weights and its
 * heads' keys and values, in the order of the pass. */
#ifndef BML_BACKEND_CUDA_DECODE_FILL_CUH
#define BML_BACKEND_CUDA_DECODE_FILL_CUH

#include "backend/cuda/decode.cuh"
#include "backend/cuda/kernels/ring.cuh"
#include "backend/cuda/launch.cuh"

#if __CUDA_ARCH__ >= 900

/* The keys in a slot that a block attends to. */
struct run {
    int slot, begin, end;
};

/*
 * One thread that sees the ring from the other side. Stages that are used together arrive at the
 * first one's mbarrier. No more than two such groups are on their way at once, what keeps the
 * memory busy: more would only queue up, and what blocks tell each other would wait in that queue.
 * See decode.cuh for ABREAST and KEY_STAGES.
 */
template <int ABREAST, int KEY_STAGES> struct filler {
    const arguments &p;
    const bml_cuda_share &s;
    ring next;
    int begun;              /* stages, this one included */
    uint32_t group, parity; /* mbarrier of this group, and which its first stage was */
    int group_at;
    uint32_t before, before_parity; /* of the one before; 0: none yet */
    int before_at;
    const char *from;

    __device__ __forceinline__ void advance()
    {
        next.next();
        begun++;
    }

    /* Begins a group of which BYTES will come, when the one before the last is there: if its first
     * stage has been filled again since, it was. */
    __device__ __forceinline__ void begin_group(uint32_t bytes)
    {
        if (before && begun - before_at <= next.n_stages)
            barrier_wait(before, before_parity);
        before = group;
        before_parity = parity;
        before_at = group_at;
        group = next.full_now();
        parity = next.round;
        group_at = begun;
        barrier_wait(next.empty_now(), next.round ^ 1);
        copies_begin(group, bytes);
    }

    /* Makes room for one stage more of the group. */
    __device__ __forceinline__ void more()
    {
        advance();
        barrier_wait(next.empty_now(), next.round ^ 1);
        barrier_arrive(next.full_now()); /* nothing comes to this one: on to its next use */
    }

    /* N tiles, TOGETHER of them in a group, each of a stage of FIRST bytes and, if SECOND is not 0,
     * one of SECOND. Groups whose first tile has none of the bits KEPT stay in L2 for the next
     * step; 0: none do. */
    __device__ __forceinline__ void tiles(int n, int together, uint32_t first, uint32_t second,
                                          int kept = 0)
    {
        int stages = second ? 2 : 1;
#pragma unroll 1
        for (int i = 0; i < n; i += together) {
            int here = min(together, n - i);
            begin_group(here * (first + second));
#pragma unroll 1
            for (int j = 0; j < here * stages; j++) {
                uint32_t bytes = second && j % 2 ? second : first;
                if (j)
                    more();
                bulk_copy(next.stage(), from, bytes, group, kept && !(i & kept));
                from += bytes;
            }
            copies_end(group);
            advance();
        }
    }

    /* Keys, and the same tokens' values: in turn for heads side by side. If heads are not side by
     * side, LOT stages of keys at a time, with their values, are a group. */
    __device__ __forceinline__ void keys(const layer &l, run keys, int lot)
    {
        size_t key_bytes = p.plan.head_dim * (p.kv == BML_F32 ? 4 : 2);
        for (int j = 0; j < s.n_heads; j += ABREAST) {
            int begun = 0; /* stages of a group */
            for (int key = keys.begin; key < keys.end; key += p.keys_of_stage)
                for (int i = j; i < min(j + ABREAST, s.n_heads); i++) {
                    size_t head =
                        (size_t)keys.slot * p.plan.n_head + s.cluster + i * p.plan.n_clusters;
                    int left = keys.end - key;
                    uint32_t bytes = (uint32_t)(min(p.keys_of_stage, left) * key_bytes);
                    size_t at = (head * p.n_ctx + key) * key_bytes, behind = 0;
                    if (begun)
                        more();
                    else
                        begin_group(2 * (uint32_t)(min(lot * p.keys_of_stage, left) * key_bytes));
                    bulk_copy(next.stage(), l.k + at, bytes, group, false);
                    if (KEY_STAGES > 1)
                        more();
                    else
                        behind = p.keys_of_stage * key_bytes;
                    bulk_copy(next.stage() + behind, l.v + at, bytes, group, false);
                    if (++begun == lot || left <= p.keys_of_stage) {
                        copies_end(group);
                        advance();
                        begun = 0;
                    }
                }
        }
    }
};

template <bml_weight_format F, bml_weight_format HEAD, int N_EMBD, int ABREAST>
__device__ static void fill(const ring &r, const arguments &p, const bml_cuda_share &s, run keys,
                            int lot)
{
    enum { QKV_TILES, KEYS_OF_HEADS, PROJECT_CHUNKS, EXPAND_TILES, CONTRACT_TILES, CONTRACT_REST };
    enum { HEAD_TILES = CONTRACT_REST + 1 };
    constexpr bml_cuda_unit u = bml_cuda_unit_of(F), head = bml_cuda_unit_of(HEAD);
    filler<ABREAST, key_stages_for(N_EMBD)> f = {p, s, r};
#pragma unroll 1
    for (int i = 0; i < p.n_layer + p.want_row; i++) {
        bool last = i == p.n_layer;
        f.from = p.stream + i * p.layer_bytes + (last ? p.head_begin : p.begin)[blockIdx.x];
#pragma unroll 1 /* once in the program, however often in the pass */
        for (int what = last ? HEAD_TILES : QKV_TILES; what < (last ? HEAD_TILES + 1 : HEAD_TILES);
             what++) {
            int n = what == QKV_TILES        ? s.qkv_tiles
                    : what == PROJECT_CHUNKS ? bml_cuda_proj_stages(&p.plan, &s)
                    : what == EXPAND_TILES   ? s.hidden_tiles
                    : what == CONTRACT_TILES ? s.clusters_tiles / BML_CUDA_STAGE_TILES
                    : what == CONTRACT_REST  ? s.clusters_tiles % BML_CUDA_STAGE_TILES > 0
                                             : s.vocab_tiles;
            if (what == KEYS_OF_HEADS) {
                if (i == 0)
                    await_previous(); /* which may still be writing the last one */
                f.keys(p.layers[i], keys, lot);
            } else if (what == PROJECT_CHUNKS)
                f.tiles(n, 1, bml_cuda_proj_bytes(&s, u), 0);
            else if (what == CONTRACT_TILES)
                f.tiles(n, p.columns, bml_cuda_column_bytes(&s, u, BML_CUDA_STAGE_TILES), 0);
            else if (what == CONTRACT_REST)
                f.tiles(n, 1, bml_cuda_column_bytes(&s, u, s.clusters_tiles % BML_CUDA_STAGE_TILES),
                        0);
            else
                f.tiles(n, together_for(N_EMBD),
                        p.chunks * (what == HEAD_TILES ? head : u).first_bytes,
                        p.chunks * (what == HEAD_TILES ? head : u).second_bytes,
                        what == HEAD_TILES ? p.kept : 0);
        }
    }
}

#endif

#endif
