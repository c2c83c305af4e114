/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program to be dumped: it keeps counting in device memory of each kind, by copies and host
 * functions on two streams that wait for each other by events, and says each round and on which GPU.
 */
#include "cudart_abi.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define WORKS(call)                                                                                \
    do {                                                                                           \
        int code = (int)(call);                                                                    \
        if (code != 0) {                                                                           \
            printf("wrong: %s gives %d\n", #call, code);                                           \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void increase(void *number) { ++*(long *)number; }

static long *physical(void) {
    CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                             .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                             .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    size_t size = (size_t)2 << 20;
    WORKS(cuMemAddressReserve(&at, 4 * size, 0, 0, 0));
    for (size_t i = 0; i < 2; i++) {
        WORKS(cuMemCreate(&handle, size, &p, 0));
        WORKS(cuMemMap(at + i * size, size, 0, handle, 0));
        WORKS(cuMemSetAccess(at + i * size, size, &access, 1));
        p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    }
    /* Across the border of the two. */
    return (long *)(uintptr_t)(at + size - sizeof(long) / 2);
}

int main(void) {
    enum { KINDS = 3 };
    long *device[KINDS], *pinned, zero = 0;
    cudaStream_t a, b;
    cudaEvent_t done;
    WORKS(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    WORKS(cudaStreamCreate(&b));
    WORKS(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    WORKS(cudaMalloc((void **)&device[0], sizeof(long)));
    WORKS(cudaMallocAsync((void **)&device[1], sizeof(long), a));
    device[2] = physical();
    WORKS(cudaMallocHost((void **)&pinned, KINDS * sizeof(long)));
    for (int i = 0; i < KINDS; i++)
        WORKS(cudaMemcpy(device[i], &zero, sizeof zero, cudaMemcpyHostToDevice));
    for (long round = 1;; round++) {
        for (int i = 0; i < KINDS; i++) {
            WORKS(cudaMemcpyAsync(&pinned[i], device[i], sizeof(long), cudaMemcpyDeviceToHost, a));
            WORKS(cudaLaunchHostFunc(a, increase, &pinned[i]));
            WORKS(cudaEventRecord(done, a));
            WORKS(cudaStreamWaitEvent(b, done, 0));
            WORKS(cudaMemcpyAsync(device[i], &pinned[i], sizeof(long), cudaMemcpyHostToDevice, b));
        }
        WORKS(cudaDeviceSynchronize());
        for (int i = 0; i < KINDS; i++)
            if (pinned[i] != round)
                printf("wrong: %d counted to %ld in round %ld\n", i, pinned[i], round);
        CUuuid uuid;
        WORKS(cuDeviceGetUuid_v2(&uuid, 0));
        printf("round %ld on ", round);
        for (int i = 0; i < 16; i++)
            printf("%02x", (unsigned char)uuid.bytes[i]);
        printf("\n");
        fflush(stdout);
        usleep(5000);
    }
}
