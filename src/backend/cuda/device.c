/* The device, buffers, queues and the frame around a pass. */
#include "backend/cuda/cuda.h"
#include "backend/cuda/decode.h"
#include "backend/cuda/expand.h"
#include "backend/cuda/pass16.h"
#include "backend/cuda/product_batch.h"
#include "backend/cuda/weight.h"

#include "base/error.h"
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

bml_status bml_cuda_fail(bml_error *err, cudaError_t error, size_t bytes, const char *what)
{
    cudaGetLastError(); /* what is not sticky must not be found by the next caller */
    if (error == cudaErrorMemoryAllocation && bytes) {
        size_t free_bytes = 0, total = 0;
        cudaMemGetInfo(&free_bytes, &total);
        return bml_fail(err, BML_ERR_MEMORY,
                        "the GPU has no room for %zu bytes for %s: %zu of its %zu bytes are free",
                        bytes, what, free_bytes, total);
    }
    return bml_fail(err, BML_ERR_DEVICE, "the GPU failed in %s: %s", what,
                    cudaGetErrorString(error));
}

static bml_status cuda_open(bml_device **out, bml_error *err)
{
    int n = 0, driver = 0, runtime = 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (error == cudaErrorInsufficientDriver && driver)
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "the NVIDIA driver is for CUDA %d.%d; this build needs %d.%d or later",
                        driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (error || n == 0) {
        const char *why = !driver ? "there is no NVIDIA driver"
                          : error ? cudaGetErrorString(error)
                                  : "none found";
        cudaGetLastError();
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "no CUDA device can be used here (%s); --backend cpu runs without one",
                        why);
    }
    struct cudaDeviceProp p;
    error = cudaGetDeviceProperties(&p, 0);
    if (error)
        return bml_cuda_fail(err, error, 0, "asking for its properties");
    if (p.major < 8)
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "%s has compute capability %d.%d; this build needs 8.0 or later", p.name,
                        p.major, p.minor);
    bml_device *device = bml_calloc(1, sizeof *device);
    if (!device)
        return bml_fail_memory(err, sizeof *device, "a device");
    device->n_multiprocessors = p.multiProcessorCount;
    device->capability = 10 * p.major + p.minor;
    device->shared_bytes = (int)p.sharedMemPerBlockOptin;
    device->l2_bytes = p.l2CacheSize;
    int mps = 0;
    device->shared = cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, 0) || mps;
    cudaGetLastError();
    /* Some virtual GPUs cannot hold a whole grid at once. */
    if (p.major >= 9 && p.cooperativeLaunch)
        device->n_clusters = bml_cuda_decode_clusters(device->shared_bytes);
    *out = device;
    return BML_OK;
}

static void cuda_close(bml_device *device)
{
    if (device && device->packer)
        bml_backend_cpu()->close(device->packer);
    free(device);
}

static bml_status buffer_new(bml_device *device, size_t bytes, bml_buffer *buffer, bml_error *err)
{
    (void)device;
    void *data = NULL;
    cudaError_t error = cudaMalloc(&data, bytes ? bytes : 1);
    if (!error)
        error = cudaMemset(data, 0, bytes);
    if (!error)
        error = cudaStreamSynchronize(0);
    if (error) {
        cudaFree(data);
        return bml_cuda_fail(err, error, bytes, "a buffer");
    }
    *buffer = (bml_buffer){.data = data, .bytes = bytes};
    return BML_OK;
}

static void buffer_free(bml_device *device, bml_buffer *buffer)
{
    (void)device;
    cudaFree(buffer->data);
    *buffer = (bml_buffer){0};
}

static void queue_free(bml_queue *queue)
{
    if (!queue)
        return;
    if (queue->stream)
        cudaStreamSynchronize(queue->stream); /* a step ahead may be running */
    cudaFreeHost(queue->draws);
    cudaFree(queue->batch_device);
    cudaFree(queue->scratch);
    bml_cuda_graph_free(queue->graph);
    bml_cuda_decoder_free(queue->decoder);
    bml_cuda_expanded_free(queue->expanded);
    if (queue->stream)
        cudaStreamDestroy(queue->stream);
    free(queue);
}

static bml_status queue_new(bml_device *device, int n_threads, bml_queue **out, bml_error *err)
{
    (void)n_threads;
    bml_queue *queue = bml_calloc(1, sizeof *queue);
    if (!queue)
        return bml_fail_memory(err, sizeof *queue, "a queue");
    queue->device = device;
    cudaError_t error = cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking);
    if (error) {
        queue_free(queue);
        return bml_cuda_fail(err, error, 0, "making a stream");
    }
    *out = queue;
    return BML_OK;
}

