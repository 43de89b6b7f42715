/* The kernel suite on every instruction set that this machine has. */
#include "backend/cpu/cpu.h"

#include "kernel_suite.h"

#include <stdio.h>
#include <string.h>

/* test_kernels [ISA]: every instruction set that this machine has, with one thread and three, or
 * the one named, with three alone: under an emulator a suite takes a minute. */
int main(int argc, char **argv)
{
    int failed = 0, groups = 0;
    for (int isa = 0; isa < BML_CPU_N_ISAS; isa++)
        for (int n_threads = argc > 1 ? 3 : 1; n_threads <= 3; n_threads += 2) {
            const bml_backend *b = bml_cpu_backend((bml_cpu_isa)isa);
            const char *name = bml_cpu_isa_name((bml_cpu_isa)isa);
            if (!b || (argc > 1 && strcmp(argv[1], name) != 0))
                continue;
            groups++;
            char title[64];
            snprintf(title, sizeof title, "kernels, %s, %d threads", name, n_threads);
            failed += run_kernel_suite(&(kernel_suite){.title = title,
                                                       .backend = b,
                                                       .n_threads = n_threads,
                                                       .seed = (uint64_t)(isa * 10 + n_threads),
                                                       .quantizes_activations = true,
                                                       .scales_by_row = true,
                                                       .packer = b});
        }
    if (!groups)
        fprintf(stderr, "this machine does not have the kernels %s\n", argv[1]);
    return failed || !groups;
}
