#include "backend/metal/metal.h"

const bml_backend *bml_backend_metal(void)
{
    static const bml_backend backend = {
        .name = "metal",
        .open = bml_metal_open,
        .close = bml_metal_close,
        .weight_new = bml_metal_weight_new,
        .weight_free = bml_metal_weight_free,
        .buffer_new = bml_metal_buffer_new,
        .buffer_free = bml_metal_buffer_free,
        .queue_new = bml_metal_queue_new,
        .queue_free = bml_metal_queue_free,
        .queue_threads = bml_metal_queue_threads,
        .upload = bml_metal_upload,
        .download = bml_metal_download,
        .begin = bml_metal_begin,
        .end = bml_metal_end,
        .embedding = bml_metal_embedding,
        .layernorm = bml_metal_layernorm,
        .matmul = bml_metal_matmul,
        .linear = bml_metal_linear,
        .linear_transposed = bml_metal_linear, /* the weight knows how it is stored */
        .qkv_split = bml_metal_qkv_split,
        .kv_append = bml_metal_kv_append,
        .softmax = bml_metal_softmax,
        .attention = bml_metal_attention_stateless,
        .attention_cached = bml_metal_attention_cached,
        .heads_merge = bml_metal_heads_merge,
        .residual_add = bml_metal_residual_add,
        .gelu = bml_metal_gelu,
        .argmax = bml_metal_argmax,
        .score = bml_metal_score,
        .forward = bml_metal_forward,
        .measure = bml_metal_measure,
        .finish = bml_metal_finish,
        .device_seconds = bml_metal_device_seconds,
    };
    return &backend;
}
