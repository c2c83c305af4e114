/* SPDX-License-Identifier: Apache-2.0 */
/* Our own declarations of what NVML's users call; numbers and layouts are those of nvidia-ml-py. */
#ifndef SIMNVML_ABI_H
#define SIMNVML_ABI_H

#include <stdint.h>

typedef int nvmlReturn_t;
typedef struct gpu *nvmlDevice_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
};

#define NVML_VALUE_NOT_AVAILABLE (~0ull)

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index);

#endif
