/*
 * The classes of Metal that the backend uses, as strict as Apple's validation layer: what it would
 * object to is a fault, and the command buffer fails. Work is done as late as Metal may do it, in
 * waitUntilCompleted, so that whoever does not wait sees nothing.
 */
#import <Metal/Metal.h>

#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

extern const metal_compiled *const *bml_metal_kernels(void);

static standin_counts counts;
static const metal_compiled *const *library_kernels;
static bool no_device, no_matrices, pipelines_fail, buffers_fail, pages_refused, fast_math_assumed;

standin_counts standin_get_counts(void)
{
    counts.live_objects = standin_live_objects;
    return counts;
}

void standin_use_library(const metal_compiled *const *kernels)
{
    library_kernels = kernels;
}

void standin_set_device(bool present, bool has_matrices)
{
    no_device = !present;
    no_matrices = !has_matrices;
}

void standin_fail_pipelines(bool fail)
{
    pipelines_fail = fail;
}

void standin_fail_buffers(bool fail)
{
    buffers_fail = fail;
}

void standin_refuse_pages(bool refuse)
{
    pages_refused = refuse;
}

void standin_assume_fast_math(bool assume)
{
    fast_math_assumed = assume;
}

static void set_error(NSError **error, const char *text)
{
    if (error)
        *error = [[[NSError alloc] initWithText:text] autorelease];
}

/* ---- programs ---------------------------------------------------------------------------------*/

@implementation MTLCompileOptions
@synthesize fastMathEnabled;
- (id)init
{
    fastMathEnabled = YES; /* Metal's default */
    return self;
}
@end

@implementation MTLFunctionConstantValues
- (void)setConstantValue:(const void *)value type:(MTLDataType)type atIndex:(NSUInteger)index
{
    if (type != MTLDataTypeUInt || index >= METAL_MAX_CONSTANTS) {
        metal_fault("function constant %lu: the stand-in knows uint, and numbers below %d", index,
                    METAL_MAX_CONSTANTS);
        return;
    }
    memcpy(&values[index], value, sizeof values[index]);
    given[index] = true;
}

- (void)copyTo:(uint32_t *)to given:(bool *)is_given
{
    memcpy(to, values, sizeof values);
    memcpy(is_given, given, sizeof given);
}
@end

@interface StandinFunction : NSObject <MTLFunction> {
  @public
    metal_function function;
    uint32_t values[METAL_MAX_CONSTANTS];
    bool given[METAL_MAX_CONSTANTS], fast_math;
}
@end
@implementation StandinFunction
@end

@interface StandinLibrary : NSObject <MTLLibrary> {
  @public
    char *source;
    const metal_compiled *const *kernels;
    bool fast_math;
}
@end
@implementation StandinLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString *)name
                        constantValues:(MTLFunctionConstantValues *)constants
                                 error:(NSError **)error
{
    char message[512];
    StandinFunction *new = [ StandinFunction new ];
    [constants copyTo:new->values given:new->given];
    new->fast_math = fast_math;
    if (metal_function_find(&new->function, kernels, source, [name UTF8String], message,
                            sizeof message)) {
        counts.functions++;
        return new;
    }
    set_error(error, message);
    [new release];
    return nil;
}

- (void)dealloc
{
    free(source);
    [super dealloc];
}
@end

@implementation MTLComputePipelineDescriptor
@synthesize computeFunction, maxTotalThreadsPerThreadgroup;
- (void)dealloc
{
    [computeFunction release];
    [super dealloc];
}
@end

@interface StandinPipeline : NSObject <MTLComputePipelineState> {
  @public
    StandinFunction *function;
    NSUInteger most_threads;
}
@end
@implementation StandinPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup
{
    return most_threads;
}

- (NSUInteger)threadExecutionWidth
{
    return 32;
}

- (void)dealloc
{
    [function release];
    [super dealloc];
}
@end

