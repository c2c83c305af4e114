/* SPDX-License-Identifier: Apache-2.0 */
/* Records in the ledger the memory that the application gets from NCCL. NCCL makes it by the
   driver's VMM functions and maps it for peers. CUDA_CALL keeps these calls out of the ledger,
   because they are not the application's. */

#include "cuda/cuda_real.h"
#include "hooks/exported.h"
#include "ledger/ledger.h"
#include "nccl_real.h"

EXPORTED ncclResult_t ncclMemAlloc(void **pointer, size_t size) {
    ncclResult_t result = CUDA_CALL(NCCL_CALL(MemAlloc, pointer, size));
    if (result == ncclSuccess && *pointer != NULL && nccl_thread.inside == 0) {
        struct ledger_record made = {.kind = LIVESHIFT_MEMORY_NCCL,
                                     .device = driver_device(),
                                     .address = (uint64_t)(uintptr_t)*pointer,
                                     .size = size};
        ledger_add(LEDGER_NCCL, &made);
    }
    return result;
}

EXPORTED ncclResult_t ncclMemFree(void *pointer) {
    struct ledger_free leaving = {0};
    if (nccl_thread.inside == 0)
        leaving = ledger_free_begin(LEDGER_NCCL, (uint64_t)(uintptr_t)pointer);
    ncclResult_t result = CUDA_CALL(NCCL_CALL(MemFree, pointer));
    ledger_free_end(leaving, result == ncclSuccess);
    return result;
}
