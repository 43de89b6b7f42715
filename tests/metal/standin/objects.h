/* Shared by the stand-in's classes. */
#import <Foundation/Foundation.h>

#include "standin.h"

extern _Atomic size_t standin_live_objects;

@interface NSError (Standin)
- (id)initWithText:(const char *)text;
@end
