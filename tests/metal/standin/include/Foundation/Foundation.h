/* A stand-in for the little of Foundation that the Metal backend uses, on GCC's Objective-C
 * runtime. */
#import <stdbool.h>
#import <stddef.h>
#import <stdint.h>

typedef unsigned long NSUInteger;
typedef signed char BOOL;
#define YES ((BOOL)1)
#define NO ((BOOL)0)
#define nil ((void *)0)

@protocol NSObject
- (id)retain;
- (void)release;
- (id)autorelease;
@end

/* Counted, and counted as leaked while it is alive. */
__attribute__((objc_root_class))
@interface NSObject<NSObject> {
    Class isa;
}
+ (id)alloc;
+ (id)new;
- (id)init;
- (void)dealloc;
@end

@interface NSAutoreleasePool : NSObject {
    NSAutoreleasePool *outer;
    id *objects;
    size_t count, room;
}
- (void)add:(id)object;
- (void)drain;
@end

/* Laid out as the compiler lays out a constant string. */
@interface NSString : NSObject {
    char *text;
    unsigned int length;
}
+ (NSString *)stringWithUTF8String:(const char *)string;
- (const char *)UTF8String;
@end

@interface NSConstantString : NSString
@end

@interface NSError : NSObject {
    NSString *description;
}
- (NSString *)localizedDescription;
@end