static int queue_threads(const bml_queue *queue)
{
    (void)queue;
    return 1; /* of this process: the one that enqueues */
}

static bml_status upload(bml_queue *queue, bml_buffer *to, const void *from, size_t bytes,
                         bml_error *err)
{
    if (to->data == queue->ids)
        queue->ids = NULL;
    cudaError_t error =
        cudaMemcpyAsync(to->data, from, bytes, cudaMemcpyHostToDevice, queue->stream);
    if (!error)
        error = cudaStreamSynchronize(queue->stream);
    return error ? bml_cuda_fail(err, error, bytes, "a copy to it") : BML_OK;
}

static bml_status download(bml_queue *queue, void *to, const bml_buffer *from, size_t bytes,
                           bml_error *err)
{
    if (from->data == queue->ids) { /* there already, and the pass has ended */
        memcpy(to, queue->chain.ids, bytes);
        return BML_OK;
    }
    cudaError_t error =
        cudaMemcpyAsync(to, from->data, bytes, cudaMemcpyDeviceToHost, queue->stream);
    if (!error)
        error = cudaStreamSynchronize(queue->stream);
    return error ? bml_cuda_fail(err, error, bytes, "a copy from it") : BML_OK;
}

/* Numbers of a batch's arrays, five of each token or row, and of query tiles, up to four more; on
 * the host also ids, two of each row, and what the chain notes of ids, positions and slots; and
 * bytes of all that, with two draws for kernels and one that the chain notes. */
enum { ARRAYS = 5, NUMBERS = ARRAYS + 4, HOST_NUMBERS = NUMBERS + 5 };
static const size_t host_bytes =
    2 * sizeof(bml_cuda_draw) + sizeof(bml_draw) + HOST_NUMBERS * sizeof(int32_t);

/* Makes room for batches of N tokens or rows. */
static cudaError_t reserve_batch(bml_queue *queue, size_t n)
{
    if (n <= queue->batch_capacity)
        return cudaSuccess;
    bml_cuda_draw *draws = NULL;
    int32_t *device = NULL;
    cudaError_t error = cudaStreamSynchronize(queue->stream); /* a step ahead may be running */
    if (!error)
        error = cudaMallocHost((void **)&draws, n * host_bytes);
    if (!error)
        error = cudaMalloc((void **)&device, NUMBERS * n * sizeof *device);
    if (error) {
        cudaFreeHost(draws);
        return error;
    }
    queue->chain.draw = (bml_draw *)(draws + 2 * n);
    int32_t *host = (int32_t *)(queue->chain.draw + n);
    cudaFreeHost(queue->draws);
    cudaFree(queue->batch_device);
    queue->draws = draws;
    queue->batch_host = host;
    queue->ids_host = host + NUMBERS * n;
    queue->chain.ids = queue->ids_host + 2 * n;
    queue->chain.position = queue->chain.ids + n;
    queue->chain.slot = queue->chain.position + n;
    queue->batch_device = device;
    queue->batch_capacity = n;
    return cudaSuccess;
}

/* How far apart the arrays of the batch lie. */
static size_t pitch_of(const bml_batch *batch)
{
    return (size_t)(batch->n_tokens > batch->n_rows ? batch->n_tokens : batch->n_rows);
}

int32_t *bml_cuda_tiles_host(bml_queue *queue)
{
    return queue->batch_host + ARRAYS * pitch_of(queue->batch);
}

const int32_t *bml_cuda_tiles_device(const bml_queue *queue)
{
    return queue->batch_device + ARRAYS * pitch_of(queue->batch);
}

