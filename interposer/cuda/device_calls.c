/* SPDX-License-Identifier: Apache-2.0 */
#include "device_calls.h"

static const char *const names[DEVICE_CALLS] = {
#define X(name, parameters) #name,
    LIVESHIFT_DEVICE_CALLS(X)
#undef X
};

static _Atomic(void *) known[DEVICE_CALLS];
static _Atomic bool all_found;

bool device_calls_find(void) {
    if (atomic_load_explicit(&all_found, memory_order_acquire))
        return true;
    if (driver_function(&known[CALL_cuCtxGetCurrent], names[CALL_cuCtxGetCurrent]) == NULL)
        return false;
    for (unsigned i = 0; i < DEVICE_CALLS; i++)
        driver_function(&known[i], names[i]);
    atomic_store_explicit(&all_found, true, memory_order_release);
    return true;
}

void *device_call(enum device_call which) {
    return device_calls_find() ? atomic_load_explicit(&known[which], memory_order_relaxed) : NULL;
}

bool cuda_captures(void *stream) {
    int status = 0;
    return DEVICE_CALL(cuStreamIsCapturing, stream, &status) == CUDA_OK && status != 0;
}

int cuda_relax_captures(int mode) {
    return DEVICE_CALL(cuThreadExchangeStreamCaptureMode, &mode) == CUDA_OK ? mode : 0;
}

int cuda_use_device(int device) {
    int handle, result = DEVICE_CALL(cuDeviceGet, &handle, device);
    void *context;
    if (result == CUDA_OK)
        result = DEVICE_CALL(cuDevicePrimaryCtxRetain, &context, handle);
    if (result != CUDA_OK)
        return result;
    result = DEVICE_CALL(cuCtxSetCurrent, context);
    /* The application holds the context, since it communicates on the device. Here it was retained
       only to get its handle. */
    DEVICE_CALL(cuDevicePrimaryCtxRelease_v2, handle);
    return result;
}
