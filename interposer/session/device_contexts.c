/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contexts in which a session works: contexts that the process made itself, the primary one of
 * the device if it is active. A context takes hundreds of MB of a GPU, so a session makes none.
 */
#include "device_serve.h"

#include "cuda/device_calls.h"

#define OF_POINTER 1   /* CU_POINTER_ATTRIBUTE_CONTEXT */
#define NO_CONTEXT 201 /* CUDA_ERROR_INVALID_CONTEXT */

void contexts_begin(struct device_contexts *contexts) {
    contexts->held = 0;
    contexts->before = NULL;
    DEVICE_CALL(cuCtxGetCurrent, &contexts->before);
}

void contexts_end(struct device_contexts *contexts) {
    DEVICE_CALL(cuCtxSetCurrent, contexts->before);
    for (int device = 0; device < 64; device++)
        if ((contexts->held >> device & 1) != 0)
            DEVICE_CALL(cuDevicePrimaryCtxRelease_v2, device);
    contexts->held = 0;
}

int contexts_enter(struct device_contexts *contexts, int32_t device, uint64_t address) {
    void *context = NULL;
    unsigned flags;
    int active = 0;
    if (device < 0 || device >= 64)
        return NO_CONTEXT;
    if ((contexts->held >> device & 1) != 0)
        return DEVICE_CALL(cuCtxSetCurrent, contexts->of[device]);
    int result = DEVICE_CALL(cuDevicePrimaryCtxGetState, device, &flags, &active);
    if (result != CUDA_OK)
        return result;
    if (active != 0) {
        result = DEVICE_CALL(cuDevicePrimaryCtxRetain, &context, device);
        if (result != CUDA_OK)
            return result;
        contexts->of[device] = context;
        contexts->held |= (uint64_t)1 << device;
    } else if (address == 0 ||
               DEVICE_CALL(cuPointerGetAttribute, &context, OF_POINTER, address) != CUDA_OK ||
               context == NULL)
        return NO_CONTEXT;
    return DEVICE_CALL(cuCtxSetCurrent, context);
}
