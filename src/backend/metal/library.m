/*
 * The GPU's program: the text of kernels/ is part of the library, compiled when a device is opened;
 * macOS keeps what it has compiled. A pipeline is a kernel ready to run; all that a model can need
 * are made at its first pass, so that later ones make none.
 */
#include "backend/metal/metal.h"

#include "base/error.h"

enum {
    ROW_FORMATS = 1 << FORMAT_F32 | 1 << FORMAT_F16 | 1 << FORMAT_BF16,
    PACKED_FORMATS = 1 << FORMAT_Q8 | 1 << FORMAT_Q4
};

static const struct {
    const char *name;
    int threads;      /* of a threadgroup */
    unsigned formats; /* those it has pipelines for; 0: one, whatever the weights */
    bool matrices;    /* needs simdgroup matrices */
} kernels[BML_METAL_N_KERNELS] = {
    [BML_METAL_EMBEDDING] = {"embedding", 256, 0, false},
    [BML_METAL_LAYERNORM] = {"layernorm", ROW_THREADS, 0, false},
    [BML_METAL_MATMUL] = {"matmul", 256, 0, false},
    [BML_METAL_LINEAR] = {"linear", 256, 0, false},
    [BML_METAL_LINEAR_TRANSPOSED] = {"linear_transposed", 256, 0, false},
    [BML_METAL_LINEAR_PACKED] = {"linear_packed", 256, 0, false},
    [BML_METAL_VECTOR_ROWS] = {"product_vector_rows", ROW_THREADS, ROW_FORMATS, false},
    [BML_METAL_VECTOR_DOTS] = {"product_vector_dots", ROW_THREADS, ROW_FORMATS, false},
    [BML_METAL_VECTOR_PACKED] = {"product_vector_packed", ROW_THREADS, PACKED_FORMATS, false},
    [BML_METAL_TILE_8] = {"product_tile_8", TILE_THREADS, ROW_FORMATS | PACKED_FORMATS, true},
    [BML_METAL_TILE_32] = {"product_tile_32", TILE_THREADS, ROW_FORMATS | PACKED_FORMATS, true},
    [BML_METAL_QKV_SPLIT] = {"qkv_split", 256, 0, false},
    [BML_METAL_KV_APPEND] = {"kv_append", 256, 0, false},
    [BML_METAL_SOFTMAX] = {"softmax", ROW_THREADS, 0, false},
    [BML_METAL_ATTENTION] = {"attention", SIMD_WIDTH, 0, false},
    [BML_METAL_ATTENTION_CACHED] = {"attention_cached", SIMD_WIDTH, 0, false},
    [BML_METAL_ATTENTION_QUERY_64] = {"attention_query_64", QUERY_THREADS, 0, false},
    [BML_METAL_ATTENTION_QUERY_128] = {"attention_query_128", QUERY_THREADS, 0, false},
    [BML_METAL_ATTENTION_QUERY_256] = {"attention_query_256", QUERY_THREADS, 0, false},
    [BML_METAL_ATTENTION_GROUP] = {"attention_group", TILE_THREADS, 0, true},
    [BML_METAL_HEADS_MERGE] = {"heads_merge", 256, 0, false},
    [BML_METAL_RESIDUAL_ADD] = {"residual_add", 256, 0, false},
    [BML_METAL_GELU] = {"gelu", 256, 0, false},
    [BML_METAL_ARGMAX] = {"argmax", ARGMAX_THREADS, 0, false},
    [BML_METAL_SCORE] = {"score", ROW_THREADS, 0, false},
    [BML_METAL_MEASURE_READ] = {"measure_read", 256, 0, false},
    [BML_METAL_MEASURE_MULTIPLY] = {"measure_multiply", 256, 0, false},
};

int bml_metal_threads(bml_metal_kernel kernel)
{
    return kernels[kernel].threads;
}

bml_status bml_metal_library_new(bml_device *device, bml_error *err)
{
    @autoreleasepool {
        NSError *error = nil;
        MTLCompileOptions *options = [[MTLCompileOptions new] autorelease];
        /* NaN and infinity must come out as they are, and sums in the order they are written. */
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations" /* its successor needs macOS 15 */
        options.fastMathEnabled = NO;
#pragma clang diagnostic pop
        device->library =
            [device->gpu newLibraryWithSource:[NSString stringWithUTF8String:bml_metal_source]
                                      options:options
                                        error:&error];
        if (!device->library)
            return bml_fail(err, BML_ERR_DEVICE, "the Metal kernels do not compile: %s",
                            error.localizedDescription.UTF8String);
    }
    return BML_OK;
}

static bml_status make_pipeline(bml_device *device, int kernel, unsigned format, bml_error *err)
{
    const char *name = kernels[kernel].name;
    NSError *error = nil;
    MTLFunctionConstantValues *constants = [[MTLFunctionConstantValues new] autorelease];
    if (kernels[kernel].formats)
        [constants setConstantValue:&format type:MTLDataTypeUInt atIndex:0];
    id<MTLFunction> function =
        [device->library newFunctionWithName:[NSString stringWithUTF8String:name]
                              constantValues:constants
                                       error:&error];
    id<MTLComputePipelineState> pipeline = nil;
    if (function) {
        MTLComputePipelineDescriptor *descriptor = [[MTLComputePipelineDescriptor new] autorelease];
        descriptor.computeFunction = function;
        /* Asked for, lest the compiler spend registers that fewer threads would have. */
        descriptor.maxTotalThreadsPerThreadgroup = (NSUInteger)kernels[kernel].threads;
        pipeline = [device->gpu newComputePipelineStateWithDescriptor:descriptor
                                                              options:MTLPipelineOptionNone
                                                           reflection:nil
                                                                error:&error];
    }
    [function release];
    if (!pipeline)
        return bml_fail(err, BML_ERR_DEVICE, "the Metal kernel %s does not compile: %s", name,
                        error.localizedDescription.UTF8String);
    device->pipelines[kernel][format] = pipeline;
    if (pipeline.threadExecutionWidth != SIMD_WIDTH ||
        pipeline.maxTotalThreadsPerThreadgroup < (NSUInteger)kernels[kernel].threads)
        return bml_fail(err, BML_ERR_UNSUPPORTED,
                        "the Metal kernel %s needs %d threads in simdgroups of %d; this GPU gives "
                        "it %d in simdgroups of %d",
                        name, kernels[kernel].threads, SIMD_WIDTH,
                        (int)pipeline.maxTotalThreadsPerThreadgroup,
                        (int)pipeline.threadExecutionWidth);
    return BML_OK;
}

static bml_status make_missing(bml_device *device, bml_error *err)
{
    bml_status status = BML_OK;
    for (int k = 0; k < BML_METAL_N_KERNELS; k++) {
        unsigned wanted = kernels[k].formats ? kernels[k].formats & device->formats : 1;
        if (kernels[k].matrices && !device->has_matrices)
            continue;
        for (unsigned format = 0; format < N_FORMATS && !status; format++)
            if (wanted >> format & 1 && !device->pipelines[k][format])
                status = make_pipeline(device, k, format, err);
    }
    return status;
}

bml_status bml_metal_prepare(bml_device *device, bml_error *err)
{
    bml_status status = BML_OK;
    pthread_mutex_lock(&device->lock);
    if (!device->prepared || device->ready != device->formats) {
        @autoreleasepool {
            status = make_missing(device, err);
        }
        device->prepared = !status;
        device->ready = device->formats;
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}
