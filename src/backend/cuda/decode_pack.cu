/* Copies weights into the order in which the blocks of decode.cu use them; see decode_plan.h. */
#include "backend/cuda/decode.cuh"

enum product { QKV_ROWS, PROJ_ROWS, EXPAND_ROWS, CONTRACT_COLUMNS, HEAD_ROWS };

/* Matrix rows as weight.h has them. */
struct source {
    const char *rows;
    size_t row_bytes;
    int n_rows;
};

__device__ static const char *row_at(source from, int row)
{
    return from.rows + (size_t)min(row, from.n_rows - 1) * from.row_bytes;
}

/* N words from each of two rows, in turn; zeros if a row is not there. */
__device__ static void both_rows(uint32_t *to, const char *a, const char *b, int n, bool has_a,
                                 bool has_b)
{
    for (int i = 0; i < n; i++) {
        to[2 * i] = has_a ? ((const uint32_t *)a)[i] : 0;
        to[2 * i + 1] = has_b ? ((const uint32_t *)b)[i] : 0;
    }
}

/* Unit H of chunk K of the tile that begins with row FIRST. */
template <bml_weight_format F>
__device__ static void pack_row_unit(char *to, source from, int first, int k, int h)
{
    constexpr bml_cuda_unit unit = bml_cuda_unit_of(F);
    int lane = threadIdx.x % 32, c = lane % 4, row = first + lane / 4 * 2;
    const char *a = row_at(from, row), *b = row_at(from, row + 1);
    bool has_a = row < from.n_rows, has_b = row + 1 < from.n_rows;
    if constexpr (F == BML_WEIGHTS_Q4 || F == BML_WEIGHTS_Q8) {
        size_t at = bml_cuda_block_at(F, k);
        if constexpr (F == BML_WEIGHTS_Q4) {
            at += 8 * c + 4 * h;
            both_rows((uint32_t *)to + 2 * lane, a + at, b + at, 1, has_a, has_b);
        } else {
            at += 32 * h + 8 * c;
            both_rows((uint32_t *)to + 4 * lane, a + at, b + at, 2, has_a, has_b);
        }
        size_t scales = bml_cuda_scales_at(F, k);
        int i = k % BML_CUDA_GROUP;
        if (c == 0 && F == BML_WEIGHTS_Q4) {
            char *scale = to + unit.row_data + lane / 4 * 2;
            scale[0] = has_a ? a[scales + 2 * i + h] : 0;
            scale[1] = has_b ? b[scales + 2 * i + h] : 0;
        } else if (c == 0 && h == 0) {
            uint16_t *scale = (uint16_t *)(to + unit.row_data) + lane / 4 * 2;
            scale[0] = has_a ? ((const uint16_t *)(a + scales))[i] : 0;
            scale[1] = has_b ? ((const uint16_t *)(b + scales))[i] : 0;
        }
    } else if constexpr (F == BML_WEIGHTS_F32) {
        for (int j = 0; j < 2; j++) {
            size_t at = 4 * (size_t)(64 * k + 32 * h + 16 * j + 4 * c);
            float4 none = {}, *out = (float4 *)to + 64 * j + lane;
            out[0] = has_a ? *(const float4 *)(a + at) : none;
            out[32] = has_b ? *(const float4 *)(b + at) : none;
        }
    } else {
        for (int s = 0; s < 2; s++) {
            size_t at = 2 * (size_t)(64 * k + 32 * h + 8 * c + 4 * s);
            both_rows((uint32_t *)to + 128 * s + 4 * lane, a + at, b + at, 2, has_a, has_b);
        }
    }
}

/* Inputs 16 I and on, of the tile that begins with row FIRST. */
template <bml_weight_format F>
__device__ static void pack_column_unit(char *to, source from, int first, int i)
{
    constexpr bml_cuda_unit unit = bml_cuda_unit_of(F);
    int lane = threadIdx.x % 32, c = lane % 4, row = first + lane / 4 * 2;
    const char *a = row_at(from, row), *b = row_at(from, row + 1);
    if constexpr (F == BML_WEIGHTS_F32) {
        ((float4 *)to)[lane] = ((const float4 *)a)[4 * i + c];
        ((float4 *)to)[32 + lane] = ((const float4 *)b)[4 * i + c];
    } else if constexpr (F == BML_WEIGHTS_Q4 || F == BML_WEIGHTS_Q8) {
        int block = i / 4, at = 16 * (i % 4) + 4 * c, h = at / 32, inner = at % 32;
        size_t data = bml_cuda_block_at(F, block), scales = bml_cuda_scales_at(F, block);
        if constexpr (F == BML_WEIGHTS_Q8) {
            both_rows((uint32_t *)to + 2 * lane, a + data + at, b + data + at, 1, true, true);
            uint16_t *scale = (uint16_t *)(to + unit.col_data) + lane / 4 * 2;
            if (c == 0) {
                scale[0] = ((const uint16_t *)(a + scales))[block % BML_CUDA_GROUP];
                scale[1] = ((const uint16_t *)(b + scales))[block % BML_CUDA_GROUP];
            }
        } else {
            size_t nibbles = data + inner / 8 * 8 + 4 * h + inner % 8 / 2;
            ((uint16_t *)to)[2 * lane] = *(const uint16_t *)(a + nibbles);
            ((uint16_t *)to)[2 * lane + 1] = *(const uint16_t *)(b + nibbles);
            if (c == 0) {
                to[unit.col_data + lane / 4 * 2] = a[scales + block % BML_CUDA_GROUP * 2 + h];
                to[unit.col_data + lane / 4 * 2 + 1] = b[scales + block % BML_CUDA_GROUP * 2 + h];
            }
        }
    } else {
        both_rows((uint32_t *)to + 4 * lane, a + 2 * (16 * i + 4 * c), b + 2 * (16 * i + 4 * c), 2,
                  true, true);
    }
}

