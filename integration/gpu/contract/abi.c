/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints the values and layouts that we declare ourselves. Compiled twice, with our headers and with
 * NVIDIA's (-DREAL_HEADERS), it must print the same.
 */
#ifdef REAL_HEADERS
#include <cuda.h>
#include <cuda_runtime_api.h>
#else
#include "cudart_abi.h"
#endif

#include <stddef.h>
#include <stdio.h>

#define VALUE(name) printf(#name " %ld\n", (long)(name))
#define SIZE(type) printf("sizeof " #type " %zu\n", sizeof(type))
#define AT(type, field) printf(#type "." #field " %zu\n", offsetof(type, field))

int main(void) {
    VALUE(CUDA_ERROR_INVALID_VALUE);
    VALUE(CUDA_ERROR_OUT_OF_MEMORY);
    VALUE(CUDA_ERROR_NOT_INITIALIZED);
    VALUE(CUDA_ERROR_INVALID_CONTEXT);
    VALUE(CUDA_ERROR_OPERATING_SYSTEM);
    VALUE(CUDA_ERROR_INVALID_HANDLE);
    VALUE(CUDA_ERROR_ILLEGAL_STATE);
    VALUE(CUDA_ERROR_NOT_FOUND);
    VALUE(CUDA_ERROR_NOT_READY);
    VALUE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    VALUE(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    VALUE(CUDA_ERROR_NOT_PERMITTED);
    VALUE(CUDA_ERROR_NOT_SUPPORTED);
    VALUE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    VALUE(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    VALUE(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID);
    VALUE(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
    VALUE(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
    VALUE(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID);
    VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    VALUE(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED);
    VALUE(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
    VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    VALUE(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
    VALUE(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
    VALUE(CU_STREAM_NON_BLOCKING);
    VALUE(CU_EVENT_DISABLE_TIMING);
    VALUE(CU_STREAM_CAPTURE_MODE_RELAXED);
    VALUE(CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    VALUE(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    VALUE(CU_MEM_HANDLE_TYPE_FABRIC);
    VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    VALUE(CU_MEM_LOCATION_TYPE_DEVICE);
    VALUE(CU_MEM_ALLOCATION_TYPE_PINNED);
    VALUE(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
    VALUE(CU_MEMPOOL_ATTR_USED_MEM_HIGH);
    VALUE(CU_POINTER_ATTRIBUTE_CONTEXT);
    VALUE(CU_POINTER_ATTRIBUTE_BUFFER_ID);
    VALUE(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
    VALUE(CU_POINTER_ATTRIBUTE_MAPPED);
    VALUE(CU_MEMORYTYPE_DEVICE);
    VALUE(CU_GRAPH_NODE_TYPE_HOST);
    VALUE(CU_GRAPH_NODE_TYPE_MEM_FREE);
    VALUE(CU_PROCESS_STATE_RUNNING);
    VALUE(CU_PROCESS_STATE_LOCKED);
    VALUE(CU_PROCESS_STATE_CHECKPOINTED);
    VALUE(CU_PROCESS_STATE_FAILED);
    SIZE(CUmemAllocationProp);
    AT(CUmemAllocationProp, location);
    AT(CUmemAllocationProp, allocFlags);
    SIZE(CUmemAccessDesc);
    SIZE(CUmemPoolProps);
    AT(CUmemPoolProps, maxSize);
    SIZE(CUmulticastObjectProp);
    SIZE(CUDA_HOST_NODE_PARAMS);
    SIZE(CUgraphEdgeData);
    SIZE(CUuuid);
    SIZE(CUipcMemHandle);
    SIZE(CUcheckpointLockArgs);
    AT(CUcheckpointLockArgs, timeoutMs);
    SIZE(CUcheckpointCheckpointArgs);
    SIZE(CUcheckpointGpuPair);
    AT(CUcheckpointGpuPair, newUuid);
    SIZE(CUcheckpointRestoreArgs);
    AT(CUcheckpointRestoreArgs, gpuPairs);
    AT(CUcheckpointRestoreArgs, gpuPairsCount);
    SIZE(CUcheckpointUnlockArgs);
    VALUE(cudaErrorMemoryAllocation);
    VALUE(cudaErrorInitializationError);
    VALUE(cudaErrorInsufficientDriver);
    VALUE(cudaErrorInvalidResourceHandle);
    VALUE(cudaErrorNotReady);
    VALUE(cudaErrorHostMemoryAlreadyRegistered);
    VALUE(cudaErrorNotSupported);
    VALUE(cudaErrorStreamCaptureUnjoined);
    VALUE(cudaErrorCapturedEvent);
    VALUE(cudaMemcpyDefault);
    VALUE(cudaMemoryTypeManaged);
    VALUE(cudaStreamCaptureModeRelaxed);
    VALUE(cudaDriverEntryPointVersionNotSufficent);
    VALUE(cudaDevAttrComputeCapabilityMajor);
    VALUE(cudaDevAttrManagedMemory);
    VALUE(cudaMemPoolAttrReleaseThreshold);
    VALUE(cudaMemPoolAttrUsedMemCurrent);
    VALUE(cudaHostAllocMapped);
    VALUE(cudaStreamNonBlocking);
    VALUE(cudaEventInterprocess);
    SIZE(struct cudaPointerAttributes);
    AT(struct cudaPointerAttributes, devicePointer);
    SIZE(struct cudaHostNodeParams);
    SIZE(cudaIpcMemHandle_t);
    return 0;
}
