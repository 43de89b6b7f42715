/* Which kernels this machine can run. */
#include "backend/cpu/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

extern const bml_backend bml_cpu_base_backend;

#if defined(__x86_64__)
extern const bml_backend bml_cpu_avx2_backend, bml_cpu_avx512_backend, bml_cpu_avx512vnni_backend;

/* clang 14's __builtin_cpu_supports does not know f16c. */
static bool has_f16c(void)
{
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

/* The builtins also ask whether the operating system saves the wide registers. */
static const bml_backend *backend_of(bml_cpu_isa isa)
{
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (isa == BML_CPU_AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        has_f16c())
        return &bml_cpu_avx2_backend;
    if (isa == BML_CPU_AVX512 && avx512)
        return &bml_cpu_avx512_backend;
    if (isa == BML_CPU_AVX512VNNI && avx512 && __builtin_cpu_supports("avx512vnni"))
        return &bml_cpu_avx512vnni_backend;
    return NULL;
}

#elif defined(__aarch64__)
extern const bml_backend bml_cpu_dotprod_backend;

static bool has_dotprod(void)
{
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) == 0 && has;
#else
    return false;
#endif
}

static const bml_backend *backend_of(bml_cpu_isa isa)
{
    return isa == BML_CPU_DOTPROD && has_dotprod() ? &bml_cpu_dotprod_backend : NULL;
}

#else
static const bml_backend *backend_of(bml_cpu_isa isa)
{
    (void)isa;
    return NULL;
}
#endif

const bml_backend *bml_cpu_backend(bml_cpu_isa isa)
{
    return isa == BML_CPU_BASE ? &bml_cpu_base_backend : backend_of(isa);
}

const char *bml_cpu_isa_name(bml_cpu_isa isa)
{
    static const char *const names[BML_CPU_N_ISAS] = {"base", "avx2", "avx512", "avx512vnni",
                                                      "dotprod"};
    return names[isa];
}

const bml_backend *bml_backend_cpu(void)
{
    int isa = BML_CPU_N_ISAS - 1;
    while (!bml_cpu_backend(isa))
        isa--;
    return bml_cpu_backend(isa);
}
