/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions that the interposer itself calls in the loaded libcuda.
 *
 * They are the driver's and not the runtime's, because NCCL brings a runtime of its own. Both
 * runtimes share the thread's current context, which the driver keeps. A cudaStream_t is a
 * CUstream.
 *
 * During a device session all other threads may be stopped, and one of them may be inside the
 * dynamic linker and hold its lock. So `device_calls_find` looks up all functions before, and a
 * session looks up none.
 */
#ifndef LIVESHIFT_INTERPOSER_DEVICE_CALLS_H
#define LIVESHIFT_INTERPOSER_DEVICE_CALLS_H

#include "cuda_real.h"

#include <stddef.h>

enum cuda_result { /* the values of CUresult that we distinguish */
                   CUDA_OK = 0,
                   CUDA_BUSY = 600,   /* CUDA_ERROR_NOT_READY */
                   CUDA_ABSENT = 100, /* CUDA_ERROR_NO_DEVICE: here, no driver is loaded */
};

/* CUmemAllocationProp of CUDA 11 to 13. */
struct physical_properties {
    int type, handle_types;
    struct memory_location {
        int type, id;
    } location;
    void *unused_on_linux;
    struct {
        unsigned char compression, rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};
_Static_assert(sizeof(struct physical_properties) == 32, "CUmemAllocationProp's size");

#define LOCATION_DEVICE 1 /* CU_MEM_LOCATION_TYPE_DEVICE */

/* CUmemAccessDesc. */
struct memory_access {
    struct memory_location location;
    int flags;
};

/* clang-format off */
#define LIVESHIFT_DEVICE_CALLS(X)                                                                  \
    X(cuCtxGetCurrent, (void **))                                                                  \
    X(cuCtxSetCurrent, (void *))                                                                   \
    X(cuCtxGetDevice, (int *))                                                                     \
    X(cuCtxSynchronize, (void))                                                                    \
    X(cuDriverGetVersion, (int *))                                                                 \
    X(cuDeviceGet, (int *, int))                                                                   \
    X(cuDeviceGetCount, (int *))                                                                   \
    X(cuDeviceGetAttribute, (int *, int, int))                                                     \
    X(cuDeviceGetUuid, (void *, int))                                                              \
    X(cuDeviceGetUuid_v2, (void *, int))                                                           \
    X(cuDeviceCanAccessPeer, (int *, int, int))                                                    \
    X(cuDevicePrimaryCtxGetState, (int, unsigned *, int *))                                        \
    X(cuDevicePrimaryCtxRetain, (void **, int))                                                    \
    X(cuDevicePrimaryCtxRelease_v2, (int))                                                         \
    X(cuMemAddressReserve, (unsigned long long *, size_t, size_t, unsigned long long,              \
                            unsigned long long))                                                   \
    X(cuMemAddressFree, (unsigned long long, size_t))                                              \
    X(cuMemCreate, (unsigned long long *, size_t, const struct physical_properties *,              \
                    unsigned long long))                                                           \
    X(cuMemRelease, (unsigned long long))                                                          \
    X(cuMemMap, (unsigned long long, size_t, size_t, unsigned long long, unsigned long long))      \
    X(cuMemUnmap, (unsigned long long, size_t))                                                    \
    X(cuMemSetAccess, (unsigned long long, size_t, const struct memory_access *, size_t))          \
    X(cuMemGetAllocationGranularity, (size_t *, const struct physical_properties *, int))          \
    X(cuMemRetainAllocationHandle, (unsigned long long *, void *))                                 \
    X(cuMemExportToShareableHandle, (void *, unsigned long long, int, unsigned long long))         \
    X(cuMemImportFromShareableHandle, (unsigned long long *, void *, int))                         \
    X(cuMemGetAddressRange_v2, (unsigned long long *, size_t *, unsigned long long))               \
    X(cuMemcpyDtoH_v2, (void *, unsigned long long, size_t))                                       \
    X(cuMemcpyDtoD_v2, (unsigned long long, unsigned long long, size_t))                           \
    X(cuThreadExchangeStreamCaptureMode, (int *))                                                  \
    X(cuStreamIsCapturing, (void *, int *))                                                        \
    X(cuStreamQuery, (void *))                                                                     \
    X(cuPointerGetAttribute, (void *, int, unsigned long long))
/* clang-format on */

enum device_call {
#define X(name, parameters) CALL_##name,
    LIVESHIFT_DEVICE_CALLS(X)
#undef X
        DEVICE_CALLS
};

#define X(name, parameters) typedef int call_of_##name parameters;
LIVESHIFT_DEVICE_CALLS(X)
#undef X

void *device_call(enum device_call which);

/* Looks up all functions, once. False: no driver is loaded. */
bool device_calls_find(void);

/* Calls a function. The value is its result, or CUDA_ABSENT if the driver doesn't have it. */
#define DEVICE_CALL(name, ...)                                                                     \
    ({                                                                                             \
        call_of_##name *function_ = (call_of_##name *)device_call(CALL_##name);                    \
        function_ != NULL ? CUDA_CALL(function_(__VA_ARGS__)) : (int)CUDA_ABSENT;                  \
    })

/* Whether a stream is being captured into a graph. A caller may ask at any time; it changes
   nothing. */
bool cuda_captures(void *stream);

/* Sets this thread's capture mode and returns the mode before. In mode relaxed it may call
   functions that would spoil another thread's capture (in global mode). The caller must know that
   the streams it uses are not being captured. */
int cuda_relax_captures(int mode);

#define CUDA_CAPTURES_RELAXED 2

/* Makes a device's primary context current. */
int cuda_use_device(int device);

#endif
