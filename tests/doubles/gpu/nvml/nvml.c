/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated libnvidia-ml.so.1: the host's GPUs as $SIMCUDA_DEVICES describes them, and what the
 * processes hold of them that use the simulated CUDA. While the file $SIMCUDA_NVML_HANGS exists no
 * call returns, as where a GPU has fallen off the bus.
 */
#include "nvml_abi.h"

#include "device.h"
#include "simcuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static struct inventory host;
static int users;

static void hang(void) {
    const char *while_there = getenv("SIMCUDA_NVML_HANGS");
    while (while_there != NULL && access(while_there, F_OK) == 0)
        usleep(10000);
}

#define CALL(...)                                                                                  \
    const void *const given[] = {__VA_ARGS__};                                                     \
    hang();                                                                                        \
    if (users == 0)                                                                                \
        return NVML_ERROR_UNINITIALIZED;                                                           \
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)                                      \
        if (given[i] == NULL)                                                                      \
    return NVML_ERROR_INVALID_ARGUMENT

static nvmlReturn_t text(char *into, unsigned int length, const char *value) {
    if (strlen(value) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(into, value);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    hang();
    if (users == 0 && !inventory_read(&host))
        return NVML_ERROR_DRIVER_NOT_LOADED;
    users++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    CALL(&host);
    users--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result) {
    static _Thread_local char said[40];
    snprintf(said, sizeof said, "simulated NVML error %d", result);
    return said;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    CALL(version);
    return text(version, length, host.version);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    CALL(version);
    return text(version, length, host.version);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    CALL(version);
    *version = cuda_version(host.driver);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    CALL(count);
    *count = host.count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    CALL(device);
    if (index >= host.count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &host.gpus[index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    CALL(device, index);
    *index = (unsigned int)(device - host.gpus);
    return NVML_SUCCESS;
}

static void format_uuid(const struct gpu *gpu, char text[41]) {
    char *at = text + sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", gpu->uuid[i]);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    CALL(device, uuid);
    char full[41];
    format_uuid(device, full);
    return text(uuid, length, full);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    CALL(uuid, device);
    for (uint32_t i = 0; i < host.count; i++) {
        char full[41];
        format_uuid(&host.gpus[i], full);
        if (strcasecmp(full, uuid) == 0) {
            *device = &host.gpus[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device) {
    CALL(id, device);
    unsigned int domain, bus;
    if (sscanf(id, "%x:%x:", &domain, &bus) != 2)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < host.count; i++)
        if (host.gpus[i].domain == domain && host.gpus[i].bus == bus) {
            *device = &host.gpus[i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    CALL(device, name);
    char full[sizeof SIMCUDA_NAME + sizeof device->chip];
    snprintf(full, sizeof full, "%s %s", SIMCUDA_NAME, device->chip);
    return text(name, length, full);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    CALL(device, pci);
    *pci = (nvmlPciInfo_t){.domain = device->domain, .bus = device->bus};
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:00.0", device->domain & 0xffff,
             device->bus & 0xff);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:00.0", device->domain, device->bus & 0xff);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    CALL(device, major, minor);
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                  unsigned int *pending) {
    CALL(device, current, pending);
    *current = *pending = (device->traits & GPU_MIG) != 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned int *mode) {
    CALL(device, mode);
    *mode = (device->traits & GPU_NO_PERSISTENCE) == 0;
    return NVML_SUCCESS;
}
