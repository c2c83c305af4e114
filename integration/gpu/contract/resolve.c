/* SPDX-License-Identifier: Apache-2.0 */
/* The four ways to a driver function, and errors. */
#include "contract.h"

typedef CUresult allocate(CUdeviceptr *, size_t);

int main(void) {
    int driver, runtime;
    void *function = NULL;
    CUdriverProcAddressQueryResult status;
    enum cudaDriverEntryPointQueryResult query;
    CUdeviceptr pointer;
    const char *text;
    say_where();

    WORKS(cuDriverGetVersion(&driver));
    WORKS(cudaRuntimeGetVersion(&runtime));
    MUST(driver >= 12000 && runtime >= 12000);
    WORKS(cudaFree(NULL));
    WORKS(cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &status));
    MUST(status == CU_GET_PROC_ADDRESS_SUCCESS && function != NULL);
    WORKS(((allocate *)function)(&pointer, 4096));
    WORKS(cuMemFree_v2(pointer));
    WORKS(cuGetProcAddress_v2("cuGetProcAddress", &function, 12000, 0, NULL));
    MUST(function != NULL);
    ok("cuGetProcAddress gives what works");

    note("a function that is not there is told with",
         cuGetProcAddress_v2("cuNoSuchThing", &function, 12000, 0, &status));
    MUST(status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND && function == NULL);
    note("without a place for the reason, with",
         cuGetProcAddress_v2("cuNoSuchThing", &function, 12000, 0, NULL));
    MUST(function == NULL);
    note("one that is newer than asked for, with",
         cuGetProcAddress_v2("cuMemCreate", &function, 9000, 0, &status));
    MUST(status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    ok("what is not there has a reason");

    function = NULL;
    WORKS(cudaGetDriverEntryPointByVersion("cuMemAddressReserve", &function, 12000, 0, &query));
    MUST(query == cudaDriverEntryPointSuccess && function != NULL);
    WORKS(cudaGetDriverEntryPoint("cuMemUnmap", &function, 0, &query));
    MUST(query == cudaDriverEntryPointSuccess && function != NULL);
    WORKS(cudaGetDriverEntryPointByVersion("cuNoSuchThing", &function, 12000, 0, &query));
    MUST(query == cudaDriverEntryPointSymbolNotFound && function == NULL);
    ok("cudaGetDriverEntryPoint goes the same way");

    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    MUST(library != NULL && dlsym(library, "cuMemAlloc_v2") != NULL);
    ok("dlsym finds the exports");

    MUST(strcmp(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady") == 0);
    WORKS(cuGetErrorName(CUDA_ERROR_NOT_READY, &text));
    MUST(strcmp(text, "CUDA_ERROR_NOT_READY") == 0);
    WORKS(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
    MUST(strcmp(text, "out of memory") == 0 &&
         strcmp(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory") == 0);
    ok("errors have names");
    return 0;
}
