/* SPDX-License-Identifier: Apache-2.0 */
#include "context.h"

#include "blocks.h"
#include "control.h"
#include "device.h"
#include "gate.h"
#include "stream.h"

#include <pthread.h>
#include <stdlib.h>

#define STACK 32

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUctx_st contexts[MAX_DEVICES];
static _Thread_local CUcontext stack[STACK];
/* stack[current] is current; NULL at the bottom. */
static _Thread_local int current;

CUcontext context_of(CUdevice device) { return &contexts[device]; }

static bool is_context(CUcontext context) {
    return context >= contexts && context < contexts + device_count();
}

/* With lock held: a context and its default stream exist from the first use on. */
static CUresult make(CUdevice device) {
    if (contexts[device].device != device) /* read without the lock */
        contexts[device].device = device;
    if (contexts[device].legacy == NULL)
        contexts[device].legacy = stream_make(&contexts[device], 0, 0);
    return contexts[device].legacy ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult context_current(CUcontext *context) {
    *context = stack[current];
    return *context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult context_current_or_first(CUcontext *context) {
    if (context_current(context) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    CUresult result = make(0);
    pthread_mutex_unlock(&lock);
    *context = &contexts[0];
    return result;
}

static CUresult initialise(void) {
    CUresult result = control_initialise();
    if (result == CUDA_SUCCESS)
        result = devices_initialise();
    if (result != CUDA_SUCCESS)
        return result;
    streams_initialise();
    gate_initialise();
    return restore_thread_start();
}

CUresult cuInit(unsigned int flags) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static bool tried;
    static CUresult result;
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (gate_forked())
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&once);
    if (!tried)
        result = initialise();
    tried = true;
    CUresult now = result;
    pthread_mutex_unlock(&once);
    return now;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    API_CALL();
    if (context == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUresult result = make(device);
    if (result == CUDA_SUCCESS) {
        contexts[device].users++;
        *context = &contexts[device];
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* What a context's end does: work finishes, memory goes. Streams stay as handles. */
static void empty(CUcontext context) {
    streams_drain(context, NULL);
    blocks_free_device(context->device);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    API_CALL();
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    bool used = contexts[device].users > 0;
    bool last = used && --contexts[device].users == 0;
    pthread_mutex_unlock(&lock);
    if (last)
        empty(&contexts[device]);
    return used ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    API_CALL();
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    empty(&contexts[device]);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
    API_CALL();
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    contexts[device].flags = flags;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    API_LOOK();
    if (flags == NULL || active == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    *flags = contexts[device].flags;
    *active = contexts[device].users > 0;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    API_LOOK();
    if (context != NULL && !is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[current] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    API_LOOK();
    if (context == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *context = stack[current];
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    API_LOOK();
    if (!is_context(context) || current + 1 == STACK)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[++current] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    API_LOOK();
    if (stack[current] == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context != NULL)
        *context = stack[current];
    stack[current] = NULL;
    if (current > 0)
        current--;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    API_LOOK();
    if (device == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUcontext context;
    CUresult result = context_current(&context);
    if (result == CUDA_SUCCESS)
        *device = context->device;
    return result;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    API_LOOK();
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return CUDA_SUCCESS;
}

/* What is enabled is remembered for the answers only: here every device reads all memory. */
static bool peers[MAX_DEVICES][MAX_DEVICES];

static CUresult peer_access(CUcontext peer, bool on) {
    CUcontext mine;
    CUresult result = context_current(&mine);
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_context(peer) || peer == mine)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    bool *now = &peers[mine->device][peer->device];
    if (*now == on)
        result = on ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    *now = on;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    API_CALL();
    return flags == 0 ? peer_access(peer, true) : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    API_CALL();
    return peer_access(peer, false);
}

CUresult cuCtxSynchronize(void) {
    API_CALL();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    return stream_context_synchronize(context);
}
