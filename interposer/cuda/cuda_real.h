/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA libraries that are loaded in this process: the functions behind our hooks.
 *
 * If a process has loaded several libcudart, we use the one loaded first. They share contexts,
 * streams and memory. The only difference is whose cudaGetLastError reports a failure.
 */
#ifndef LIVESHIFT_INTERPOSER_CUDA_REAL_H
#define LIVESHIFT_INTERPOSER_CUDA_REAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* How many calls of CUDA through our hooks this thread is inside. Above 0, a call comes from
   libcudart itself (to the driver or to its own exported functions). We do not record it, because
   we recorded the application's call that led to it. */
extern __thread unsigned cuda_depth __attribute__((tls_model("initial-exec")));

/* Makes a call into CUDA; hooks that it reaches record nothing. */
#define CUDA_CALL(call)                                                                            \
    ({                                                                                             \
        cuda_depth++;                                                                              \
        __typeof__(call) result_of_the_call = (call);                                              \
        cuda_depth--;                                                                              \
        result_of_the_call;                                                                        \
    })

/* The real function, which `known` remembers; NULL if the library isn't loaded or lacks it. */
void *runtime_function(_Atomic(void *) *known, const char *name);
void *driver_function(_Atomic(void *) *known, const char *name);

/* A hook without a real function returns this: it prints one line on stderr and gives
   CUDA_NOT_SUPPORTED, the same number in both of CUDA's APIs. */
int cuda_missing(const char *name);
#define CUDA_NOT_SUPPORTED 801

/* The thread's current device as the runtime or the driver reports it; -1: unknown. */
int32_t runtime_device(void);
int32_t driver_device(void);

/* The version of the driver and of the runtime in CUDA's form (13000); 0: it isn't loaded. */
uint32_t driver_version(void);
uint32_t runtime_version(void);

/* The number of the capture that a stream takes part in, from the API that is loaded; 0: none. */
uint64_t capture_number(uint64_t stream);

/* Finds the allocation in which an address lies; false: the driver knows none. */
bool allocation_containing(uint64_t address, uint64_t *base, uint64_t *size);

#endif