/* Block (b, y) copies a part of what block b of a step has of one product. */
template <bml_weight_format F>
static __global__ void pack(char *stream, const size_t *begin, source from, bml_cuda_plan plan,
                            product which)
{
    constexpr bml_cuda_unit unit = bml_cuda_unit_of(F);
    bml_cuda_share s = bml_cuda_share_of(&plan, blockIdx.x);
    bml_cuda_stream at = bml_cuda_stream_of(&plan, &s, F);
    int warps = blockDim.x / 32 * gridDim.y,
        warp = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    char *to = stream + begin[blockIdx.x];
    if (which == CONTRACT_COLUMNS) {
        for (int u = warp; u < s.clusters_tiles * s.slice_tiles; u += warps)
            pack_column_unit<F>(to + at.contract + (size_t)u * unit.col_bytes, from,
                                (s.slice_first + u % s.slice_tiles) * BML_CUDA_ROWS,
                                s.clusters_first + u / s.slice_tiles);
        return;
    }
    int chunks = bml_cuda_chunks(&plan), both = unit.first_bytes + unit.second_bytes;
    if (which == PROJ_ROWS) { /* tiles of one chunk */
        int parts = plan.head_dim / BML_CUDA_CHUNK, n = bml_cuda_proj_stages(&plan, &s);
        for (int u = warp; u < n * s.slice_tiles; u += warps) {
            int part = u / s.slice_tiles, head = s.cluster + part / parts * plan.n_clusters;
            int first = (s.slice_first + u % s.slice_tiles) * BML_CUDA_ROWS;
            char *here = to + at.proj + (size_t)u * both;
            for (int h = 0; h < 2; h++)
                pack_row_unit<F>(here + h * unit.first_bytes, from, first,
                                 head * parts + part % parts, h);
        }
        return;
    }
    int n = which == QKV_ROWS ? s.qkv_tiles : which == EXPAND_ROWS ? s.hidden_tiles : s.vocab_tiles;
    to += which == EXPAND_ROWS ? at.expand : 0;
    for (int u = warp; u < n * chunks; u += warps) { /* chunks of one tile */
        int tile = u / chunks, k = u % chunks;
        int first = (which == QKV_ROWS      ? s.qkv_first
                     : which == EXPAND_ROWS ? s.hidden_first
                                            : s.vocab_first) +
                    tile;
        first *= BML_CUDA_ROWS;
        if (which == QKV_ROWS) /* a tile is all of one head's q, k or v */
            first = bml_cuda_qkv_row(&plan, s.cluster, first);
        char *here = to + (size_t)tile * chunks * both;
        pack_row_unit<F>(here + (size_t)k * unit.first_bytes, from, first, k, 0);
        pack_row_unit<F>(here + (size_t)chunks * unit.first_bytes + (size_t)k * unit.second_bytes,
                         from, first, k, 1);
    }
}

static source source_of(const bml_weight *w)
{
    return {(const char *)w->buffer.data, bml_cuda_row_bytes(w->format, (size_t)w->n_in), w->n_out};
}

template <bml_weight_format F>
static void pack_layer(char *stream, const size_t *begin, const bml_layer_weights *l,
                       const bml_cuda_plan *plan)
{
    const bml_weight *all[] = {&l->c_attn.w, &l->c_proj.w, &l->c_fc.w, &l->mlp_c_proj.w};
    dim3 grid((unsigned)(plan->n_clusters * BML_CUDA_CLUSTER), 8);
    for (int which = QKV_ROWS; which <= CONTRACT_COLUMNS; which++)
        pack<F><<<grid, 256>>>(stream, begin, source_of(all[which]), *plan, (product)which);
}

template <bml_weight_format F>
static void pack_head(char *stream, const size_t *begin, const bml_weight *w,
                      const bml_cuda_plan *plan)
{
    dim3 grid((unsigned)(plan->n_clusters * BML_CUDA_CLUSTER), 32);
    pack<F><<<grid, 256>>>(stream, begin, source_of(w), *plan, HEAD_ROWS);
}

void bml_cuda_pack_layer(char *stream, const size_t *begin, const bml_layer_weights *l,
                         const bml_cuda_plan *plan)
{
    bml_cuda_with_format(l->c_attn.w.format,
                         [&](auto f) { pack_layer<f.format>(stream, begin, l, plan); });
}

void bml_cuda_pack_head(char *stream, const size_t *begin, const bml_weight *w,
                        const bml_cuda_plan *plan)
{
    bml_cuda_with_format(w->format, [&](auto f) { pack_head<f.format>(stream, begin, w, plan); });
}
