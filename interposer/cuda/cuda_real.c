/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda_real.h"

#include "device_calls.h"
#include "hooks/elf_lookup.h"

#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

__thread unsigned cuda_depth __attribute__((tls_model("initial-exec")));

static void *look_up(_Atomic(void *) *known, const char *library, const char *name) {
    void *found = atomic_load_explicit(known, memory_order_relaxed);
    if (__builtin_expect(found == NULL, 0)) {
        found = elf_lookup(library, name, NULL);
        atomic_store_explicit(known, found, memory_order_relaxed);
    }
    return found;
}

void *runtime_function(_Atomic(void *) *known, const char *name) {
    return look_up(known, "libcudart.so", name);
}

void *driver_function(_Atomic(void *) *known, const char *name) {
    return look_up(known, "libcuda.so.1", name);
}

int cuda_missing(const char *name) {
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&warned))
        dprintf(STDERR_FILENO,
                "liveshift: %s was called, but no CUDA library that has it is loaded in this "
                "process\n",
                name);
    return CUDA_NOT_SUPPORTED;
}

int32_t runtime_device(void) {
    static _Atomic(void *) known;
    int (*get)(int *) = runtime_function(&known, "cudaGetDevice");
    int device;
    return get != NULL && CUDA_CALL(get(&device)) == 0 ? device : -1;
}

int32_t driver_device(void) {
    int device;
    return DEVICE_CALL(cuCtxGetDevice, &device) == CUDA_OK ? device : -1;
}

uint32_t driver_version(void) {
    int version = 0;
    return DEVICE_CALL(cuDriverGetVersion, &version) == CUDA_OK ? (uint32_t)version : 0;
}

uint32_t runtime_version(void) {
    static _Atomic(void *) known;
    int (*get)(int *) = runtime_function(&known, "cudaRuntimeGetVersion");
    int version;
    return get != NULL && CUDA_CALL(get(&version)) == 0 && version > 0 ? (uint32_t)version : 0;
}

uint64_t capture_number(uint64_t stream) {
    /* In all versions the results go through pointers that may be NULL. The first three parameters
       are the same in all. A version with fewer parameters ignores the rest. */
    typedef int get_info(uint64_t, int *, unsigned long long *, void *, void *, void *, void *);
    static const char *const names[] = {"cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo_v2",
                                        "cuStreamGetCaptureInfo"};
    static _Atomic(void *) known[3], runtime;
    unsigned long long number = 0;
    int status = 0;
    get_info *get = NULL;
    for (unsigned i = 0; i < 3 && get == NULL; i++)
        get = (get_info *)driver_function(&known[i], names[i]);
    if (get == NULL)
        get = (get_info *)runtime_function(&runtime, "cudaStreamGetCaptureInfo");
    if (get == NULL || CUDA_CALL(get(stream, &status, &number, NULL, NULL, NULL, NULL)) != 0)
        return 0;
    return status != 0 ? number : 0;
}

bool allocation_containing(uint64_t address, uint64_t *base, uint64_t *size) {
    unsigned long long from;
    size_t length;
    if (DEVICE_CALL(cuMemGetAddressRange_v2, &from, &length, address) != CUDA_OK)
        return false;
    *base = from;
    *size = length;
    return true;
}
