/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the simulated libcuda.so.1 exports beside CUDA's own functions, for other doubles (NCCL).
 * The real libcuda has none of these: dlsym(…, "simcuda_enqueue") == NULL tells real from simulated.
 */
#ifndef LIVESHIFT_SIMCUDA_H
#define LIVESHIFT_SIMCUDA_H

/* How every simulated device's name begins. */
#define SIMCUDA_NAME "liveshift simulated GPU"

/*
 * Runs work(argument) on the stream's worker thread, after all that was submitted to the stream
 * before; returns at once. `stream` is a CUstream or cudaStream_t, NULL the legacy default stream of
 * the current context (of device 0 where the thread has none). While the stream captures, the work
 * becomes a node of the graph instead and runs at each launch. As a call of the CUDA API would, this
 * one blocks while the process is locked for a checkpoint. Returns a CUresult: 0, or why nothing was
 * enqueued.
 */
int simcuda_enqueue(void *stream, void (*work)(void *), void *argument);

/*
 * The same with an owned argument: release(argument) is called once, when the work can never run
 * again: after it ran or, if it was captured, once the graph and all that was instantiated from it
 * are destroyed. It runs on some thread that holds no lock of the double, and must not call CUDA.
 * Where this returns non-zero, release was not and will not be called.
 */
int simcuda_enqueue_owned(void *stream, void (*work)(void *), void *argument,
                          void (*release)(void *));

/*
 * Bytes of device memory that the process holds on all its GPUs together: what NVML would say of it.
 * Returns a CUresult, as cuCheckpointProcessGetState does.
 */
int simcuda_held_bytes(int pid, unsigned long long *bytes);

#endif
