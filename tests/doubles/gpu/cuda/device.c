/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include "control.h"
#include "gate.h"
#include "simcuda.h"

#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Index in the inventory of each device that programs see. */
static int visible[MAX_DEVICES];
static int visible_count;
/* What each GPU will hold again after a restore. */
static uint64_t vacated[MAX_DEVICES];

static void format_uuid(const unsigned char uuid[16], char text[41]) {
    char *at = text + sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}

static int find_visible(const char *word, size_t length) {
    const struct inventory *all = &control()->inventory;
    if (length > 0 && isdigit((unsigned char)word[0])) {
        unsigned long index = strtoul(word, NULL, 10);
        return index < all->count ? (int)index : -1;
    }
    for (uint32_t i = 0; i < all->count; i++) {
        char text[41];
        format_uuid(all->gpus[i].uuid, text);
        if (length > 4 && length <= 40 && strncasecmp(text, word, length) == 0)
            return (int)i;
    }
    return -1;
}

/* As the real one: numbers or (beginnings of) UUIDs; the first that names nothing ends the list. */
static void apply_visible_devices(const char *list) {
    for (const char *at = list; *at != '\0' && visible_count < MAX_DEVICES;) {
        size_t length = strcspn(at, ",");
        int found = find_visible(at, length);
        if (found < 0)
            return;
        visible[visible_count++] = found;
        at += length + (at[length] == ',');
    }
}

CUresult devices_initialise(void) {
    struct inventory *all = &control()->inventory;
    if (!inventory_read(all))
        return CUDA_ERROR_NO_DEVICE;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (list != NULL)
        apply_visible_devices(list);
    else
        for (uint32_t i = 0; i < all->count; i++)
            visible[visible_count++] = (int)i;
    return visible_count > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

int device_count(void) { return visible_count; }
bool device_valid(CUdevice device) { return device >= 0 && device < visible_count; }
int device_gpu(CUdevice device) { return visible[device]; }

static struct gpu *gpu_of(CUdevice device) { return &control()->inventory.gpus[visible[device]]; }

CUresult device_charge(CUdevice device, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct gpu *gpu = gpu_of(device);
    CUresult result = bytes > gpu->total - gpu->used ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        gpu->used += bytes;
    pthread_mutex_unlock(&lock);
    return result;
}

void device_release(CUdevice device, size_t bytes) {
    pthread_mutex_lock(&lock);
    gpu_of(device)->used -= bytes;
    pthread_mutex_unlock(&lock);
}

void devices_vacate(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_DEVICES; i++) {
        vacated[i] = control()->inventory.gpus[i].used;
        control()->inventory.gpus[i].used = 0;
    }
    pthread_mutex_unlock(&lock);
}

uint64_t gpu_vacated(uint32_t gpu) { return vacated[gpu]; }

void devices_move(const struct gpu *const *others, uint32_t driver) {
    struct inventory *mine = &control()->inventory;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < mine->count; i++) {
        memcpy(mine->gpus[i].uuid, others[i]->uuid, sizeof mine->gpus[i].uuid);
        mine->gpus[i].total = others[i]->total;
        mine->gpus[i].used = vacated[i];
    }
    mine->driver = driver;
    pthread_mutex_unlock(&lock);
}

static struct gpu look_at(CUdevice device) {
    pthread_mutex_lock(&lock);
    struct gpu gpu = *gpu_of(device);
    pthread_mutex_unlock(&lock);
    return gpu;
}

/* ---- entry points ----------------------------------------------------------------------------- */

CUresult cuDriverGetVersion(int *version) {
    if (version == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct inventory host;
    /* Answers before cuInit, as the real one. */
    if (gate_initialised()) {
        pthread_mutex_lock(&lock);
        *version = cuda_version(control()->inventory.driver);
        pthread_mutex_unlock(&lock);
        return CUDA_SUCCESS;
    }
    if (!inventory_read(&host))
        return CUDA_ERROR_NO_DEVICE;
    *version = cuda_version(host.driver);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    API_LOOK();
    if (count == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *count = visible_count;
    return CUDA_SUCCESS;
}

#define CHECK_DEVICE(pointer, device)                                                              \
    API_LOOK();                                                                                    \
    if ((pointer) == NULL)                                                                         \
        return CUDA_ERROR_INVALID_VALUE;                                                           \
    if (!device_valid(device))                                                                     \
    return CUDA_ERROR_INVALID_DEVICE

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CHECK_DEVICE(device, ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    CHECK_DEVICE(name, device);
    snprintf(name, (size_t)length, "%s %s", SIMCUDA_NAME, look_at(device).chip);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    CHECK_DEVICE(uuid, device);
    struct gpu gpu = look_at(device);
    memcpy(uuid->bytes, gpu.uuid, sizeof uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid(uuid, device); }

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    CHECK_DEVICE(bytes, device);
    *bytes = look_at(device).total;
    return CUDA_SUCCESS;
}

/* The place in the inventory where the process started. A restore on another GPU changes UUID and
   size but not this: the real driver goes on naming the source's (NVIDIA/cuda-checkpoint#48). */
static int bus_number(CUdevice device) { return (int)gpu_of(device)->bus; }

CUresult cuDeviceGetPCIBusId(char *busId, int length, CUdevice device) {
    CHECK_DEVICE(busId, device);
    if (length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(busId, (size_t)length, "%04X:%02X:00.0", gpu_of(device)->domain, gpu_of(device)->bus);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *busId) {
    API_LOOK();
    unsigned int domain, bus;
    if (device == NULL || busId == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (sscanf(busId, "%x:%x:", &domain, &bus) != 2)
        return CUDA_ERROR_INVALID_VALUE;
    for (*device = 0; *device < visible_count; ++*device)
        if (gpu_of(*device)->domain == domain && gpu_of(*device)->bus == bus)
            return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    CHECK_DEVICE(value, device);
    static const struct {
        CUdevice_attribute attribute;
        int value;
    } table[] = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    };
    *value = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? bus_number(device) : 0;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].attribute == attribute)
            *value = table[i].value;
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    CHECK_DEVICE(can, device);
    if (!device_valid(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    const struct gpu *gpus = control()->inventory.gpus; /* only of one chip with each other */
    *can =
        device != peer && strcmp(gpus[device_gpu(device)].chip, gpus[device_gpu(peer)].chip) == 0;
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    API_CALL();
    CUdevice device;
    CUresult result = cuCtxGetDevice(&device);
    if (result != CUDA_SUCCESS)
        return result;
    if (free == NULL || total == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *total = gpu_of(device)->total;
    *free = *total - gpu_of(device)->used;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
