/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA libraries that are loaded in this process: the functions behind our hooks.
 *
 * Of several libcudart in one process the one loaded first is taken: they share contexts, streams
 * and memory; all that differs is whose cudaGetLastError tells of a failure.
 */
#ifndef LIVESHIFT_INTERPOSER_CUDA_REAL_H
#define LIVESHIFT_INTERPOSER_CUDA_REAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* How deep this thread is in calls of CUDA through our hooks: what libcudart itself asks of the
   driver, or of its own exported functions, has been recorded as what the application asked for. */
extern __thread unsigned cuda_depth __attribute__((tls_model("initial-exec")));

/* A call into CUDA. */
#define CUDA_CALL(call)                                                                            \
    ({                                                                                             \
        cuda_depth++;                                                                              \
        __typeof__(call) result_of_the_call = (call);                                              \
        cuda_depth--;                                                                              \
        result_of_the_call;                                                                        \
    })

/* The real function, kept in `known`; NULL where the library isn't loaded or lacks it. */
void *runtime_function(_Atomic(void *) *known, const char *name);
void *driver_function(_Atomic(void *) *known, const char *name);

/* What a hook returns then, after one line on stderr. The same number in both of CUDA's APIs. */
int cuda_missing(const char *name);
#define CUDA_NOT_SUPPORTED 801

/* The current device by the runtime or the driver; -1: unknown. */
int32_t runtime_device(void);
int32_t driver_device(void);

/* CUDA's number (13000) of the driver and of the runtime; 0: it isn't loaded. */
uint32_t driver_version(void);
uint32_t runtime_version(void);

/* Of the capture that a stream takes part in, by whichever API is there; 0: it is in none. */
uint64_t capture_number(uint64_t stream);

/* The allocation that an address lies in; false: the driver doesn't know. */
bool allocation_around(uint64_t address, uint64_t *base, uint64_t *size);

#endif
