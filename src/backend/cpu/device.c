#include "backend/cpu/device.h"

#include "backend/cpu/quant.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Big buffers come straight from the kernel: zeroed, and resident only once they are touched, so a
 * long context costs what is used of it. */
static const size_t map_threshold = (size_t)1 << 20;

bml_status bml_cpu_open(bml_device **out, bml_error *err)
{
    bml_device *device = bml_calloc(1, sizeof *device);
    if (!device)
        return bml_fail_memory(err, sizeof *device, "a device");
    *out = device;
    return BML_OK;
}

void bml_cpu_close(bml_device *device)
{
    if (device)
        bml_pool_free(device->pool);
    free(device);
}

void bml_cpu_device_note(bml_device *device, const bml_weight *weight)
{
    if ((size_t)weight->n_in > device->max_width)
        device->max_width = (size_t)weight->n_in;
    if ((size_t)weight->n_out > device->max_width)
        device->max_width = (size_t)weight->n_out;
}

bml_status bml_cpu_buffer_new(bml_device *device, size_t bytes, bml_buffer *buffer, bml_error *err)
{
    (void)device;
    size_t rounded;
    if (!bml_add_size(bytes, 64, &rounded))
        return bml_fail_memory(err, bytes, "a buffer");
    rounded &= ~(size_t)63;
    void *data;
    if (bytes >= map_threshold) {
        data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED)
            data = NULL;
    } else {
        data = aligned_alloc(64, rounded);
        if (data)
            memset(data, 0, rounded);
    }
    if (!data)
        return bml_fail_memory(err, bytes, "a buffer");
    *buffer = (bml_buffer){.data = data, .bytes = bytes};
    return BML_OK;
}

void bml_cpu_buffer_free(bml_device *device, bml_buffer *buffer)
{
    (void)device;
    if (buffer->data && buffer->bytes >= map_threshold)
        munmap(buffer->data, buffer->bytes);
    else
        free(buffer->data);
    *buffer = (bml_buffer){0};
}

/* Elements first..last of a matrix to float32. */
static void widen(float *to, const bml_matrix *from, size_t first, size_t n)
{
    const uint16_t *half = (const uint16_t *)from->data + first;
    if (from->dtype == BML_F32)
        memcpy(to, (const float *)from->data + first, n * sizeof *to);
    else if (from->dtype == BML_BF16)
        for (size_t i = 0; i < n; i++)
            to[i] = bml_bf16_to_f32(half[i]);
    else
        for (size_t i = 0; i < n; i++)
            to[i] = bml_f16_to_f32(half[i]);
}

typedef struct convert_job {
    const bml_matrix *from;
    void *to;
    bml_dtype dtype;
    size_t n;
} convert_job;

static void convert_part(void *context, int part, int n_parts)
{
    const convert_job *j = context;
    enum { PIECE = 1024 };
    float piece[PIECE];
    size_t begin, end;
    bml_split(j->n, PIECE, part, n_parts, &begin, &end);
    for (size_t i = begin; i < end; i += PIECE) {
        size_t n = end - i < PIECE ? end - i : PIECE;
        float *wide = j->dtype == BML_F32 ? (float *)j->to + i : piece;
        uint16_t *half = (uint16_t *)j->to + i;
        widen(wide, j->from, i, n);
        if (j->dtype == BML_BF16)
            for (size_t e = 0; e < n; e++)
                half[e] = bml_f32_to_bf16(piece[e]);
        else if (j->dtype == BML_F16)
            for (size_t e = 0; e < n; e++)
                half[e] = bml_f32_to_f16(piece[e]);
    }
}

static bml_weight_format format_of(bml_dtype dtype)
{
    return dtype == BML_F32    ? BML_WEIGHTS_F32
           : dtype == BML_BF16 ? BML_WEIGHTS_BF16
                               : BML_WEIGHTS_F16;
}

bml_status bml_cpu_weight_rows(bml_device *device, const bml_matrix *matrix, bool out_in,
                               bml_weight_format format, bml_weight *weight, bml_error *err)
{
    size_t n = (size_t)matrix->rows * (size_t)matrix->cols;
    bml_dtype dtype = format == BML_WEIGHTS_FILE   ? matrix->dtype
                      : format == BML_WEIGHTS_F32  ? BML_F32
                      : format == BML_WEIGHTS_BF16 ? BML_BF16
                                                   : BML_F16;
    bml_weight w = {.format = format_of(dtype),
                    .dtype = dtype,
                    .n_in = out_in ? matrix->cols : matrix->rows,
                    .n_out = out_in ? matrix->rows : matrix->cols,
                    .out_in = out_in};
    size_t bytes = n * bml_dtype_size(dtype);
    if (dtype == matrix->dtype) {
        w.buffer = (bml_buffer){.data = (void *)matrix->data, .bytes = bytes};
    } else {
        bml_pool *pool;
        bml_status status = bml_cpu_weight_memory(device, bytes, &w.buffer, &pool, err);
        if (status)
            return status;
        convert_job job = {matrix, w.buffer.data, dtype, n};
        bml_pool_run(pool, convert_part, &job);
        w.owned = true;
    }
    bml_cpu_device_note(device, &w);
    *weight = w;
    return BML_OK;
}

