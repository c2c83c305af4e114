/* SPDX-License-Identifier: Apache-2.0 */
#include "entry_points.h"

#include "cuda_abi.h"

#include <stdbool.h>
#include <string.h>

static const struct entry {
    const char *name;
    int version;
    void *function;
} entries[] = {
#define X(name, suffix, version) {#name, version, (void *)name##suffix},
    ENTRY_POINTS(X)
#undef X
};

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int cudaVersion, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *symbolStatus) {
    const struct entry *best = NULL;
    bool named = false;
    int driver;
    if (symbol == NULL || function == NULL || flags > 2)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = cuDriverGetVersion(&driver);
    if (result != CUDA_SUCCESS)
        return result;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        /* What a later driver brings, this one doesn't know at all. */
        if (strcmp(entries[i].name, symbol) != 0 || entries[i].version > driver)
            continue;
        named = true;
        if (entries[i].version <= cudaVersion && (!best || entries[i].version > best->version))
            best = &entries[i];
    }
    *function = best ? best->function : NULL;
    if (symbolStatus != NULL)
        *symbolStatus = best    ? CU_GET_PROC_ADDRESS_SUCCESS
                        : named ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return best ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int cudaVersion, cuuint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, cudaVersion, flags, NULL);
}
