/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation, what a pointer is, copies. */
#include "contract.h"

#define MiB ((size_t)1 << 20)

static void allocations(void) {
    size_t before, after, total, pitch;
    void *a, *b, *c;
    WORKS(cudaFree(NULL));
    WORKS(cudaMemGetInfo(&before, &total));
    MUST(before <= total);
    WORKS(cudaMalloc(&a, 64 * MiB));
    WORKS(cudaMemGetInfo(&after, &total));
    MUST(after <= before - 64 * MiB);
    WORKS(cudaMallocPitch(&b, &pitch, 1000, 4));
    MUST(pitch >= 1000 && pitch % 32 == 0);
    WORKS(cudaFree(a));
    WORKS(cudaFree(b));
    WORKS(cudaMalloc(&c, 0));
    MUST(c == NULL);
    GIVES(cudaErrorInvalidValue, cudaFree((void *)0x1234560));
    GIVES(cudaErrorInvalidValue, cudaPeekAtLastError());
    GIVES(cudaErrorInvalidValue, cudaGetLastError());
    GIVES(cudaSuccess, cudaGetLastError());
    ok("allocations are counted and freed once");
    GIVES(cudaErrorMemoryAllocation, cudaMalloc(&a, total + MiB));
    GIVES(cudaErrorMemoryAllocation, cudaGetLastError());
    ok("more than there is: cudaErrorMemoryAllocation");
}

static void pointers(void) {
    struct cudaPointerAttributes is;
    void *device, *pinned, *plain = aligned_alloc(4096, 8192);
    unsigned int flags;
    CUdeviceptr base;
    size_t size;
    WORKS(cudaMalloc(&device, 1000));
    WORKS(cuMemGetAddressRange_v2(&base, &size, (CUdeviceptr)device + 500));
    MUST(base == (CUdeviceptr)device && size >= 1000);
    WORKS(cudaHostAlloc(&pinned, 4096, cudaHostAllocPortable));
    WORKS(cudaHostGetFlags(&flags, pinned));
    MUST(flags & cudaHostAllocPortable);
    WORKS(cudaPointerGetAttributes(&is, (char *)device + 10));
    MUST(is.type == cudaMemoryTypeDevice && is.device == 0);
    WORKS(cudaPointerGetAttributes(&is, pinned));
    MUST(is.type == cudaMemoryTypeHost && is.hostPointer == pinned);
    WORKS(cudaPointerGetAttributes(&is, plain));
    MUST(is.type == cudaMemoryTypeUnregistered);
    WORKS(cudaHostRegister(plain, 8192, cudaHostRegisterDefault));
    GIVES(cudaErrorHostMemoryAlreadyRegistered,
          cudaHostRegister(plain, 8192, cudaHostRegisterDefault));
    WORKS(cudaPointerGetAttributes(&is, plain));
    MUST(is.type == cudaMemoryTypeHost);
    WORKS(cudaHostUnregister(plain));
    GIVES(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(plain));
    cudaGetLastError();
    WORKS(cudaFree(device));
    WORKS(cudaFreeHost(pinned));
    free(plain);
    ok("a pointer is device, pinned, registered or unknown");
}

static void copies(void) {
    static char from[100000], to[100000];
    char *a, *b;
    memset(from, 7, sizeof from);
    WORKS(cudaMalloc((void **)&a, sizeof from));
    WORKS(cudaMalloc((void **)&b, sizeof from));
    WORKS(cudaMemcpy(a, from, sizeof from, cudaMemcpyHostToDevice));
    WORKS(cudaMemset(a + 10, 9, 10));
    WORKS(cudaMemcpy(b, a, sizeof from, cudaMemcpyDeviceToDevice));
    WORKS(cuMemsetD32_v2((CUdeviceptr)b + 400, 0x01020304, 2));
    WORKS(cudaMemcpy(to, b, sizeof to, cudaMemcpyDefault));
    MUST(to[9] == 7 && to[10] == 9 && to[19] == 9 && to[20] == 7);
    MUST(to[400] == 4 && to[403] == 1 && to[407] == 1 && to[408] == 7);
    ok("copies and sets arrive in order");

    /* A copy from pageable memory is staged when it is submitted. */
    cudaStream_t stream;
    struct hold hold = {0};
    WORKS(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    WORKS(cudaLaunchHostFunc(stream, held, &hold));
    WORKS(cudaMemcpyAsync(a, from, 1000, cudaMemcpyHostToDevice, stream));
    memset(from, 1, 1000);
    hold.go = 1;
    WORKS(cudaMemcpyAsync(to, a, 1000, cudaMemcpyDeviceToHost, stream));
    MUST(to[0] == 7 && to[999] == 7);
    WORKS(cudaStreamDestroy(stream));
    ok("asynchronous copies of pageable memory behave as staged");
    WORKS(cudaFree(a));
    WORKS(cudaFree(b));
}

static void pools(void) {
    cudaMemPool_t pool;
    cudaStream_t stream;
    unsigned long long used, threshold = 1 << 20;
    struct hold hold = {0};
    char *a, *pinned;
    WORKS(cudaDeviceGetDefaultMemPool(&pool, 0));
    WORKS(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    WORKS(cudaStreamCreate(&stream));
    WORKS(cudaMallocHost((void **)&pinned, 4096));
    WORKS(cudaMallocAsync((void **)&a, 3 * MiB, stream));
    WORKS(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    MUST(used >= 3 * MiB);
    WORKS(cudaMemsetAsync(a, 5, 4096, stream));
    WORKS(cudaMemcpyAsync(pinned, a, 4096, cudaMemcpyDeviceToHost, stream));
    WORKS(cudaLaunchHostFunc(stream, held, &hold));
    WORKS(cudaFreeAsync(a, stream));
    GIVES(cudaErrorNotReady, cudaStreamQuery(stream));
    note("after a query that was not ready the last error is", cudaGetLastError());
    hold.go = 1;
    WORKS(cudaStreamSynchronize(stream));
    MUST(pinned[4095] == 5);
    WORKS(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    MUST(used == 0);
    WORKS(cudaMemPoolTrimTo(pool, 0));
    WORKS(cudaFreeHost(pinned));
    WORKS(cudaStreamDestroy(stream));
    ok("stream-ordered allocation");
}

int main(void) {
    PLAY({"allocations", allocations}, {"pointers", pointers}, {"copies", copies},
         {"pools", pools});
}
