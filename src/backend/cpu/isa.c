/* Which kernels this machine can run. */
#include "backend/cpu/cpu.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

extern const bml_backend bml_cpu_base_backend;
#ifdef __x86_64__
extern const bml_backend bml_cpu_avx2_backend, bml_cpu_avx512_backend, bml_cpu_avx512vnni_backend;

/* clang 14's __builtin_cpu_supports does not know f16c. */
static bool has_f16c(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

const bml_backend *bml_cpu_backend(bml_cpu_isa isa)
{
#ifdef __x86_64__
    /* These also ask whether the operating system saves the wide registers. */
    if (isa == BML_CPU_AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        has_f16c())
        return &bml_cpu_avx2_backend;
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (isa == BML_CPU_AVX512 && avx512)
        return &bml_cpu_avx512_backend;
    if (isa == BML_CPU_AVX512VNNI && avx512 && __builtin_cpu_supports("avx512vnni"))
        return &bml_cpu_avx512vnni_backend;
#endif
    return isa == BML_CPU_BASE ? &bml_cpu_base_backend : NULL;
}

const bml_backend *bml_backend_cpu(void)
{
    int isa = BML_CPU_N_ISAS - 1;
    while (!bml_cpu_backend(isa))
        isa--;
    return bml_cpu_backend(isa);
}
