/* SPDX-License-Identifier: Apache-2.0 */
/* The hooks of CUDA's driver API: cuda_driver*.c define them, cuda_entry_points.c hands them
   out. */
#ifndef LIVESHIFT_INTERPOSER_CUDA_DRIVER_H
#define LIVESHIFT_INTERPOSER_CUDA_DRIVER_H

#include "cuda_hooks.h"
#include "device_calls.h"

typedef unsigned long long address_t; /* CUdeviceptr */
typedef unsigned long long handle_t;  /* CUmemGenericAllocationHandle */

/* Inside a hook: declares `real`, the function behind the hook. It comes from the loaded
   libcuda.so.1, or a resolver of CUDA gave it. */
#define DRIVER(name)                                                                               \
    __typeof__(&name) real = (__typeof__(&name))driver_function(&known_##name, #name);             \
    if (real == NULL)                                                                              \
    return cuda_missing(#name)

/* Begins a hook's definition. */
#define HOOK(name)                                                                                 \
    _Atomic(void *) known_##name;                                                                  \
    EXPORTED int name

/* A hook that returns the value of one of the macros of cuda_hooks.h. */
#define DRIVER_HOOK(name, parameters, ...)                                                         \
    HOOK(name) parameters {                                                                        \
        DRIVER(name);                                                                              \
        return __VA_ARGS__;                                                                        \
    }

#endif
