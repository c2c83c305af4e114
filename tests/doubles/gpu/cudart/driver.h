/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The way to the driver: dlopen("libcuda.so.1"), then cuGetProcAddress for everything, as the real
 * libcudart goes. An interposer at either layer sees what it would see there.
 */
#ifndef SIMCUDART_DRIVER_H
#define SIMCUDART_DRIVER_H

#include "cudart_abi.h"

/* X(name for cuGetProcAddress, suffix of the declaration, CUDA version) */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(cuInit, , 2000)                                                                              \
    X(cuDriverGetVersion, , 2020)                                                                  \
    X(cuGetErrorString, , 6000)                                                                    \
    X(cuDeviceGetCount, , 2000)                                                                    \
    X(cuDeviceGetAttribute, , 2000)                                                                \
    X(cuDeviceGetPCIBusId, , 4010)                                                                 \
    X(cuDeviceGetByPCIBusId, , 4010)                                                               \
    X(cuDeviceCanAccessPeer, , 4000)                                                               \
    X(cuDevicePrimaryCtxRetain, , 7000)                                                            \
    X(cuDevicePrimaryCtxReset, _v2, 11000)                                                         \
    X(cuDevicePrimaryCtxSetFlags, _v2, 11000)                                                      \
    X(cuDevicePrimaryCtxGetState, , 7000)                                                          \
    X(cuCtxSetCurrent, , 4000)                                                                     \
    X(cuCtxGetCurrent, , 4000)                                                                     \
    X(cuCtxGetDevice, , 2000)                                                                      \
    X(cuCtxSynchronize, , 2000)                                                                    \
    X(cuCtxGetStreamPriorityRange, , 5050)                                                         \
    X(cuCtxEnablePeerAccess, , 4000)                                                               \
    X(cuCtxDisablePeerAccess, , 4000)                                                              \
    X(cuMemGetInfo, _v2, 3020)                                                                     \
    X(cuMemAlloc, _v2, 3020)                                                                       \
    X(cuMemAllocPitch, _v2, 3020)                                                                  \
    X(cuMemAllocManaged, , 6000)                                                                   \
    X(cuMemFree, _v2, 3020)                                                                        \
    X(cuPointerGetAttributes, , 7000)                                                              \
    X(cuMemHostAlloc, , 2020)                                                                      \
    X(cuMemFreeHost, , 2000)                                                                       \
    X(cuMemHostRegister, _v2, 6050)                                                                \
    X(cuMemHostUnregister, , 4000)                                                                 \
    X(cuMemHostGetDevicePointer, _v2, 3020)                                                        \
    X(cuMemHostGetFlags, , 3020)                                                                   \
    X(cuIpcGetMemHandle, , 4010)                                                                   \
    X(cuIpcOpenMemHandle, _v2, 11000)                                                              \
    X(cuIpcCloseMemHandle, , 4010)                                                                 \
    X(cuMemAllocAsync, , 11020)                                                                    \
    X(cuMemAllocFromPoolAsync, , 11020)                                                            \
    X(cuMemFreeAsync, , 11020)                                                                     \
    X(cuDeviceGetDefaultMemPool, , 11020)                                                          \
    X(cuDeviceGetMemPool, , 11020)                                                                 \
    X(cuDeviceSetMemPool, , 11020)                                                                 \
    X(cuMemPoolCreate, , 11020)                                                                    \
    X(cuMemPoolDestroy, , 11020)                                                                   \
    X(cuMemPoolGetAttribute, , 11020)                                                              \
    X(cuMemPoolSetAttribute, , 11020)                                                              \
    X(cuMemPoolSetAccess, , 11020)                                                                 \
    X(cuMemPoolTrimTo, , 11020)                                                                    \
    X(cuMemcpy, , 4000)                                                                            \
    X(cuMemcpyAsync, , 4000)                                                                       \
    X(cuMemcpyHtoD, _v2, 3020)                                                                     \
    X(cuMemcpyDtoH, _v2, 3020)                                                                     \
    X(cuMemcpyDtoD, _v2, 3020)                                                                     \
    X(cuMemcpyHtoDAsync, _v2, 3020)                                                                \
    X(cuMemcpyDtoHAsync, _v2, 3020)                                                                \
    X(cuMemcpyDtoDAsync, _v2, 3020)                                                                \
    X(cuMemsetD8, _v2, 3020)                                                                       \
    X(cuMemsetD8Async, , 3020)                                                                     \
    X(cuStreamCreateWithPriority, , 5050)                                                          \
    X(cuStreamDestroy, _v2, 4000)                                                                  \
    X(cuStreamQuery, , 2000)                                                                       \
    X(cuStreamSynchronize, , 2000)                                                                 \
    X(cuStreamWaitEvent, , 3020)                                                                   \
    X(cuStreamGetFlags, , 5050)                                                                    \
    X(cuStreamGetPriority, , 5050)                                                                 \
    X(cuStreamGetId, , 12000)                                                                      \
    X(cuStreamGetCtx, , 9020)                                                                      \
    X(cuLaunchHostFunc, , 10000)                                                                   \
    X(cuEventCreate, , 2000)                                                                       \
    X(cuEventDestroy, _v2, 4000)                                                                   \
    X(cuEventRecordWithFlags, , 11010)                                                             \
    X(cuEventQuery, , 2000)                                                                        \
    X(cuEventSynchronize, , 2000)                                                                  \
    X(cuEventElapsedTime, , 2000)                                                                  \
    X(cuStreamBeginCapture, _v2, 10010)                                                            \
    X(cuStreamEndCapture, , 10000)                                                                 \
    X(cuStreamIsCapturing, , 10000)                                                                \
    X(cuStreamGetCaptureInfo, _v2, 11030)                                                          \
    X(cuThreadExchangeStreamCaptureMode, , 10010)                                                  \
    X(cuGraphCreate, , 10000)                                                                      \
    X(cuGraphDestroy, , 10000)                                                                     \
    X(cuGraphAddHostNode, , 10000)                                                                 \
    X(cuGraphAddEmptyNode, , 10000)                                                                \
    X(cuGraphGetNodes, , 10000)                                                                    \
    X(cuGraphInstantiateWithFlags, , 11040)                                                        \
    X(cuGraphUpload, , 11010)                                                                      \
    X(cuGraphLaunch, , 10000)                                                                      \
    X(cuGraphExecDestroy, , 10000)                                                                 \
    X(cuUserObjectCreate, , 11030)                                                                 \
    X(cuUserObjectRetain, , 11030)                                                                 \
    X(cuUserObjectRelease, , 11030)                                                                \
    X(cuGraphRetainUserObject, , 11030)                                                            \
    X(cuGraphReleaseUserObject, , 11030)

struct driver {
#define X(name, suffix, version) __typeof__(name##suffix) *name;
    DRIVER_FUNCTIONS(X)
#undef X
    __typeof__(cuGetProcAddress_v2) *resolve;
};

/* Filled by driver_load. */
extern struct driver driver;

/* Finds the driver and calls cuInit, once. */
cudaError_t driver_load(void);
/* The same, and makes the primary context of the thread's device current. */
cudaError_t driver_ready(void);
/* Notes an error for cudaGetLastError and returns it. */
cudaError_t noted(cudaError_t error);
/* The thread's device. */
extern _Thread_local int current_device;

/* One driver call as a runtime call. */
#define FORWARD(call)                                                                              \
    do {                                                                                           \
        cudaError_t error = driver_ready();                                                        \
        if (error == cudaSuccess)                                                                  \
            error = (cudaError_t)driver.call;                                                      \
        return noted(error);                                                                       \
    } while (0)
/* The same where the device's context isn't needed. */
#define FORWARD_BARE(call)                                                                         \
    do {                                                                                           \
        cudaError_t error = driver_load();                                                         \
        if (error == cudaSuccess)                                                                  \
            error = (cudaError_t)driver.call;                                                      \
        return noted(error);                                                                       \
    } while (0)

#endif
