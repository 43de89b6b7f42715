/* A pass on its way to the GPU: one command buffer with one encoder, whose dispatches run one after
 * the other; end() commits it and waits. (A pass that is traced has one for each kernel.) */
#include "backend/metal/metal.h"

#include "base/error.h"
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

bml_status bml_metal_queue_new(bml_device *device, int n_threads, bml_queue **out, bml_error *err)
{
    (void)n_threads;
    bml_queue *queue = bml_calloc(1, sizeof *queue);
    if (!queue)
        return bml_fail_memory(err, sizeof *queue, "a queue");
    queue->device = device;
    queue->commands = [device->gpu newCommandQueue];
    if (!queue->commands) {
        free(queue);
        return bml_fail(err, BML_ERR_DEVICE, "the GPU gives no command queue");
    }
    *out = queue;
    return BML_OK;
}

void bml_metal_queue_free(bml_queue *queue)
{
    if (!queue)
        return;
    bml_metal_buffer_free(queue->device, &queue->batch.buffer);
    [queue->commands release];
    free(queue);
}

/* The CPU's part is the caller's thread. */
int bml_metal_queue_threads(const bml_queue *queue)
{
    (void)queue;
    return 1;
}

double bml_metal_device_seconds(const bml_queue *queue)
{
    return queue->seconds;
}

/* ---- the batch
 * ----------------------------------------------------------------------------------*/

static bml_status make_room(bml_queue *queue, size_t n, bml_error *err)
{
    enum { ARRAYS = 7, AT_LEAST = 1024 }; /* so that sessions with the usual chunk never grow it */
    bml_metal_batch *b = &queue->batch;
    size_t capacity = (n > AT_LEAST ? n : AT_LEAST), stride = capacity * sizeof(int32_t);
    bml_buffer larger;
    if (n <= b->capacity)
        return BML_OK;
    bml_status status = bml_metal_buffer_new(queue->device, ARRAYS * stride, &larger, err);
    if (status)
        return status;
    bml_metal_buffer_free(queue->device, &b->buffer);
    *b = (bml_metal_batch){.buffer = larger,
                           .capacity = capacity,
                           .token = 0,
                           .position = stride,
                           .slot = 2 * stride,
                           .row = 3 * stride,
                           .group_first = 4 * stride,
                           .group_size = 5 * stride,
                           .target = 6 * stride};
    return BML_OK;
}

/* Cuts the batch into runs of tokens that follow each other in a slot. */
static void find_groups(bml_metal_batch *b, const bml_batch *batch)
{
    char *data = b->buffer.data;
    int32_t *first = (int32_t *)(data + b->group_first), *size = (int32_t *)(data + b->group_size);
    b->n_groups = 0;
    for (int t = 0; t < batch->n_tokens; t++) {
        int g = b->n_groups - 1;
        bool follows = g >= 0 && size[g] < QUERY_GROUP && batch->slot[t] == batch->slot[t - 1] &&
                       batch->position[t] == batch->position[t - 1] + 1;
        if (follows) {
            size[g]++;
        } else {
            first[b->n_groups] = t;
            size[b->n_groups++] = 1;
        }
    }
}

static void fill_batch(bml_metal_batch *b, const bml_batch *batch)
{
    enum { WORTH_LOOKING = 64 }; /* tokens: more are a prompt */
    char *data = b->buffer.data;
    size_t bytes = (size_t)batch->n_tokens * sizeof(int32_t);
    b->n_tokens = batch->n_tokens;
    if (batch->n_rows)
        memcpy(data + b->row, batch->row, (size_t)batch->n_rows * sizeof(int32_t));
    if (batch->n_rows && batch->target)
        memcpy(data + b->target, batch->target, (size_t)batch->n_rows * sizeof(int32_t));
    if (!batch->n_tokens)
        return;
    memcpy(data + b->token, batch->token, bytes);
    memcpy(data + b->position, batch->position, bytes);
    memcpy(data + b->slot, batch->slot, bytes);
    find_groups(b, batch);
    b->one_a_slot = batch->n_tokens <= WORTH_LOOKING && bml_batch_one_a_slot(batch);
}

