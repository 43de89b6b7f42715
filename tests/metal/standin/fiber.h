/* Fibers: stacks of their own that one thread switches between in a few nanoseconds. */
#ifndef TESTS_METAL_FIBER_H
#define TESTS_METAL_FIBER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FIBER_STACK_BYTES = 128 << 10 }; /* with a guard page at its end */

/* Leaves this stack at *SAVED and goes on where LOADED was left. */
void fiber_switch(void **saved, void *loaded);

/* N stacks, one after the other; NULL if there is no memory. */
char *fiber_stacks_new(size_t n);
void fiber_stacks_free(char *stacks, size_t n);

/* Makes the stack at STACK ready to be switched to: it then runs ENTRY, which must not return. */
void *fiber_start(char *stack, void (*entry)(void));

#ifdef __cplusplus
}
#endif
#endif
