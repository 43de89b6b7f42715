/*
 * Memory for weights, in pages of 2 MB where the system has them. Weights are read from end to end
 * in every pass, and pages of 4 KB cost a fifth of the bandwidth: each needs its address looked up,
 * and the processor's prefetchers stop at its end. A matrix of its own seldom holds a page of 2 MB
 * whole, so matrices lie side by side in regions.
 */
#include "backend/cpu/device.h"
#include "base/error.h"
#include "base/memory.h"

#include <stdlib.h>
#include <sys/mman.h>

struct bml_region {
    bml_region *next;
    bml_buffer memory; /* of which the weights have .used bytes from .begin on */
    char *begin;
    size_t size, used;
    int n_weights;
};

static const size_t page = (size_t)2 << 20;
static const size_t usual_size = (size_t)64 << 20; /* pages that nothing touches cost nothing */

/* Below this a weight is not worth it, and in memory of its own sanitizers see its ends. */
static const size_t least_bytes = (size_t)256 << 10;

static bml_region *region_new(bml_device *device, size_t size)
{
    bml_region *region = bml_calloc(1, sizeof *region);
    size_t bytes;
    if (!region || !bml_add_size(size, page, &bytes) ||
        bml_cpu_buffer_new(device, bytes, &region->memory, NULL)) {
        free(region);
        return NULL;
    }
    region->begin = (char *)region->memory.data + -(uintptr_t)region->memory.data % page;
    region->size = size;
#ifdef MADV_HUGEPAGE
    madvise(region->begin, size, MADV_HUGEPAGE); /* advice: the memory works without */
#endif
    return region;
}

/* The region with room for BYTES, made if need be; NULL if there is no memory. */
static bml_region *region_for(bml_device *device, size_t bytes)
{
    bml_region *region = device->regions;
    if (region && region->size - region->used >= bytes)
        return region;
    region = bytes < usual_size ? region_new(device, usual_size) : NULL;
    if (!region) /* as much as is needed, where less than usual may be had */
        region = region_new(device, bytes);
    if (region) {
        region->next = device->regions;
        device->regions = region;
    }
    return region;
}

bml_status bml_cpu_weight_memory(bml_device *device, size_t bytes, bml_buffer *buffer,
                                 bml_pool **pool, bml_error *err)
{
    bml_status status = device->pool ? BML_OK : bml_pool_new(0, &device->pool, err);
    *pool = device->pool;
    if (status)
        return status;
    if (bytes < least_bytes)
        return bml_cpu_buffer_new(device, bytes, buffer, err);
    size_t rounded;
    if (!bml_add_size(bytes, 63, &rounded))
        return bml_fail_memory(err, bytes, "a weight");
    rounded &= ~(size_t)63;
    bml_region *region = region_for(device, rounded);
    if (!region) /* a limit that leaves no room for the alignment may do so for the weight */
        return bml_cpu_buffer_new(device, bytes, buffer, err);
    *buffer = (bml_buffer){.data = region->begin + region->used, .bytes = bytes};
    region->used += rounded;
    region->n_weights++;
    return BML_OK;
}

void bml_cpu_weight_memory_free(bml_device *device, bml_buffer *buffer)
{
    for (bml_region **at = &device->regions; *at; at = &(*at)->next) {
        bml_region *region = *at;
        size_t offset = (size_t)((uintptr_t)buffer->data - (uintptr_t)region->begin);
        if (offset >= region->size)
            continue;
        if (--region->n_weights == 0) {
            *at = region->next;
            bml_cpu_buffer_free(device, &region->memory);
            free(region);
        }
        *buffer = (bml_buffer){0};
        return;
    }
    bml_cpu_buffer_free(device, buffer);
}
