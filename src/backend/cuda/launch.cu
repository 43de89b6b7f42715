#include "backend/cuda/launch.cuh"

cudaError_t bml_cuda_current_chip(bml_cuda_chip *chip)
{
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (!error)
        error = cudaDeviceGetAttribute(&chip->major, cudaDevAttrComputeCapabilityMajor, device);
    if (!error)
        error = cudaDeviceGetAttribute(&chip->units, cudaDevAttrMultiProcessorCount, device);
    if (!error)
        error = cudaDeviceGetAttribute(&chip->shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                       device);
    return error;
}

cudaError_t bml_cuda_allow_shared(const void *kernel, size_t bytes)
{
    /* Kernels of which the driver knows: asking it takes a good part of a launch. Two that share a
     * place tell it again. */
    static const void *known[256];
    const void **place = known + (uintptr_t)kernel / 16 % 256;
    if (bytes <= 48 << 10 || __atomic_load_n(place, __ATOMIC_RELAXED) == kernel)
        return cudaSuccess;
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (!error)
        __atomic_store_n(place, kernel, __ATOMIC_RELAXED);
    return error;
}

cudaError_t bml_cuda_launch(const void *kernel, dim3 grid, int threads, int cluster,
                            size_t shared_bytes, void **arguments, cudaStream_t stream)
{
    return bml_cuda_launch_within(kernel, grid, threads, cluster, shared_bytes, shared_bytes,
                                  arguments, stream);
}

cudaError_t bml_cuda_launch_within(const void *kernel, dim3 grid, int threads, int cluster,
                                   size_t shared_bytes, size_t most_bytes, void **arguments,
                                   cudaStream_t stream)
{
    int device, major;
    cudaError_t error = cudaGetDevice(&device);
    if (!error)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (!error)
        error = bml_cuda_allow_shared(kernel, most_bytes);
    if (error)
        return error;

    cudaLaunchAttribute attributes[2] = {};
    unsigned n = 0;
    if (major >= 9) { /* from Hopper on; before, kernels do not wait and must not be early */
        attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[n].id = cudaLaunchAttributeClusterDimension;
        attributes[n].val.clusterDim.x = (unsigned)cluster;
        attributes[n].val.clusterDim.y = attributes[n].val.clusterDim.z = 1;
        n++;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = n;
    return cudaLaunchKernelExC(&config, kernel, arguments);
}

cudaError_t bml_cuda_launch_together(const void *kernel, int blocks, int threads, int cluster,
                                     size_t shared_bytes, bool checked, void *argument,
                                     cudaStream_t stream)
{
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = (unsigned)cluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    if (checked) {
        attributes[1].id = cudaLaunchAttributeCooperative;
        attributes[1].val.cooperative = 1;
    } else {
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelExC(&config, kernel, &argument);
}
