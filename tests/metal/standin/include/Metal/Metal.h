/* A stand-in for the little of Metal that the backend uses. */
#import <Foundation/Foundation.h>

typedef struct MTLSize {
    NSUInteger width, height, depth;
} MTLSize;

static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth)
{
    return (MTLSize){width, height, depth};
}

typedef enum MTLResourceOptions { MTLResourceStorageModeShared = 0 } MTLResourceOptions;
typedef enum MTLGPUFamily { MTLGPUFamilyApple7 = 1007 } MTLGPUFamily;
typedef enum MTLDataType { MTLDataTypeUInt = 33 } MTLDataType;
typedef enum MTLPipelineOption { MTLPipelineOptionNone = 0 } MTLPipelineOption;
typedef enum MTLCommandBufferStatus {
    MTLCommandBufferStatusNotEnqueued = 0,
    MTLCommandBufferStatusCommitted = 2,
    MTLCommandBufferStatusCompleted = 4,
    MTLCommandBufferStatusError = 5
} MTLCommandBufferStatus;

@interface MTLCompileOptions : NSObject {
    BOOL fastMathEnabled;
}
@property(nonatomic) BOOL fastMathEnabled;
@end

@interface MTLFunctionConstantValues : NSObject {
    uint32_t values[8];
    bool given[8];
}
- (void)setConstantValue:(const void *)value type:(MTLDataType)type atIndex:(NSUInteger)index;
@end

@protocol MTLFunction <NSObject>
@end

@protocol MTLLibrary <NSObject>
- (id<MTLFunction>)newFunctionWithName:(NSString *)name
                        constantValues:(MTLFunctionConstantValues *)values
                                 error:(NSError **)error;
@end

@interface MTLComputePipelineDescriptor : NSObject {
    id<MTLFunction> computeFunction;
    NSUInteger maxTotalThreadsPerThreadgroup;
}
@property(nonatomic, retain) id<MTLFunction> computeFunction;
@property(nonatomic) NSUInteger maxTotalThreadsPerThreadgroup; /* 0: as many as can be */
@end

@protocol MTLComputePipelineState <NSObject>
- (NSUInteger)maxTotalThreadsPerThreadgroup;
- (NSUInteger)threadExecutionWidth;
@end

@protocol MTLBuffer <NSObject>
- (void *)contents;
- (NSUInteger)length;
@end

@protocol MTLComputeCommandEncoder <NSObject>
- (void)setComputePipelineState:(id<MTLComputePipelineState>)pipeline;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads;
- (void)endEncoding;
@end

@protocol MTLCommandBuffer <NSObject>
- (id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (void)commit;
- (void)waitUntilCompleted;
- (MTLCommandBufferStatus)status;
- (NSError *)error;
- (double)GPUStartTime;
- (double)GPUEndTime;
@end

@protocol MTLCommandQueue <NSObject>
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences;
@end

@protocol MTLDevice <NSObject>
- (NSString *)name;
- (BOOL)supportsFamily:(MTLGPUFamily)family;
- (NSUInteger)maxThreadgroupMemoryLength;
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source
                               options:(MTLCompileOptions *)options
                                 error:(NSError **)error;
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:
                                   (MTLComputePipelineDescriptor *)descriptor
                                                             options:(MTLPipelineOption)options
                                                          reflection:(id *)reflection
                                                               error:(NSError **)error;
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLBuffer>)newBufferWithBytes:(const void *)bytes
                             length:(NSUInteger)length
                            options:(MTLResourceOptions)options;
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void *)bytes
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(id)deallocator;
@end

/* Retained for the caller. */
id<MTLDevice> MTLCreateSystemDefaultDevice(void);
