/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The few functions that the interposer itself calls in the loaded libcuda.
 *
 * They are the driver's and not the runtime's, because NCCL brings a runtime of its own. Both
 * runtimes share the thread's current context, which the driver keeps. A cudaStream_t is a
 * CUstream.
 */
#ifndef LIVESHIFT_INTERPOSER_CUDA_CALLS_H
#define LIVESHIFT_INTERPOSER_CUDA_CALLS_H

#include <stdbool.h>

enum cuda_result { /* the values of CUresult that we distinguish */
                   CUDA_OK = 0,
                   CUDA_BUSY = 600,   /* CUDA_ERROR_NOT_READY */
                   CUDA_ABSENT = 100, /* CUDA_ERROR_NO_DEVICE: here, no driver is loaded */
};

/* Whether a stream is being captured into a graph. A caller may ask at any time; it changes
   nothing. */
bool cuda_captures(void *stream);

/* CUDA_OK: everything enqueued on the stream is done. CUDA_BUSY: not yet. Otherwise CUDA's error.
   Never call it for a stream that is being captured: that would spoil the capture. */
int cuda_stream_state(void *stream);

/* Sets this thread's capture mode and returns the mode before. In mode relaxed it may call
   functions that would spoil another thread's capture (in global mode). The caller must know that
   the streams it uses are not being captured. */
int cuda_relax_captures(int mode);

#define CUDA_CAPTURES_RELAXED 2

/* The thread's current context; makes a context current; makes a device's primary context
   current. */
void *cuda_context(void);
int cuda_set_context(void *context);
int cuda_use_device(int device);

#endif
