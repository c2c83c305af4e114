/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_calls.h"
#include "hooks/elf_lookup.h"

#include <stdatomic.h>
#include <stddef.h>

#define CUDA_LIBRARY "libcuda.so.1"

/* clang-format off */
#define FUNCTIONS(X)                                                                               \
    X(cuStreamIsCapturing, (void *, int *))                                                        \
    X(cuStreamQuery, (void *))                                                                     \
    X(cuThreadExchangeStreamCaptureMode, (int *))                                                  \
    X(cuCtxGetCurrent, (void **))                                                                  \
    X(cuCtxSetCurrent, (void *))                                                                   \
    X(cuDeviceGet, (int *, int))                                                                   \
    X(cuDevicePrimaryCtxRetain, (void **, int))                                                    \
    X(cuDevicePrimaryCtxRelease_v2, (int))
/* clang-format on */

enum function {
#define X(name, parameters) DO_##name,
    FUNCTIONS(X)
#undef X
        COUNT
};

#define X(name, parameters) typedef int real_##name parameters;
FUNCTIONS(X)
#undef X

static const char *const names[COUNT] = {
#define X(name, parameters) #name,
    FUNCTIONS(X)
#undef X
};

static _Atomic(void *) found[COUNT];

static void *real(enum function which) {
    void *function = atomic_load_explicit(&found[which], memory_order_relaxed);
    if (function == NULL) {
        function = elf_lookup(CUDA_LIBRARY, names[which], NULL);
        atomic_store_explicit(&found[which], function, memory_order_relaxed);
    }
    return function;
}

#define CALL(name, ...)                                                                            \
    __extension__({                                                                                \
        real_##name *real_ = (real_##name *)real(DO_##name);                                       \
        real_ != NULL ? real_(__VA_ARGS__) : (int)CUDA_ABSENT;                                     \
    })

bool cuda_captures(void *stream) {
    int status = 0;
    return CALL(cuStreamIsCapturing, stream, &status) == CUDA_OK && status != 0;
}

int cuda_stream_state(void *stream) { return CALL(cuStreamQuery, stream); }

int cuda_relax_captures(int mode) {
    return CALL(cuThreadExchangeStreamCaptureMode, &mode) == CUDA_OK ? mode : 0;
}

void *cuda_context(void) {
    void *context = NULL;
    return CALL(cuCtxGetCurrent, &context) == CUDA_OK ? context : NULL;
}

int cuda_set_context(void *context) { return CALL(cuCtxSetCurrent, context); }

int cuda_use_device(int device) {
    int handle, result = CALL(cuDeviceGet, &handle, device);
    void *context;
    if (result == CUDA_OK)
        result = CALL(cuDevicePrimaryCtxRetain, &context, handle);
    if (result != CUDA_OK)
        return result;
    result = CALL(cuCtxSetCurrent, context);
    /* The application holds the context, since it communicates on the device. Here it was retained
       only to get its handle. */
    CALL(cuDevicePrimaryCtxRelease_v2, handle);
    return result;
}
