/* SPDX-License-Identifier: Apache-2.0 */
#include "driver.h"

#define NAMES(X)                                                                                   \
    X(cudaSuccess)                                                                                 \
    X(cudaErrorInvalidValue)                                                                       \
    X(cudaErrorMemoryAllocation)                                                                   \
    X(cudaErrorInitializationError)                                                                \
    X(cudaErrorCudartUnloading)                                                                    \
    X(cudaErrorInsufficientDriver)                                                                 \
    X(cudaErrorNoDevice)                                                                           \
    X(cudaErrorInvalidDevice)                                                                      \
    X(cudaErrorDeviceUninitialized)                                                                \
    X(cudaErrorOperatingSystem)                                                                    \
    X(cudaErrorInvalidResourceHandle)                                                              \
    X(cudaErrorIllegalState)                                                                       \
    X(cudaErrorSymbolNotFound)                                                                     \
    X(cudaErrorNotReady)                                                                           \
    X(cudaErrorHostMemoryAlreadyRegistered)                                                        \
    X(cudaErrorHostMemoryNotRegistered)                                                            \
    X(cudaErrorNotPermitted)                                                                       \
    X(cudaErrorNotSupported)                                                                       \
    X(cudaErrorStreamCaptureUnsupported)                                                           \
    X(cudaErrorStreamCaptureInvalidated)                                                           \
    X(cudaErrorStreamCaptureUnjoined)                                                              \
    X(cudaErrorStreamCaptureImplicit)                                                              \
    X(cudaErrorCapturedEvent)                                                                      \
    X(cudaErrorUnknown)

static _Thread_local cudaError_t last_error;

cudaError_t noted(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define X(name)                                                                                    \
    case name:                                                                                     \
        return #name;
        NAMES(X)
#undef X
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    const char *text = NULL;
    if (error == cudaErrorInsufficientDriver)
        return "CUDA driver version is insufficient for CUDA runtime version";
    if (driver_load() != cudaErrorInsufficientDriver)
        driver.cuGetErrorString((CUresult)error, &text);
    return text ? text : "unrecognized error code";
}
