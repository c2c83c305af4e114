/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver functions that the simulated NCCL needs, found as the real one finds them: by dlopen of
 * libcuda.so.1, with no NEEDED entry. Streams are reached by simcuda_enqueue_owned, which only the
 * simulated driver has.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static struct {
    void *library;
    int (*enqueue)(void *, void (*)(void *), void *, void (*)(void *));
    int (*get_device)(int *);
    int (*get_bus_id)(char *, int, int);
    int (*is_capturing)(void *, int *);
    int (*allocate)(uint64_t *, size_t);
    int (*release)(uint64_t);
    int (*record)(void *, void *);
    int (*retain)(void **, int);
    int (*get_context)(void **);
    int (*set_context)(void *);
} cuda;

static void *find(const char *name) { return cuda.library ? dlsym(cuda.library, name) : NULL; }

static void load(void) {
    cuda.library = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&cuda.enqueue = find("simcuda_enqueue_owned");
    *(void **)&cuda.get_device = find("cuCtxGetDevice");
    *(void **)&cuda.get_bus_id = find("cuDeviceGetPCIBusId");
    *(void **)&cuda.is_capturing = find("cuStreamIsCapturing");
    *(void **)&cuda.allocate = find("cuMemAlloc_v2");
    *(void **)&cuda.release = find("cuMemFree_v2");
    *(void **)&cuda.record = find("cuEventRecord");
    *(void **)&cuda.retain = find("cuDevicePrimaryCtxRetain");
    *(void **)&cuda.get_context = find("cuCtxGetCurrent");
    *(void **)&cuda.set_context = find("cuCtxSetCurrent");
    if (cuda.enqueue == NULL)
        warn("libcuda.so.1 is not liveshift's simulated one (no simcuda_enqueue_owned)");
}

bool cuda_found(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    return cuda.enqueue != NULL && cuda.get_device != NULL && cuda.get_bus_id != NULL &&
           cuda.is_capturing != NULL && cuda.allocate != NULL && cuda.release != NULL &&
           cuda.retain != NULL && cuda.get_context != NULL && cuda.set_context != NULL;
}

int cuda_current_device(void) {
    int device = 0;
    return cuda_found() && cuda.get_device(&device) == 0 ? device : 0;
}

int64_t cuda_bus_id(int device) {
    char text[32] = "";
    char digits[32];
    size_t length = 0;
    if (!cuda_found() || cuda.get_bus_id(text, sizeof text, device) != 0)
        return -1;
    for (const char *character = text; *character != '\0'; character++)
        if (*character != ':' && *character != '.')
            digits[length++] = *character;
    digits[length] = '\0';
    return strtoll(digits, NULL, 16);
}

/* The device's primary context made current; what was, in *before. Never released, as in the real. */
static int enter(int device, void **before) {
    void *context = NULL;
    if (!cuda_found())
        return -1;
    int error = cuda.get_context(before);
    if (error == 0)
        error = cuda.retain(&context, device);
    return error != 0 ? error : cuda.set_context(context);
}

int cuda_allocate(int device, void **pointer, size_t size) {
    uint64_t address = 0;
    void *before = NULL;
    int error = enter(device, &before);
    if (error == 0) {
        error = cuda.allocate(&address, size);
        cuda.set_context(before);
    }
    *pointer = (void *)(uintptr_t)address;
    return error;
}

int cuda_free(int device, void *pointer) {
    void *before = NULL;
    int error = enter(device, &before);
    if (error == 0) {
        error = cuda.release((uint64_t)(uintptr_t)pointer);
        cuda.set_context(before);
    }
    return error;
}

int cuda_record_event(nccl_event event, nccl_stream stream) {
    return cuda_found() && cuda.record != NULL ? cuda.record(event, stream) : -1;
}

bool cuda_capturing(nccl_stream stream) {
    int status = 0; /* CU_STREAM_CAPTURE_STATUS_NONE */
    return cuda_found() && cuda.is_capturing(stream, &status) == 0 && status == 1;
}

int cuda_enqueue(nccl_stream stream, void (*work)(void *), void *argument,
                 void (*release)(void *)) {
    return cuda_found() ? cuda.enqueue(stream, work, argument, release) : -1;
}
