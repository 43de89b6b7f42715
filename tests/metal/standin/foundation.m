#import <Foundation/Foundation.h>

#include "objects.h"

#include <stdlib.h>
#include <string.h>

/* Of GCC's runtime. */
id class_createInstance(Class class, size_t extra);
size_t class_getInstanceSize(Class class);
id object_dispose(id object);

_Atomic size_t standin_live_objects;

/* How often an object is retained, by whatever thread; behind its own variables. */
static _Atomic long *retain_count(NSObject *object)
{
    size_t size = class_getInstanceSize(*(Class *)object);
    return (_Atomic long *)((char *)object +
                            (size + sizeof(long) - 1) / sizeof(long) * sizeof(long));
}

@implementation NSObject
+ (id)alloc
{
    NSObject *object = class_createInstance(self, 2 * sizeof(long));
    *retain_count(object) = 1;
    standin_live_objects++;
    return object;
}

+ (id)new
{
    return [[self alloc] init];
}

- (id)init
{
    return self;
}

- (id)retain
{
    ++*retain_count(self);
    return self;
}

- (void)release
{
    if (--*retain_count(self) == 0)
        [self dealloc];
}

static _Thread_local NSAutoreleasePool *innermost;

- (id)autorelease
{
    if (!innermost)
        metal_fault("an object is autoreleased where there is no pool");
    [innermost add:self];
    return self;
}

- (void)dealloc
{
    standin_live_objects--;
    object_dispose(self);
}
@end

@implementation NSAutoreleasePool
- (id)init
{
    outer = innermost;
    innermost = self;
    return self;
}

- (void)add:(id)object
{
    if (count == room) {
        room = room ? 2 * room : 8;
        objects = realloc(objects, room * sizeof *objects);
        if (!objects)
            abort();
    }
    objects[count++] = object;
}

- (void)drain
{
    innermost = outer;
    [self release];
}

- (void)dealloc
{
    while (count)
        [objects[--count] release];
    free(objects);
    [super dealloc];
}
@end

@implementation NSString
+ (NSString *)stringWithUTF8String:(const char *)string
{
    NSString *new = [ self new ];
    new->text = strdup(string);
    new->length = (unsigned)strlen(string);
    return [new autorelease];
}

- (const char *)UTF8String
{
    return text;
}

- (void)dealloc
{
    free(text);
    [super dealloc];
}
@end

@implementation NSConstantString
- (id)retain
{
    return self;
}

- (void)release
{
}
@end

@implementation NSError
- (id)initWithText:(const char *)text
{
    description = [[NSString stringWithUTF8String:text] retain];
    return self;
}

- (NSString *)localizedDescription
{
    return description;
}

- (void)dealloc
{
    [description release];
    [super dealloc];
}
@end

/* What GCC's runtime keeps of its own (objects come from objc_calloc) is no leak. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_options(void);

const char *__lsan_default_suppressions(void)
{
    return "leak:objc_malloc\n";
}

const char *__lsan_default_options(void)
{
    return "print_suppressions=0";
}