void bml_cpu_weight_free(bml_device *device, bml_weight *weight)
{
    if (weight->owned)
        bml_cpu_weight_memory_free(device, &weight->buffer);
    *weight = (bml_weight){0};
}

bml_status bml_cpu_queue_new(bml_device *device, int n_threads, bml_queue **out, bml_error *err)
{
    bml_queue *queue = bml_calloc(1, sizeof *queue);
    if (!queue)
        return bml_fail_memory(err, sizeof *queue, "a queue");
    bml_status status = bml_pool_new(n_threads, &queue->pool, err);
    if (status) {
        free(queue);
        return status;
    }
    queue->device = device;
    *out = queue;
    return BML_OK;
}

void bml_cpu_queue_free(bml_queue *queue)
{
    if (!queue)
        return;
    bml_pool_free(queue->pool);
    free(queue->memory);
    free(queue);
}

int bml_cpu_queue_threads(const bml_queue *queue)
{
    return bml_pool_threads(queue->pool);
}

bml_status bml_cpu_upload(bml_queue *queue, bml_buffer *to, const void *from, size_t bytes,
                          bml_error *err)
{
    (void)queue, (void)err;
    memcpy(to->data, from, bytes);
    return BML_OK;
}

bml_status bml_cpu_download(bml_queue *queue, void *to, const bml_buffer *from, size_t bytes,
                            bml_error *err)
{
    (void)queue, (void)err;
    memcpy(to, from->data, bytes);
    return BML_OK;
}

static size_t round_up(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

bml_status bml_cpu_begin(bml_queue *queue, const bml_batch *batch, bml_error *err)
{
    size_t n_tokens = (size_t)batch->n_tokens, width = queue->device->max_width;
    size_t n_scores = n_tokens; /* the longest row of attention scores */
    for (size_t t = 0; t < n_tokens; t++)
        if ((size_t)batch->position[t] >= n_scores)
            n_scores = (size_t)batch->position[t] + 1;

    /* A thread's share: scratch (scores, or packed weights), the rows that it prepares for itself
     * as float32 and as int8, and its candidates for argmax. Sizes are those of a config, checked
     * when it was read: their sums and products fit easily. */
    size_t scratch = round_up(BML_CPU_QUERIES * (n_scores + BML_CPU_QUERIES) * sizeof(float));
    size_t panels = round_up((width + 1) / 2 * BML_CPU_PANEL * sizeof(float));
    if (panels < BML_CPU_PACK_BYTES)
        panels = BML_CPU_PACK_BYTES;
    if (scratch < 2 * panels)
        scratch = 2 * panels;
    size_t own_quantized = round_up(BML_CPU_OWN_ROWS * width * sizeof(float)) + scratch;
    size_t best = own_quantized + BML_CPU_OWN_ROWS * bml_quant_row_bytes(width);
    size_t each = round_up(best + (size_t)batch->n_rows * sizeof(bml_best));
    size_t shared = each * (size_t)bml_pool_threads(queue->pool);
    size_t second = shared + n_tokens * bml_quant_row_bytes(width);
    size_t rows = second + BML_CPU_OWN_ROWS * width * sizeof(float);
    size_t bytes = rows + 3 * (size_t)batch->n_rows * sizeof(int32_t);
    if (bytes > queue->bytes) {
        char *memory = aligned_alloc(64, round_up(bytes));
        if (!memory)
            return bml_fail_memory(err, bytes, "the threads' scratch memory");
        free(queue->memory);
        queue->memory = memory;
        queue->bytes = bytes;
    }
    queue->bytes_each = each;
    queue->own_rows_at = scratch;
    queue->own_quantized_at = own_quantized;
    queue->best_at = best;
    queue->quantized = queue->memory + shared;
    queue->second = (float *)(queue->memory + second);
    queue->batch = batch;
    queue->of_rows = (int32_t *)(queue->memory + rows);
    return BML_OK;
}

bml_status bml_cpu_end(bml_queue *queue, bml_error *err)
{
    (void)err;
    queue->batch = NULL;
    return BML_OK;
}
