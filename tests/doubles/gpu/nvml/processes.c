/* SPDX-License-Identifier: Apache-2.0 */
/* Which processes hold memory of a GPU, and what of it is free: counted anew with every call. */
#include "nvml_abi.h"

#include "holders.h"

#include <string.h>

#define ROOM 1024

struct counted {
    nvmlDevice_t device;
    unsigned int count;
    unsigned long long held;
    nvmlProcessInfo_t processes[ROOM];
};

static void count(int pid, const struct inventory *theirs, void *argument) {
    struct counted *counted = argument;
    for (uint32_t i = 0; i < theirs->count; i++) {
        if (memcmp(theirs->gpus[i].uuid, counted->device->uuid, sizeof theirs->gpus[i].uuid) != 0 ||
            theirs->gpus[i].used == 0)
            continue;
        counted->held += theirs->gpus[i].used;
        if (counted->count < ROOM)
            counted->processes[counted->count++] = (nvmlProcessInfo_t){
                .pid = (unsigned int)pid,
                .usedGpuMemory = theirs->gpus[i].used,
                .gpuInstanceId = ~0u,
                .computeInstanceId = ~0u,
            };
    }
}

/* NULL: as NVML itself would answer. The answer is this thread's, until its next question. */
static const struct counted *look(nvmlDevice_t device, nvmlReturn_t *result) {
    static _Thread_local struct counted counted;
    unsigned int index;
    *result = nvmlDeviceGetIndex(device, &index);
    if (*result != NVML_SUCCESS)
        return NULL;
    counted.device = device;
    counted.count = 0;
    counted.held = 0;
    holders(count, &counted);
    return &counted;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t result;
    const struct counted *counted = look(device, &result);
    if (counted == NULL || memory == NULL)
        return counted ? NVML_ERROR_INVALID_ARGUMENT : result;
    memory->total = device->total;
    memory->reserved = 0;
    memory->used = counted->held < device->total ? counted->held : device->total;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlMemory_v2_t all;
    nvmlReturn_t result = nvmlDeviceGetMemoryInfo_v2(device, &all);
    if (result == NVML_SUCCESS && memory != NULL)
        *memory = (nvmlMemory_t){all.total, all.free, all.used};
    return memory == NULL ? NVML_ERROR_INVALID_ARGUMENT : result;
}

/* With too little room: how much is needed. */
static nvmlReturn_t list(nvmlDevice_t device, bool mps, unsigned int *count,
                         nvmlProcessInfo_t *processes) {
    nvmlReturn_t result;
    const struct counted *counted = look(device, &result);
    if (counted == NULL || count == NULL)
        return counted ? NVML_ERROR_INVALID_ARGUMENT : result;
    /* The GPU's processes are either all clients of MPS or none is. */
    unsigned int there = mps == ((device->traits & GPU_MPS) != 0) ? counted->count : 0;
    bool enough = there <= *count && (processes != NULL || there == 0);
    *count = there;
    if (!enough)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (there > 0)
        memcpy(processes, counted->processes, there * sizeof *processes);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *processes) {
    return list(device, false, count, processes);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                        nvmlProcessInfo_t *processes) {
    return list(device, true, count, processes);
}
