/* SPDX-License-Identifier: Apache-2.0 */
/* Primary contexts, one per device, and which of them is current in a thread. */
#ifndef SIMCUDA_CONTEXT_H
#define SIMCUDA_CONTEXT_H

#include "cuda_abi.h"

#include <stdbool.h>

struct CUctx_st {
    CUdevice device;
    unsigned int flags;
    /* How often it was retained. */
    unsigned int users;
    /* The legacy default stream, made with the context and kept for ever. */
    CUstream legacy;
};

/* The current context, or CUDA_ERROR_INVALID_CONTEXT. */
CUresult context_current(CUcontext *context);
/* The current context, else device 0's: for doubles that enqueue from threads of their own. */
CUresult context_current_or_first(CUcontext *context);
CUcontext context_of(CUdevice device);

#endif