/* ---- memory -----------------------------------------------------------------------------------*/

@interface StandinBuffer : NSObject <MTLBuffer> {
  @public
    char *memory;
    size_t bytes;
    bool owned;
}
@end
@implementation StandinBuffer
- (void *)contents
{
    return memory;
}

- (NSUInteger)length
{
    return bytes;
}

- (void)dealloc
{
    if (owned)
        free(memory);
    [super dealloc];
}
@end

/* ---- commands ---------------------------------------------------------------------------------*/

typedef struct command {
    struct command *next;
    StandinPipeline *pipeline; /* retained */
    metal_launch launch;
    struct {
        StandinBuffer *buffer; /* not retained: whoever encodes keeps it until the end */
        size_t offset;
        uint8_t *copy; /* of setBytes; owned */
    } bindings[METAL_MAX_BUFFERS];
} command;

@interface StandinCommandBuffer : NSObject <MTLCommandBuffer> {
  @public
    command *first, **last;
    bool encoding;
    MTLCommandBufferStatus status;
    NSError *failure;
    double start, end;
}
@end

@interface StandinEncoder : NSObject <MTLComputeCommandEncoder> {
  @public
    StandinCommandBuffer *commands; /* retained */
    command now;
    bool ended;
}
@end

static void free_copies(command *c)
{
    for (size_t i = 0; i < METAL_MAX_BUFFERS; i++) {
        free(c->bindings[i].copy);
        c->bindings[i].copy = NULL;
    }
}

