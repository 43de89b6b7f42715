#include "backend/cpu/device.h"

#include "base/dtype.h"
#include "base/error.h"
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Big buffers come straight from the kernel: zeroed, and resident only once they are touched, so a
 * long context costs what is used of it. */
static const size_t map_threshold = (size_t)1 << 20;

bml_status bml_cpu_open(bml_device **device, bml_error *err)
{
    (void)err;
    *device = NULL; /* host memory needs no handle */
    return BML_OK;
}

void bml_cpu_close(bml_device *device)
{
    (void)device;
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

static void widen(float *to, const bml_matrix *from, size_t n)
{
    const uint16_t *half = from->data;
    if (from->dtype == BML_F32)
        memcpy(to, from->data, n * sizeof *to);
    else if (from->dtype == BML_BF16)
        for (size_t i = 0; i < n; i++)
            to[i] = bml_bf16_to_f32(half[i]);
    else
        for (size_t i = 0; i < n; i++)
            to[i] = bml_f16_to_f32(half[i]);
}

bml_status bml_cpu_weight_new(bml_device *device, const bml_matrix *matrix, bool out_in,
                              bml_weight_format format, bml_weight *weight, bml_error *err)
{
    size_t n = (size_t)matrix->rows * (size_t)matrix->cols;
    bml_weight w = {.format = format,
                    .dtype = matrix->dtype,
                    .n_in = out_in ? matrix->cols : matrix->rows,
                    .n_out = out_in ? matrix->rows : matrix->cols,
                    .out_in = out_in};
    if (format == BML_WEIGHTS_FILE || matrix->dtype == BML_F32) {
        w.buffer =
            (bml_buffer){.data = (void *)matrix->data, .bytes = n * bml_dtype_size(matrix->dtype)};
    } else {
        bml_status status = bml_cpu_buffer_new(device, n * sizeof(float), &w.buffer, err);
        if (status)
            return status;
        widen(w.buffer.data, matrix, n);
        w.dtype = BML_F32;
        w.owned = true;
    }
    *weight = w;
    return BML_OK;
}

void bml_cpu_weight_free(bml_device *device, bml_weight *weight)
{
    if (weight->owned)
        bml_cpu_buffer_free(device, &weight->buffer);
    *weight = (bml_weight){0};
}

bml_status bml_cpu_queue_new(bml_device *device, int n_threads, bml_queue **out, bml_error *err)
{
    (void)device;
    bml_queue *queue = bml_calloc(1, sizeof *queue);
    if (!queue)
        return bml_fail_memory(err, sizeof *queue, "a queue");
    bml_status status = bml_pool_new(n_threads, &queue->pool, err);
    if (status) {
        free(queue);
        return status;
    }
    *out = queue;
    return BML_OK;
}

void bml_cpu_queue_free(bml_queue *queue)
{
    if (!queue)
        return;
    bml_pool_free(queue->pool);
    free(queue->scratch);
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

bml_status bml_cpu_begin(bml_queue *queue, const bml_batch *batch, bml_error *err)
{
    size_t n_scores = (size_t)batch->n_tokens; /* the longest row of attention scores */
    for (int t = 0; t < batch->n_tokens; t++)
        if ((size_t)batch->position[t] >= n_scores)
            n_scores = (size_t)batch->position[t] + 1;
    size_t bytes = n_scores * sizeof(float);
    if (bytes < BML_CPU_PACK_BYTES)
        bytes = BML_CPU_PACK_BYTES;
    bytes = (bytes + 63) & ~(size_t)63;
    if (bytes > queue->scratch_bytes) {
        size_t total;
        char *scratch = NULL;
        if (bml_mul_size(bytes, (size_t)bml_pool_threads(queue->pool), &total))
            scratch = aligned_alloc(64, total);
        if (!scratch)
            return bml_fail_memory(err, bytes, "the threads' scratch memory");
        free(queue->scratch);
        queue->scratch = scratch;
        queue->scratch_bytes = bytes;
    }
    queue->batch = batch;
    return BML_OK;
}

bml_status bml_cpu_end(bml_queue *queue, bml_error *err)
{
    (void)err;
    queue->batch = NULL;
    return BML_OK;
}
