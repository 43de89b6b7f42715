/* The GPU and its memory, which it shares with the CPU: buffers are plain memory to both. */
#include "backend/metal/metal.h"

#include "base/dtype.h"
#include "base/error.h"
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bml_status bml_metal_open(bml_device **out, bml_error *err)
{
    bml_device *device = bml_calloc(1, sizeof *device);
    if (!device)
        return bml_fail_memory(err, sizeof *device, "a device");
    pthread_mutex_init(&device->lock, NULL);
    device->gpu = MTLCreateSystemDefaultDevice();
    device->has_matrices = [device->gpu supportsFamily:MTLGPUFamilyApple7];
    bml_status status = BML_OK;
    if (!device->gpu)
        status = bml_fail(err, BML_ERR_UNSUPPORTED,
                          "no GPU here speaks Metal; --backend cpu runs without one");
    if (!status)
        status = bml_metal_library_new(device, err);
    if (!status) /* also tells whether the GPU can run them at all */
        status = bml_metal_prepare(device, err);
    if (!status)
        status = bml_metal_buffer_new(device, 16, &device->nothing, err);
    if (!status)
        status = bml_backend_cpu()->open(&device->host, err);
    if (status) {
        bml_metal_close(device);
        return status;
    }
    *out = device;
    return BML_OK;
}

void bml_metal_close(bml_device *device)
{
    if (!device)
        return;
    for (int k = 0; k < BML_METAL_N_KERNELS; k++)
        for (int f = 0; f < N_FORMATS; f++)
            [device->pipelines[k][f] release];
    bml_backend_cpu()->close(device->host);
    bml_metal_buffer_free(device, &device->nothing);
    [device->library release];
    [device->gpu release];
    pthread_mutex_destroy(&device->lock);
    free(device);
}

/* NATIVE, retained for the buffer, holds its BYTES. */
static bml_status finish_buffer(id<MTLBuffer> native, size_t bytes, bml_buffer *buffer,
                                bml_error *err)
{
    if (!native)
        return bml_fail_memory(err, bytes, "a buffer of the GPU");
    *buffer = (bml_buffer){.data = native.contents, .native = native, .bytes = bytes};
    return BML_OK;
}

bml_status bml_metal_buffer_new(bml_device *device, size_t bytes, bml_buffer *buffer,
                                bml_error *err)
{
    return finish_buffer([device->gpu newBufferWithLength:bytes ? bytes : 1
                                                  options:MTLResourceStorageModeShared],
                         bytes, buffer, err);
}

void bml_metal_buffer_free(bml_device *device, bml_buffer *buffer)
{
    (void)device;
    [(id<MTLBuffer>)buffer->native release];
    *buffer = (bml_buffer){0};
}

/* The pages of a mapped file that hold DATA become a buffer as they are. False where Metal does not
 * take them, as on virtual machines. */
static bool wrap_pages(bml_device *device, void *data, size_t bytes, bml_buffer *buffer)
{
    uintptr_t page = (uintptr_t)getpagesize(), begin = (uintptr_t)data / page * page;
    size_t length = ((uintptr_t)data + bytes + page - 1) / page * page - begin;
    id<MTLBuffer> native = [device->gpu newBufferWithBytesNoCopy:(void *)begin
                                                          length:length
                                                         options:MTLResourceStorageModeShared
                                                     deallocator:nil];
    if (native.length != length) {
        [native release];
        return false;
    }
    *buffer = (bml_buffer){.data = data, .native = native, .bytes = bytes};
    return true;
}

static bml_status copy_bytes(bml_device *device, const void *data, size_t bytes, bml_buffer *buffer,
                             bml_error *err)
{
    return finish_buffer([device->gpu newBufferWithBytes:data
                                                  length:bytes
                                                 options:MTLResourceStorageModeShared],
                         bytes, buffer, err);
}

/* The formats of kernels/arguments.h, a bit each. */
static unsigned format_bit(const bml_weight *w)
{
    return 1u << bml_metal_layout(w).format;
}

bml_status bml_metal_weight_new(bml_device *device, const bml_matrix *matrix, bool out_in,
                                bml_weight_format format, bml_weight *weight, bml_error *err)
{
    enum { BINDING_ALIGNMENT = 4 }; /* of a buffer's offset */
    const bml_backend *cpu = bml_backend_cpu();
    bml_weight host;
    bml_status status = cpu->weight_new(device->host, matrix, out_in, format, &host, err);
    if (status)
        return status;
    bml_weight w = host;
    void *data = host.buffer.data;
    w.owned = true;
    bool in_place = matrix->mapped && !host.owned && (uintptr_t)data % BINDING_ALIGNMENT == 0;
    if (!in_place || !wrap_pages(device, data, host.buffer.bytes, &w.buffer))
        status = copy_bytes(device, data, host.buffer.bytes, &w.buffer, err);
    cpu->weight_free(device->host, &host);
    if (status)
        return status;
    device->formats |= format_bit(&w);
    *weight = w;
    return BML_OK;
}

void bml_metal_weight_free(bml_device *device, bml_weight *weight)
{
    if (weight->owned)
        bml_metal_buffer_free(device, &weight->buffer);
    *weight = (bml_weight){0};
}

bml_status bml_metal_upload(bml_queue *queue, bml_buffer *to, const void *from, size_t bytes,
                            bml_error *err)
{
    (void)queue, (void)err;
    memcpy(to->data, from, bytes);
    return BML_OK;
}

bml_status bml_metal_download(bml_queue *queue, void *to, const bml_buffer *from, size_t bytes,
                              bml_error *err)
{
    (void)queue, (void)err;
    memcpy(to, from->data, bytes);
    return BML_OK;
}