@implementation StandinEncoder
- (bool)isOpen:(const char *)what index:(NSUInteger)index
{
    if (ended)
        metal_fault("%s after endEncoding", what);
    if (index >= METAL_MAX_BUFFERS)
        metal_fault("%s at index %lu", what, index);
    return !ended && index < METAL_MAX_BUFFERS;
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline
{
    if ([self isOpen:"setComputePipelineState" index:0])
        now.pipeline = (StandinPipeline *)pipeline;
}

- (void)bind:(StandinBuffer *)buffer offset:(size_t)offset copy:(uint8_t *)copy at:(size_t)index
{
    free(now.bindings[index].copy);
    now.bindings[index].buffer = buffer;
    now.bindings[index].offset = offset;
    now.bindings[index].copy = copy;
}

- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index
{
    if (![self isOpen:"setBuffer" index:index])
        return;
    if (buffer && offset >= [buffer length])
        metal_fault("setBuffer: offset %lu in a buffer of %lu bytes", offset, [buffer length]);
    else if (offset % 4)
        metal_fault("setBuffer: offset %lu is not a multiple of 4", offset);
    else
        [self bind:(StandinBuffer *)buffer offset:offset copy:NULL at:index];
}

- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index
{
    if (![self isOpen:"setBytes" index:index])
        return;
    if (!length || length > 4096) {
        metal_fault("setBytes: %lu bytes; it takes 1 to 4096", length);
        return;
    }
    uint8_t *copy = malloc(length);
    memcpy(copy, bytes, length);
    [self bind:nil offset:length copy:copy at:index];
}

- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index
{
    if ([self isOpen:"setThreadgroupMemoryLength" index:index])
        now.launch.threadgroup_bytes[index] = length;
}

- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads
{
    if (![self isOpen:"dispatchThreadgroups" index:0])
        return;
    if (!now.pipeline) {
        metal_fault("dispatchThreadgroups before any pipeline is set");
        return;
    }
    if (groups.height != 1 || groups.depth != 1 || threads.height != 1 || threads.depth != 1 ||
        groups.width > UINT32_MAX || threads.width > UINT32_MAX) {
        metal_fault("dispatchThreadgroups: the stand-in has grids of one dimension");
        return;
    }
    if (threads.width > now.pipeline->most_threads) {
        metal_fault("dispatchThreadgroups: %lu threads; the pipeline allows %lu", threads.width,
                    now.pipeline->most_threads);
        return;
    }
    command *c = malloc(sizeof *c);
    *c = now;
    c->next = NULL;
    [c->pipeline retain];
    size_t local = 0;
    for (size_t i = 0; i < METAL_MAX_BUFFERS; i++) {
        local += now.launch.threadgroup_bytes[i];
        if (!now.bindings[i].copy)
            continue;
        c->bindings[i].copy = malloc(now.bindings[i].offset);
        memcpy(c->bindings[i].copy, now.bindings[i].copy, now.bindings[i].offset);
    }
    if (local > counts.most_threadgroup_bytes)
        counts.most_threadgroup_bytes = local;
    c->launch.n_groups = (uint32_t)groups.width;
    c->launch.n_threads = (uint32_t)threads.width;
    *commands->last = c;
    commands->last = &c->next;
    counts.dispatches++;
}

- (void)endEncoding
{
    if (ended)
        metal_fault("endEncoding twice");
    ended = true;
    commands->encoding = false;
}

- (void)dealloc
{
    if (!ended)
        metal_fault("an encoder is gone before endEncoding");
    free_copies(&now);
    [commands release];
    [super dealloc];
}
@end

/* A command with its memory looked up, run. */
static bool run_command(command *c)
{
    metal_launch *l = &c->launch;
    const StandinFunction *f = c->pipeline->function;
    l->function = &f->function;
    l->fast_math = f->fast_math;
    for (size_t i = 0; i < METAL_MAX_CONSTANTS; i++) {
        l->constants[i].value = f->given[i] ? &f->values[i] : NULL;
        l->constants[i].bytes = sizeof f->values[i];
    }
    for (size_t i = 0; i < METAL_MAX_BUFFERS; i++) {
        StandinBuffer *buffer = c->bindings[i].buffer;
        size_t offset = c->bindings[i].offset;
        l->buffers[i].data = c->bindings[i].copy ? (char *)c->bindings[i].copy
                             : buffer            ? buffer->memory + offset
                                                 : NULL;
        l->buffers[i].bytes = c->bindings[i].copy ? offset : buffer ? buffer->bytes - offset : 0;
    }
    return metal_run(l);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

@implementation StandinCommandBuffer
- (id)init
{
    last = &first;
    return self;
}

- (id<MTLComputeCommandEncoder>)computeCommandEncoder
{
    if (status != MTLCommandBufferStatusNotEnqueued || encoding)
        metal_fault("an encoder for a command buffer that is %s",
                    encoding ? "being encoded" : "committed");
    StandinEncoder *new = [ StandinEncoder new ];
    new->commands = [ self retain ];
    encoding = true;
    counts.encoders++;
    return [new autorelease];
}

- (void)commit
{
    if (status != MTLCommandBufferStatusNotEnqueued)
        metal_fault("commit twice");
    if (encoding)
        metal_fault("commit before endEncoding");
    status = MTLCommandBufferStatusCommitted;
    counts.command_buffers++;
}

- (void)waitUntilCompleted
{
    if (status == MTLCommandBufferStatusNotEnqueued) {
        metal_fault("waitUntilCompleted before commit");
        return;
    }
    if (status != MTLCommandBufferStatusCommitted)
        return;
    bool fine = true;
    start = now();
    for (command *c = first; c && fine; c = c->next)
        fine = run_command(c);
    const char *fault = metal_take_fault(); /* of these commands, or of their encoding */
    status = fault ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
    if (fault)
        failure = [[NSError alloc] initWithText:fault];
    end = now();
}

- (MTLCommandBufferStatus)status
{
    return status;
}

- (NSError *)error
{
    return failure;
}

- (double)GPUStartTime
{
    return start;
}

- (double)GPUEndTime
{
    return end;
}

- (void)dealloc
{
    if (status == MTLCommandBufferStatusCommitted)
        metal_fault("nobody waited for a command buffer");
    while (first) {
        command *c = first;
        first = c->next;
        free_copies(c);
        [c->pipeline release];
        free(c);
    }
    [failure release];
    [super dealloc];
}
@end

@interface StandinQueue : NSObject <MTLCommandQueue>
@end
@implementation StandinQueue
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences
{
    return [[StandinCommandBuffer new] autorelease];
}
@end

/* ---- the device -------------------------------------------------------------------------------*/

@interface StandinDevice : NSObject <MTLDevice>
@end
@implementation StandinDevice
- (NSString *)name
{
    return @"stand-in";
}

- (BOOL)supportsFamily:(MTLGPUFamily)family
{
    return family == MTLGPUFamilyApple7 && !no_matrices;
}

- (NSUInteger)maxThreadgroupMemoryLength
{
    return METAL_MAX_THREADGROUP_BYTES;
}

- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source
                               options:(MTLCompileOptions *)options
                                 error:(NSError **)error
{
    (void)error;
    StandinLibrary *new = [ StandinLibrary new ];
    new->source = strdup([source UTF8String]);
    new->kernels = library_kernels ? library_kernels : bml_metal_kernels();
    new->fast_math = fast_math_assumed || !options || [ options fastMathEnabled ];
    counts.libraries++;
    return new;
}

- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:
                                   (MTLComputePipelineDescriptor *)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:(id *)reflection
                                                               error:(NSError **)error
{
    (void)options, (void)reflection;
    if (pipelines_fail) {
        set_error(error, "the test wants no pipelines");
        return nil;
    }
    StandinPipeline *new = [ StandinPipeline new ];
    NSUInteger most = [descriptor maxTotalThreadsPerThreadgroup];
    new->function = [ (StandinFunction *)[descriptor computeFunction] retain ];
    new->most_threads = most ? most : METAL_MAX_THREADS;
    counts.pipelines++;
    return new;
}

- (id<MTLCommandQueue>)newCommandQueue
{
    return [StandinQueue new];
}

- (StandinBuffer *)newBuffer:(void *)memory length:(size_t)length owned:(bool)owned
{
    if (!length)
        metal_fault("a buffer of no bytes");
    if (!memory || !length || buffers_fail) {
        free(owned ? memory : NULL);
        return nil;
    }
    StandinBuffer *new = [ StandinBuffer new ];
    new->memory = memory;
    new->bytes = length;
    new->owned = owned;
    counts.buffers++;
    return new;
}

/* Page-aligned as Metal's are, and no longer than asked for, so that AddressSanitizer sees the end.
 */
static void *aligned(size_t bytes)
{
    void *memory = NULL;
    return posix_memalign(&memory, (size_t)sysconf(_SC_PAGESIZE), bytes) ? NULL : memory;
}

- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options
{
    (void)options;
    void *memory = length > SIZE_MAX / 2 ? NULL : aligned(length);
    if (memory)
        memset(memory, 0, length);
    return [self newBuffer:memory length:length owned:true];
}

- (id<MTLBuffer>)newBufferWithBytes:(const void *)bytes
                             length:(NSUInteger)length
                            options:(MTLResourceOptions)options
{
    (void)options;
    void *memory = aligned(length);
    if (memory)
        memcpy(memory, bytes, length);
    return [self newBuffer:memory length:length owned:true];
}

- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void *)bytes
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(id)deallocator
{
    (void)options;
    NSUInteger page = (NSUInteger)sysconf(_SC_PAGESIZE);
    if ((uintptr_t)bytes % page || length % page || deallocator) {
        metal_fault("newBufferWithBytesNoCopy: memory and length must be whole pages");
        return nil;
    }
    if (pages_refused)
        return nil;
    StandinBuffer *new = [ self newBuffer : bytes length : length owned : false ];
    counts.wrapped += new != nil;
    return new;
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void)
{
    return no_device ? nil : [StandinDevice new];
}
