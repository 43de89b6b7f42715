/* What Apple's validation layer would object to, the stand-in's classes object to as well. */
#import <Metal/Metal.h>

#include "testing.h"

#include "backend/metal/metal.h"
#include "standin.h"

#include <unistd.h>

typedef struct things {
    id<MTLDevice> device;
    id<MTLCommandQueue> queue;
    id<MTLBuffer> buffer;
    id<MTLComputePipelineState> gelu;
    id<MTLCommandBuffer> commands;
    id<MTLComputeCommandEncoder> encoder;
    elements_args args;
} things;

/* A pass about to be encoded; all of it autoreleased. */
static things set_up(void)
{
    things t = {.args = {.n = 64, .activation = RELU}};
    t.device = [MTLCreateSystemDefaultDevice() autorelease];
    t.queue = [[t.device newCommandQueue] autorelease];
    t.buffer = [[t.device newBufferWithLength:64 * sizeof(float)
                                      options:MTLResourceStorageModeShared] autorelease];
    NSString *source = [NSString stringWithUTF8String:bml_metal_source];
    id<MTLLibrary> library = [[t.device newLibraryWithSource:source options:nil
                                                       error:nil] autorelease];
    id<MTLFunction> function =
        [[library newFunctionWithName:@"gelu"
                       constantValues:[[MTLFunctionConstantValues new] autorelease]
                                error:nil] autorelease];
    MTLComputePipelineDescriptor *descriptor = [[MTLComputePipelineDescriptor new] autorelease];
    descriptor.computeFunction = function;
    descriptor.maxTotalThreadsPerThreadgroup = 256;
    t.gelu = [[t.device newComputePipelineStateWithDescriptor:descriptor
                                                      options:MTLPipelineOptionNone
                                                   reflection:nil
                                                        error:nil] autorelease];
    t.commands = [t.queue commandBufferWithUnretainedReferences];
    t.encoder = [t.commands computeCommandEncoder];
    return t;
}

static void dispatch(things *t, NSUInteger groups, NSUInteger threads)
{
    [t->encoder dispatchThreadgroups:MTLSizeMake(groups, 1, 1)
               threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
}

static void bind_all(things *t)
{
    [t->encoder setComputePipelineState:t->gelu];
    [t->encoder setBuffer:t->buffer offset:0 atIndex:0];
    [t->encoder setBytes:&t->args length:sizeof t->args atIndex:1];
}

static void finish(things *t)
{
    [t->encoder endEncoding];
    [t->commands commit];
    [t->commands waitUntilCompleted];
}

static void nothing_wrong(things *t)
{
    bind_all(t);
    dispatch(t, 1, 64);
    finish(t);
}

static void offset_past_end(things *t)
{
    [t->encoder setBuffer:t->buffer offset:[t->buffer length] atIndex:0];
    finish(t);
}

static void odd_offset(things *t)
{
    [t->encoder setBuffer:t->buffer offset:2 atIndex:0];
    finish(t);
}

static void too_many_bytes(things *t)
{
    static char bytes[5000];
    [t->encoder setBytes:bytes length:sizeof bytes atIndex:1];
    finish(t);
}

static void no_pipeline(things *t)
{
    dispatch(t, 1, 64);
    finish(t);
}

static void too_many_threads(things *t)
{
    bind_all(t);
    dispatch(t, 1, 1056);
    finish(t);
}

static void buffer_not_bound(things *t)
{
    bind_all(t);
    [t->encoder setBuffer:nil offset:0 atIndex:0];
    dispatch(t, 1, 64);
    finish(t);
}

static void arguments_too_small(things *t)
{
    bind_all(t);
    [t->encoder setBytes:&t->args length:4 atIndex:1];
    dispatch(t, 1, 64);
    finish(t);
}

static void used_after_end(things *t)
{
    [t->encoder endEncoding];
    bind_all(t);
    [t->commands commit];
    [t->commands waitUntilCompleted];
}

static void committed_while_encoding(things *t)
{
    [t->commands commit];
    [t->commands waitUntilCompleted];
    [t->encoder endEncoding];
}

static void committed_twice(things *t)
{
    [t->encoder endEncoding];
    [t->commands commit];
    [t->commands commit];
    [t->commands waitUntilCompleted];
}

static void encoder_after_commit(things *t)
{
    [t->encoder endEncoding];
    [t->commands commit];
    id<MTLComputeCommandEncoder> late = [t->commands computeCommandEncoder];
    [late endEncoding];
    [t->commands waitUntilCompleted];
}

static void two_encoders(things *t)
{
    id<MTLComputeCommandEncoder> second = [t->commands computeCommandEncoder];
    [second endEncoding];
    finish(t);
}

static void odd_wrapping(things *t)
{
    size_t page = (size_t)getpagesize();
    [t->device newBufferWithBytesNoCopy:(char *)[t->buffer contents] + 16
                                 length:page
                                options:MTLResourceStorageModeShared
                            deallocator:nil];
    finish(t);
}

static void empty_buffer(things *t)
{
    [t->device newBufferWithLength:0 options:MTLResourceStorageModeShared];
    finish(t);
}

static void test_misuse(void **state)
{
    (void)state;
    static const struct {
        void (*misuse)(things *);
        const char *fault;
    } cases[] = {
        {nothing_wrong, NULL},
        {offset_past_end, "offset"},
        {odd_offset, "not a multiple of 4"},
        {too_many_bytes, "5000 bytes"},
        {no_pipeline, "before any pipeline"},
        {too_many_threads, "1056 threads"},
        {buffer_not_bound, "nothing is bound to buffer(0)"},
        {arguments_too_small, "buffer(1) has 4 bytes"},
        {used_after_end, "after endEncoding"},
        {committed_while_encoding, "commit before endEncoding"},
        {committed_twice, "commit twice"},
        {encoder_after_commit, "committed"},
        {two_encoders, "being encoded"},
        {odd_wrapping, "whole pages"},
        {empty_buffer, "no bytes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t before = standin_get_counts().live_objects;
        @autoreleasepool {
            things t = set_up();
            cases[i].misuse(&t);
            const char *text = [[[t.commands error] localizedDescription] UTF8String];
            if (!cases[i].fault != !text || (text && !strstr(text, cases[i].fault)))
                fail_msg("case %zu: %s", i, text ? text : "no fault");
            assert_int_equal([t.commands status],
                             text ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted);
        }
        assert_int_equal(standin_get_counts().live_objects, before);
        assert_null(metal_take_fault());
    }
}

/* Results are there once somebody has waited, not before. */
static void test_results_need_waiting(void **state)
{
    (void)state;
    @autoreleasepool {
        things t = set_up();
        float *x = [t.buffer contents];
        x[5] = -3;
        bind_all(&t);
        dispatch(&t, 1, 64);
        [t.encoder endEncoding];
        [t.commands commit];
        assert_true(x[5] == -3);
        [t.commands waitUntilCompleted];
        assert_true(x[5] == 0);
        assert_true([t.commands GPUEndTime] > [t.commands GPUStartTime]);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_misuse),
        cmocka_unit_test(test_results_need_waiting),
    };
    return cmocka_run_group_tests_name("the stand-in's classes", tests, NULL, NULL);
}
