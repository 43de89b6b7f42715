#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

/* There when AddressSanitizer is. */
void __asan_unpoison_memory_region(const volatile void *address, size_t size) __attribute__((weak));

/* Keeps the registers that a call must keep; the rest the compiler has saved. */
#if defined(__x86_64__)
__asm__(".text\n.globl fiber_switch\n.type fiber_switch, @function\nfiber_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
        ".size fiber_switch, .-fiber_switch\n");
enum { ENTRY_WORD = 6, FRAME_WORDS = 8 };
#elif defined(__aarch64__)
__asm__(".text\n.globl fiber_switch\n.type fiber_switch, %function\nfiber_switch:\n"
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
        "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
        "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
        "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
        "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nret\n"
        ".size fiber_switch, .-fiber_switch\n");
enum { ENTRY_WORD = 11, FRAME_WORDS = 20 };
#else
#error "fiber_switch is written for x86-64 and AArch64"
#endif

char *fiber_stacks_new(size_t n)
{
    char *stacks = mmap(NULL, n * FIBER_STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED)
        return NULL;
    /* Fibers that were given up in the middle have left their frames behind. */
    if (__asan_unpoison_memory_region)
        __asan_unpoison_memory_region(stacks, n * FIBER_STACK_BYTES);
    for (size_t i = 0; i < n; i++)
        mprotect(stacks + i * FIBER_STACK_BYTES, (size_t)sysconf(_SC_PAGESIZE), PROT_NONE);
    return stacks;
}

void fiber_stacks_free(char *stacks, size_t n)
{
    if (stacks)
        munmap(stacks, n * FIBER_STACK_BYTES);
}

void *fiber_start(char *stack, void (*entry)(void))
{
    uintptr_t *frame = (uintptr_t *)(stack + FIBER_STACK_BYTES) - FRAME_WORDS - 8;
    for (int i = 0; i < FRAME_WORDS; i++)
        frame[i] = 0;
    frame[ENTRY_WORD] = (uintptr_t)entry;
    return frame;
}
