/* What the CUDA tests and benchmarks share: device memory that is full of random numbers, and what
 * comes out of it against what should. */
#ifndef BML_TESTS_CUDA_HELPERS_CUH
#define BML_TESTS_CUDA_HELPERS_CUH

#include "backend/cuda/cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        if (error_) {                                                                              \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                          \
                    cudaGetErrorString(error_));                                                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* About normal, of standard deviation DEVIATION: four uniform bytes summed. */
static __device__ float random_normal(uint64_t seed, size_t i, float deviation)
{
    uint64_t x = (seed + i + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    float sum = (float)(x & 0xffff) + (float)(x >> 16 & 0xffff) + (float)(x >> 32 & 0xffff) +
                (float)(x >> 48);
    return (sum - 131070.f) * (deviation / 37837.f);
}

template <typename T>
static __global__ void fill_random(T *to, size_t n, uint64_t seed, float deviation)
{
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step)
        to[i] = (T)random_normal(seed, i, deviation);
}

/* N random elements, with room behind them. */
template <typename T> static T *random_new(size_t n, float deviation)
{
    static uint64_t seed = 1;
    T *data;
    CHECK(cudaMalloc(&data, n * sizeof(T) + 256));
    fill_random<<<1024, 256>>>(data, n, seed, deviation);
    CHECK(cudaGetLastError());
    seed += (uint64_t)n << 8 | 1;
    return data;
}

/* N elements of bytes 0xff: NaN in every type here. */
template <typename T> static T *poison_new(size_t n)
{
    T *data;
    CHECK(cudaMalloc(&data, n * sizeof(T)));
    CHECK(cudaMemset(data, 0xff, n * sizeof(T)));
    return data;
}

template <typename T> static T *download(const T *from, size_t n)
{
    T *to = (T *)malloc(n * sizeof(T));
    CHECK(cudaMemcpy(to, from, n * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}

template <typename T> static T *upload(const T *from, size_t n)
{
    T *to;
    CHECK(cudaMalloc(&to, n * sizeof(T)));
    CHECK(cudaMemcpy(to, from, n * sizeof(T), cudaMemcpyHostToDevice));
    return to;
}

__host__ __device__ static inline double activated(double x, bml_activation activation)
{
    return activation == BML_ACT_RELU ? (x > 0 ? x : 0)
           : activation == BML_ACT_GELU_ERF
               ? 0.5 * x * (1 + erf(x * 0.70710678118654752))
               : 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
}

static int failures, checks;

/* ||got - wanted|| / ||wanted|| against LIMIT; NaN fails. */
struct difference {
    double error = 0, norm = 0;
    bool stray = false; /* something was written where nothing should be */

    void add(double got, double wanted)
    {
        error += (got - wanted) * (got - wanted);
        norm += wanted * wanted;
    }

    void judge(const char *what, double limit) const
    {
        double relative = sqrt(error / (norm > 0 ? norm : 1));
        checks++;
        if (relative < limit && !stray)
            return;
        failures++;
        printf("FAIL %s: error %.3g, limit %.3g%s\n", what, relative, limit,
               stray ? ", written outside" : "");
    }
};

template <typename T> static double number(T x)
{
    return (double)(float)x;
}

template <typename T> static bool poisoned(T x)
{
    return isnan((float)x);
}

#endif
