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

/* Makes `call` of a resolver, and replaces the `function` that it found for `symbol`. */
#define RESOLVES(call, version, per_thread)                                                        \
    ({                                                                                             \
        int result_ = CUDA_CALL(call);                                                             \
        if (result_ == 0)                                                                          \
            driver_substitute(symbol, version, wants_per_thread(flags, per_thread), function);     \
        result_;                                                                                   \
    })

#define RUNTIME_RESOLVERS(suffix, per_thread)                                                      \
    RUNTIME_HOOK(cudaGetDriverEntryPoint##suffix,                                                  \
                 (const char *symbol, void **function, unsigned long long flags, int *status),     \
                 RESOLVES(real(symbol, function, flags, status), runtime_version(), per_thread))   \
    RUNTIME_HOOK(cudaGetDriverEntryPointByVersion##suffix,                                         \
                 (const char *symbol, void **function, unsigned version, unsigned long long flags, \
                  int *status),                                                                    \
                 RESOLVES(real(symbol, function, version, flags, status), version, per_thread))
RUNTIME_RESOLVERS(, false)
RUNTIME_RESOLVERS(_ptsz, true)

DRIVER_HOOK(cuGetProcAddress, (const char *symbol, void **function, int version, uint64_t flags),
            RESOLVES(real(symbol, function, version, flags), (unsigned)version, false))

#define DRIVER_RESOLVER(suffix, per_thread)                                                        \
    DRIVER_HOOK(cuGetProcAddress_v2##suffix,                                                       \
                (const char *symbol, void **function, int version, uint64_t flags, int *status),   \
                RESOLVES(real(symbol, function, version, flags, status), version, per_thread))
DRIVER_RESOLVER(, false)
DRIVER_RESOLVER(_ptsz, true)