/* ---- the pass
 * -----------------------------------------------------------------------------------*/

static bml_status open_pass(bml_queue *queue, bml_error *err)
{
    @autoreleasepool {
        /* Sessions keep all that a pass uses until it has ended. */
        queue->pass = [[queue->commands commandBufferWithUnretainedReferences] retain];
        queue->encoder = [[queue->pass computeCommandEncoder] retain];
    }
    return queue->encoder ? BML_OK
                          : bml_fail(err, BML_ERR_DEVICE, "the GPU gives no command buffer");
}

static void drop_pass(bml_queue *queue)
{
    [queue->encoder release];
    [queue->pass release];
    queue->encoder = nil;
    queue->pass = nil;
}

/* Runs what is encoded. */
static bml_status run_pass(bml_queue *queue, bml_error *err)
{
    bml_status status = BML_OK;
    @autoreleasepool {
        [queue->encoder endEncoding];
        [queue->pass commit];
        [queue->pass waitUntilCompleted];
        if (queue->pass.status != MTLCommandBufferStatusCompleted)
            status = bml_fail(err, BML_ERR_DEVICE, "the GPU failed: %s",
                              queue->pass.error.localizedDescription.UTF8String);
        queue->latest = queue->pass.GPUEndTime - queue->pass.GPUStartTime;
        queue->seconds += queue->latest;
    }
    drop_pass(queue);
    return status;
}

bml_status bml_metal_begin(bml_queue *queue, const bml_batch *batch, bml_error *err)
{
    size_t n = (size_t)(batch->n_tokens > batch->n_rows ? batch->n_tokens : batch->n_rows);
    bml_status status = bml_metal_prepare(queue->device, err);
    if (!status)
        status = make_room(queue, n ? n : 1, err);
    if (status)
        return status;
    fill_batch(&queue->batch, batch);
    queue->failure.code = BML_OK;
    status = open_pass(queue, err);
    if (status)
        drop_pass(queue);
    return status;
}

/* After a failure there is no encoder, and what is dispatched goes nowhere. */
void bml_metal_finish(bml_queue *queue)
{
    if (!queue->failure.code && !run_pass(queue, &queue->failure))
        open_pass(queue, &queue->failure);
}

bml_status bml_metal_end(bml_queue *queue, bml_error *err)
{
    if (!queue->failure.code)
        return run_pass(queue, err);
    drop_pass(queue);
    return bml_fail(err, queue->failure.code, "%s", queue->failure.message);
}

size_t bml_metal_groups_for(bml_metal_kernel kernel, size_t n)
{
    size_t threads = (size_t)bml_metal_threads(kernel);
    return (n + threads - 1) / threads;
}

static void set_buffer(bml_queue *queue, const bml_metal_binding *binding, NSUInteger index)
{
    const bml_buffer *b = binding->buffer;
    if (!b || !b->native)
        b = &queue->device->nothing;
    id<MTLBuffer> native = b->native;
    size_t offset = (size_t)((char *)b->data - (char *)native.contents);
    [queue->encoder setBuffer:native offset:offset + binding->offset atIndex:index];
}

void bml_metal_dispatch(bml_queue *queue, const bml_metal_call *call)
{
    if (!call->n_groups)
        return;
    NSUInteger threads = (NSUInteger)bml_metal_threads(call->kernel), n = 0;
    [queue->encoder setComputePipelineState:queue->device->pipelines[call->kernel][call->format]];
    for (; n < (NSUInteger)call->n_buffers; n++)
        set_buffer(queue, &call->buffers[n], n);
    [queue->encoder setBytes:call->args length:call->args_bytes atIndex:n];
    for (NSUInteger m = 0; m < BML_METAL_MAX_MEMORIES && call->memory[m]; m++) {
        size_t bytes = (call->memory[m] * sizeof(float) + 15) / 16 * 16; /* as Metal wants it */
        [queue->encoder setThreadgroupMemoryLength:bytes atIndex:m];
    }
    [queue->encoder dispatchThreadgroups:MTLSizeMake(call->n_groups, 1, 1)
                   threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
}
