/* SPDX-License-Identifier: Apache-2.0 */
/* The virtual memory management API, as PyTorch's expandable segments use it. */
#include "contract.h"

#include <sys/wait.h>

static CUmemAllocationProp properties(void) {
    CUmemAllocationProp p = {0};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return p;
}

static const CUmemAccessDesc read_write = {{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                           CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static unsigned int word_at(CUdeviceptr pointer) {
    unsigned int word;
    WORKS(cuMemcpyDtoH_v2(&word, pointer, sizeof word));
    return word;
}

static void grow_and_shrink(size_t grain) {
    CUmemAllocationProp p = properties();
    CUmemGenericAllocationHandle h[2], again;
    CUdeviceptr base;
    size_t before, after, total;
    WORKS(cuMemGetInfo_v2(&before, &total));
    WORKS(cuMemAddressReserve(&base, 8 * grain, 0, 0, 0));
    MUST(base % grain == 0);
    for (int i = 0; i < 2; i++) {
        WORKS(cuMemCreate(&h[i], grain, &p, 0));
        WORKS(cuMemMap(base + (size_t)i * grain, grain, 0, h[i], 0));
    }
    WORKS(cuMemSetAccess(base, 2 * grain, &read_write, 1));
    WORKS(cuMemsetD32_v2(base, 11, 2 * grain / 4));
    MUST(word_at(base + 2 * grain - 4) == 11);
    WORKS(cuMemGetInfo_v2(&after, &total));
    MUST(before - after >= 2 * grain);
    WORKS(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(base + grain)));
    MUST(again == h[1]);
    WORKS(cuMemRelease(again));
    ok("addresses are reserved, memory is mapped there");

    /* The address stays, the memory goes and comes. */
    WORKS(cuMemUnmap(base, grain));
    WORKS(cuMemRelease(h[0]));
    WORKS(cuMemCreate(&h[0], grain, &p, 0));
    WORKS(cuMemMap(base, grain, 0, h[0], 0));
    WORKS(cuMemSetAccess(base, grain, &read_write, 1));
    WORKS(cuMemsetD32_v2(base, 12, 1));
    MUST(word_at(base) == 12 && word_at(base + grain) == 11);
    ok("physical memory is exchanged beneath an address");

    /* Released handles live until they are unmapped. */
    WORKS(cuMemRelease(h[0]));
    WORKS(cuMemRelease(h[1]));
    MUST(word_at(base + grain) == 11);
    WORKS(cuMemUnmap(base, 2 * grain));
    WORKS(cuMemAddressFree(base, 8 * grain));
    WORKS(cuMemGetInfo_v2(&after, &total));
    MUST(after == before);
    ok("all of it is given back");
}

static void shared(size_t grain) {
    CUmemAllocationProp p = properties();
    CUmemGenericAllocationHandle made, imported;
    CUdeviceptr a, b;
    int descriptor;
    p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    WORKS(cuMemCreate(&made, grain, &p, 0));
    WORKS(cuMemExportToShareableHandle(&descriptor, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                       0));
    WORKS(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)descriptor,
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(descriptor);
    WORKS(cuMemAddressReserve(&a, grain, 0, 0, 0));
    WORKS(cuMemAddressReserve(&b, grain, 0, 0, 0));
    WORKS(cuMemMap(a, grain, 0, made, 0));
    WORKS(cuMemMap(b, grain, 0, imported, 0));
    WORKS(cuMemSetAccess(a, grain, &read_write, 1));
    WORKS(cuMemSetAccess(b, grain, &read_write, 1));
    WORKS(cuMemsetD32_v2(a, 77, 1));
    WORKS(cuCtxSynchronize());
    MUST(word_at(b) == 77);
    WORKS(cuMemUnmap(a, grain));
    WORKS(cuMemUnmap(b, grain));
    WORKS(cuMemRelease(made));
    WORKS(cuMemRelease(imported));
    WORKS(cuMemAddressFree(a, grain));
    WORKS(cuMemAddressFree(b, grain));
    ok("memory is exported and imported by descriptor");
}

static void refusals(size_t grain) {
    CUmemAllocationProp p = properties();
    CUmemGenericAllocationHandle handle;
    CUdeviceptr base;
    GIVES(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, grain + 1, &p, 0));
    GIVES(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&base, grain + 1, 0, 0, 0));
    p.location.id = 99;
    GIVES(CUDA_ERROR_INVALID_DEVICE, cuMemCreate(&handle, grain, &p, 0));
    ok("sizes that are no multiple of the granularity are refused");
}

int main(void) {
    CUmemAllocationProp p = properties();
    size_t grain;
    say_where();
    WORKS(cudaFree(NULL));
    WORKS(cuMemGetAllocationGranularity(&grain, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    MUST(grain >= 65536 && (grain & (grain - 1)) == 0);
    grow_and_shrink(grain);
    shared(grain);
    refusals(grain);
    return 0;
}
