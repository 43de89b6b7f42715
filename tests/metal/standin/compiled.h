/*
 * Turns kernels compiled as C++ into what the simulator calls. A library is one file that includes
 * this, then its .metal files, and ends with METAL_LIBRARY(NAME, METAL_KERNEL(first) ...).
 */
#ifndef TESTS_METAL_COMPILED_H
#define TESTS_METAL_COMPILED_H

#include "simulator.h"

#include <utility>

template <typename T> struct metal_parameter_of;

template <typename T> struct metal_parameter_of<T *> {
    static constexpr size_t bytes = 0;
    static T *get(const metal_argument &a)
    {
        return static_cast<T *>(a.pointer);
    }
};

template <typename T> struct metal_parameter_of<T &> {
    static constexpr size_t bytes = sizeof(T);
    static T &get(const metal_argument &a)
    {
        return *static_cast<T *>(a.pointer);
    }
};

template <> struct metal_parameter_of<uint32_t> {
    static constexpr size_t bytes = 0;
    static uint32_t get(const metal_argument &a)
    {
        return a.value;
    }
};

template <typename F, F *FUNCTION> struct metal_caller;

template <typename... P, void (*FUNCTION)(P...)> struct metal_caller<void(P...), FUNCTION> {
    template <size_t... I> static void call_with(const metal_argument *a, std::index_sequence<I...>)
    {
        FUNCTION(metal_parameter_of<P>::get(a[I])...);
    }
    static void call(const metal_argument *a)
    {
        call_with(a, std::make_index_sequence<sizeof...(P)>());
    }
    static const metal_compiled *describe(const char *name)
    {
        static const size_t sizes[] = {metal_parameter_of<P>::bytes...};
        static const metal_compiled compiled = {name, call, sizes, sizeof...(P)};
        return &compiled;
    }
};

#define METAL_KERNEL(name) metal_caller<decltype(name), name>::describe(#name),
#define METAL_LIBRARY(library, ...)                                                                \
    extern "C" const metal_compiled *const *library(void);                                         \
    extern "C" const metal_compiled *const *library(void)                                          \
    {                                                                                              \
        static const metal_compiled *const kernels[] = {__VA_ARGS__ nullptr};                      \
        return kernels;                                                                            \
    }

#endif