static bml_status begin(bml_queue *queue, const bml_batch *batch, bml_error *err)
{
    size_t n = (size_t)batch->n_tokens, n_rows = (size_t)batch->n_rows, most = pitch_of(batch);
    bml_cuda_chain_begin(queue, batch);
    cudaError_t error = reserve_batch(queue, most);
    if (error)
        return bml_cuda_fail(err, error, most * host_bytes, "a batch");
    int32_t *host = queue->batch_host;
    memcpy(host, batch->token, n * sizeof *host);
    memcpy(host + most, batch->position, n * sizeof *host);
    memcpy(host + 2 * most, batch->slot, n * sizeof *host);
    if (n_rows)
        memcpy(host + 3 * most, batch->row, n_rows * sizeof *host);
    if (n_rows && batch->target)
        memcpy(host + 4 * most, batch->target, n_rows * sizeof *host);
    if (batch->draw)
        bml_cuda_chain_draws(queue, batch, false);

    /* Quantised activations, 64 int8 and a float32 scale a block; or, of a decoding batch, a
     * product's sums in parts: as many as floats for its inputs where these are 4 n_embd. */
    size_t width = queue->device->max_width;
    size_t scratch = most * bml_cuda_n_blocks(width) * (BML_CUDA_BLOCK + 4);
    size_t sums = (most < BML_CUDA_BATCH ? most : BML_CUDA_BATCH) * width * 2 * sizeof(float);
    scratch = sums > scratch ? sums : scratch;
    if (scratch > queue->scratch_bytes) {
        char *memory = NULL;
        error = cudaStreamSynchronize(queue->stream); /* a step ahead may be running */
        if (!error)
            error = cudaMalloc((void **)&memory, scratch);
        if (error)
            return bml_cuda_fail(err, error, scratch, "the kernels' scratch memory");
        cudaFree(queue->scratch);
        queue->scratch = memory;
        queue->scratch_bytes = scratch;
    }
    queue->batch = batch;
    queue->n_tiles = 0;
    queue->batch_copied = false;
    queue->ids = NULL;
    queue->error = cudaSuccess;
    return BML_OK;
}

bml_cuda_batch bml_cuda_batch_of(bml_queue *queue)
{
    size_t n = pitch_of(queue->batch), numbers = ARRAYS * n + 4 * (size_t)queue->n_tiles;
    int32_t *d = queue->batch_device;
    if (!queue->batch_copied)
        bml_cuda_note(queue, cudaMemcpyAsync(d, queue->batch_host, numbers * sizeof *d,
                                             cudaMemcpyHostToDevice, queue->stream));
    queue->batch_copied = true;
    return (bml_cuda_batch){d, d + n, d + 2 * n, d + 3 * n, d + 4 * n};
}

bml_cuda_choice bml_cuda_choice_of(const bml_queue *queue, const bml_buffer *ids, int n_rows)
{
    bml_cuda_choice choice = {.ids = ids->data};
    if (n_rows != queue->batch->n_rows)
        return choice;
    choice.host = queue->ids_host;
    choice.pitch = (int)queue->batch_capacity;
    if (queue->chain.followed) {
        choice.token = queue->batch_device;
        choice.position = choice.token + pitch_of(queue->batch);
    }
    return choice;
}

void bml_cuda_note(bml_queue *queue, cudaError_t error)
{
    if (!queue->error)
        queue->error = error;
}

static bml_status end(bml_queue *queue, bml_error *err)
{
    bml_cuda_chain_end(queue);
    queue->batch = NULL;
    return queue->error ? bml_cuda_fail(err, queue->error, 0, "a pass") : BML_OK;
}

static void finish(bml_queue *queue)
{
    bml_cuda_note(queue, cudaStreamSynchronize(queue->stream));
}

const bml_backend *bml_backend_cuda(void)
{
    static const bml_backend backend = {
        .name = "cuda",
        .max_head_dim16 = 256,
        .open = cuda_open,
        .close = cuda_close,
        .weight_new = bml_cuda_weight_new,
        .weight_free = bml_cuda_weight_free,
        .buffer_new = buffer_new,
        .buffer_free = buffer_free,
        .queue_new = queue_new,
        .queue_free = queue_free,
        .queue_threads = queue_threads,
        .upload = upload,
        .download = download,
        .begin = begin,
        .end = end,
        .embedding = bml_cuda_embedding,
        .layernorm = bml_cuda_layernorm,
        .matmul = bml_cuda_matmul,
        .linear = bml_cuda_linear,
        .linear_transposed = bml_cuda_linear, /* every matrix is held by outputs: weight.h */
        .qkv_split = bml_cuda_qkv_split,
        .kv_append = bml_cuda_kv_append,
        .softmax = bml_cuda_softmax,
        .attention = bml_cuda_attention_stateless,
        .attention_cached = bml_cuda_attention_cached,
        .heads_merge = bml_cuda_heads_merge,
        .residual_add = bml_cuda_residual_add,
        .gelu = bml_cuda_gelu,
        .argmax = bml_cuda_argmax,
        .score = bml_cuda_score,
        .sample = bml_cuda_sample,
        .forward = bml_cuda_forward,
        .measure = bml_cuda_measure,
        .finish = finish,
    };
    return &backend;
}
