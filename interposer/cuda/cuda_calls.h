/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The few driver functions that the interposer itself calls, of the libcuda that is loaded.
 *
 * The driver's and not the runtime's: NCCL brings a runtime of its own, and what the two have in
 * common, the thread's current context, is the driver's. A cudaStream_t is a CUstream.
 */
#ifndef LIVESHIFT_INTERPOSER_CUDA_CALLS_H
#define LIVESHIFT_INTERPOSER_CUDA_CALLS_H

#include <stdbool.h>

enum cuda_result { /* those of CUresult that are told apart */
                   CUDA_OK = 0,
                   CUDA_BUSY = 600,   /* CUDA_ERROR_NOT_READY */
                   CUDA_ABSENT = 100, /* CUDA_ERROR_NO_DEVICE: here, no driver is loaded */
};

/* Whether a stream is being captured into a graph. Allowed at any time, changes nothing. */
bool cuda_captures(void *stream);

/* CUDA_OK: all that was enqueued is done. CUDA_BUSY: not yet. Else, CUDA's error. Never call it for
   a stream that is being captured: that would spoil the capture. */
int cuda_stream_state(void *stream);

/* This thread may call functions that would spoil a capture under way on another thread (in global
   mode), because they concern streams that it knows not to be captured. Returns the mode before. */
int cuda_relax_captures(int mode);

#define CUDA_CAPTURES_RELAXED 2

/* The thread's current context, and setting it; for a device, its primary one. */
void *cuda_context(void);
int cuda_set_context(void *context);
int cuda_use_device(int device);

#endif
