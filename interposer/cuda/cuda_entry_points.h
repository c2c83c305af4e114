/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver's functions that the interposer hooks, and the names under which CUDA's resolvers
 * (cuGetProcAddress, cudaGetDriverEntryPoint and their variants) give them out. This is the only
 * copy of the list.
 *
 * X(symbol, since, per_thread, exported): if a program asks a resolver for `symbol` as of CUDA
 * `since` or later, the resolver gives the function that libcuda exports as `exported`. A row with
 * per_thread 1 is the variant for a default stream per thread; a function without such a row has
 * only its plain variant. Versions of a function before its first row have another ABI; we do not
 * hook them. A later row of a symbol is a later version.
 */
#ifndef LIVESHIFT_INTERPOSER_CUDA_ENTRY_POINTS_H
#define LIVESHIFT_INTERPOSER_CUDA_ENTRY_POINTS_H

#define LIVESHIFT_CUDA_ENTRY_POINTS(X)                                                             \
    X(cuMemAlloc, 3020, 0, cuMemAlloc_v2)                                                          \
    X(cuMemAllocPitch, 3020, 0, cuMemAllocPitch_v2)                                                \
    X(cuMemAllocManaged, 6000, 0, cuMemAllocManaged)                                               \
    X(cuMemFree, 3020, 0, cuMemFree_v2)                                                            \
    X(cuMemAllocAsync, 11020, 0, cuMemAllocAsync)                                                  \
    X(cuMemAllocAsync, 11020, 1, cuMemAllocAsync_ptsz)                                             \
    X(cuMemAllocFromPoolAsync, 11020, 0, cuMemAllocFromPoolAsync)                                  \
    X(cuMemAllocFromPoolAsync, 11020, 1, cuMemAllocFromPoolAsync_ptsz)                             \
    X(cuMemFreeAsync, 11020, 0, cuMemFreeAsync)                                                    \
    X(cuMemFreeAsync, 11020, 1, cuMemFreeAsync_ptsz)                                               \
    X(cuMemPoolExportToShareableHandle, 11020, 0, cuMemPoolExportToShareableHandle)                \
    X(cuMemPoolImportFromShareableHandle, 11020, 0, cuMemPoolImportFromShareableHandle)            \
    X(cuMemPoolDestroy, 11020, 0, cuMemPoolDestroy)                                                \
    X(cuMemAllocHost, 3020, 0, cuMemAllocHost_v2)                                                  \
    X(cuMemHostAlloc, 2020, 0, cuMemHostAlloc)                                                     \
    X(cuMemFreeHost, 2000, 0, cuMemFreeHost)                                                       \
    X(cuMemHostRegister, 6050, 0, cuMemHostRegister_v2)                                            \
    X(cuMemHostUnregister, 4000, 0, cuMemHostUnregister)                                           \
    X(cuIpcGetMemHandle, 4010, 0, cuIpcGetMemHandle)                                               \
    X(cuIpcOpenMemHandle, 11000, 0, cuIpcOpenMemHandle_v2)                                         \
    X(cuIpcCloseMemHandle, 4010, 0, cuIpcCloseMemHandle)                                           \
    X(cuIpcGetEventHandle, 4010, 0, cuIpcGetEventHandle)                                           \
    X(cuIpcOpenEventHandle, 4010, 0, cuIpcOpenEventHandle)                                         \
    X(cuMemAddressReserve, 10020, 0, cuMemAddressReserve)                                          \
    X(cuMemAddressFree, 10020, 0, cuMemAddressFree)                                                \
    X(cuMemCreate, 10020, 0, cuMemCreate)                                                          \
    X(cuMemRelease, 10020, 0, cuMemRelease)                                                        \
    X(cuMemMap, 10020, 0, cuMemMap)                                                                \
    X(cuMemUnmap, 10020, 0, cuMemUnmap)                                                            \
    X(cuMemRetainAllocationHandle, 11000, 0, cuMemRetainAllocationHandle)                          \
    X(cuMemExportToShareableHandle, 10020, 0, cuMemExportToShareableHandle)                        \
    X(cuMemImportFromShareableHandle, 10020, 0, cuMemImportFromShareableHandle)                    \
    X(cuMulticastCreate, 12010, 0, cuMulticastCreate)                                              \
    X(cuDevicePrimaryCtxReset, 11000, 0, cuDevicePrimaryCtxReset_v2)                               \
    X(cuDevicePrimaryCtxRelease, 11000, 0, cuDevicePrimaryCtxRelease_v2)                           \
    X(cuCtxEnablePeerAccess, 4000, 0, cuCtxEnablePeerAccess)                                       \
    X(cuCtxDisablePeerAccess, 4000, 0, cuCtxDisablePeerAccess)                                     \
    X(cuStreamCreate, 2000, 0, cuStreamCreate)                                                     \
    X(cuStreamCreateWithPriority, 5050, 0, cuStreamCreateWithPriority)                             \
    X(cuStreamDestroy, 4000, 0, cuStreamDestroy_v2)                                                \
    X(cuEventCreate, 2000, 0, cuEventCreate)                                                       \
    X(cuEventDestroy, 4000, 0, cuEventDestroy_v2)                                                  \
    X(cuStreamBeginCapture, 10010, 0, cuStreamBeginCapture_v2)                                     \
    X(cuStreamBeginCapture, 10010, 1, cuStreamBeginCapture_v2_ptsz)                                \
    X(cuStreamBeginCaptureToGraph, 12030, 0, cuStreamBeginCaptureToGraph)                          \
    X(cuStreamBeginCaptureToGraph, 12030, 1, cuStreamBeginCaptureToGraph_ptsz)                     \
    X(cuStreamEndCapture, 10000, 0, cuStreamEndCapture)                                            \
    X(cuStreamEndCapture, 10000, 1, cuStreamEndCapture_ptsz)                                       \
    X(cuGraphCreate, 10000, 0, cuGraphCreate)                                                      \
    X(cuGraphClone, 10000, 0, cuGraphClone)                                                        \
    X(cuGraphDestroy, 10000, 0, cuGraphDestroy)                                                    \
    X(cuGraphInstantiate, 11000, 0, cuGraphInstantiate_v2)                                         \
    X(cuGraphInstantiate, 12000, 0, cuGraphInstantiateWithFlags)                                   \
    X(cuGraphInstantiateWithFlags, 11040, 0, cuGraphInstantiateWithFlags)                          \
    X(cuGraphInstantiateWithParams, 12000, 0, cuGraphInstantiateWithParams)                        \
    X(cuGraphInstantiateWithParams, 12000, 1, cuGraphInstantiateWithParams_ptsz)                   \
    X(cuGraphExecDestroy, 10000, 0, cuGraphExecDestroy)                                            \
    X(cuGetProcAddress, 11030, 0, cuGetProcAddress)                                                \
    X(cuGetProcAddress, 12000, 0, cuGetProcAddress_v2)                                             \
    X(cuGetProcAddress, 12000, 1, cuGetProcAddress_v2_ptsz)

#include <stdbool.h>
/* Replaces the function that a resolver found for a symbol by our hook of the same ABI, if any. */
void driver_substitute(const char *symbol, unsigned version, bool per_thread, void **function);

#endif
