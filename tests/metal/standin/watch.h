/* What a dispatch may touch, and who has touched it: bounds, races, reads before any write. */
#ifndef TESTS_METAL_WATCH_H
#define TESTS_METAL_WATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A thread and the moment it is in. Barriers of each kind of memory move the moment on: [0] counts
 * those for device, [1] those for threadgroup memory. */
typedef struct watch_moment {
    uint32_t group, thread;
    uint32_t group_barriers[2], simdgroup_barriers[2];
} watch_moment;

void watch_begin(bool races);
/* Device memory, or with IN_THREADGROUP a threadgroup's. */
void watch_add(void *data, size_t bytes, bool writable, bool in_threadgroup, const char *what,
               uint32_t index);
/* Another threadgroup gets the threadgroup memory, which then holds nothing. */
void watch_next_group(void);
/* Whether an access is fine; a fault has been reported otherwise. */
bool watch_access(const void *address, size_t bytes, bool store, const watch_moment *now);
void watch_end(void);

#ifdef __cplusplus
}
#endif
#endif
