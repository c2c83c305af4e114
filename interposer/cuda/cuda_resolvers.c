/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hooks of CUDA's own functions that find a driver function. Each hook asks the real resolver first
 * and replaces only what that has found. PyTorch's expandable segments and symmetric memory get
 * their functions in this way (c10's driver_api.cpp asks cudaGetDriverEntryPointByVersion).
 */

#include "cuda_driver.h"
#include "cuda_entry_points.h"

/* The flags of all resolvers. 0: the caller's default; 1: legacy default stream; 2: per thread. */
static bool wants_per_thread(uint64_t flags, bool by_default) {
    return flags != 0 ? flags == 2 : by_default;
}

#define RUNTIME_RESOLVERS(suffix, per_thread)                                                      \
    EXPORTED int cudaGetDriverEntryPoint##suffix(const char *symbol, void **function,              \
                                                 unsigned long long flags, int *status) {          \
        RUNTIME(cudaGetDriverEntryPoint##suffix);                                                  \
        int result = CUDA_CALL(real(symbol, function, flags, status));                             \
        if (result == 0)                                                                           \
            driver_substitute(symbol, runtime_version(), wants_per_thread(flags, per_thread),      \
                              function);                                                           \
        return result;                                                                             \
    }                                                                                              \
    EXPORTED int cudaGetDriverEntryPointByVersion##suffix(const char *symbol, void **function,     \
                                                          unsigned version,                        \
                                                          unsigned long long flags, int *status) { \
        RUNTIME(cudaGetDriverEntryPointByVersion##suffix);                                         \
        int result = CUDA_CALL(real(symbol, function, version, flags, status));                    \
        if (result == 0)                                                                           \
            driver_substitute(symbol, version, wants_per_thread(flags, per_thread), function);     \
        return result;                                                                             \
    }
RUNTIME_RESOLVERS(, false)
RUNTIME_RESOLVERS(_ptsz, true)

HOOK(cuGetProcAddress)(const char *symbol, void **function, int version, uint64_t flags) {
    DRIVER(cuGetProcAddress);
    int result = CUDA_CALL(real(symbol, function, version, flags));
    if (result == 0)
        driver_substitute(symbol, (unsigned)version, wants_per_thread(flags, false), function);
    return result;
}

#define DRIVER_RESOLVER(suffix, per_thread)                                                        \
    HOOK(cuGetProcAddress_v2##suffix)(const char *symbol, void **function, int version,            \
                                      uint64_t flags, int *status) {                               \
        DRIVER(cuGetProcAddress_v2##suffix);                                                       \
        int result = CUDA_CALL(real(symbol, function, version, flags, status));                    \
        if (result == 0)                                                                           \
            driver_substitute(symbol, version, wants_per_thread(flags, per_thread), function);     \
        return result;                                                                             \
    }
DRIVER_RESOLVER(, false)
DRIVER_RESOLVER(_ptsz, true)
