/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a process that calls cuCheckpointProcess* reaches the one it names. The real driver goes
 * through its kernel module. Here every process that called cuInit has one page at one fixed address
 * and a thread that serves it: the caller reads and writes the page with process_vm_readv and
 * process_vm_writev (which asks for the rights that the real thing asks for, too) and rings with a
 * signal to that thread. No file, no socket: nothing that pid or mount namespaces hide or that CRIU
 * would have to carry.
 */
#ifndef SIMCUDA_CONTROL_H
#define SIMCUDA_CONTROL_H

#include "device.h"

#include <signal.h>
#include <stdatomic.h>

/* Where neither the kernel nor ASan nor TSan puts anything: below the place where programs start. */
#define CONTROL_ADDRESS ((uintptr_t)0x551000000000)
#define CONTROL_MAGIC 0x61646375636d6973ull /* "simcucda" */
#define CONTROL_SIGNAL (SIGRTMAX - 7)

enum control_operation { CONTROL_LOCK = 1, CONTROL_CHECKPOINT, CONTROL_RESTORE, CONTROL_UNLOCK };

struct control_request {
    uint32_t operation;
    /* Lock: milliseconds, 0 none. */
    uint32_t timeout_ms;
    /* Restore: the GPUs of the host on which the caller stands, `used` by others; and the map. */
    struct inventory host;
    uint32_t pair_count;
    CUcheckpointGpuPair pairs[MAX_DEVICES];
};

struct control {
    _Atomic uint64_t magic;
    /* Thread id of the restore thread, in its own pid namespace. */
    int32_t restore_thread;
    _Atomic uint32_t state;
    /* Number of the last request that was written, and of the last one that was answered. */
    _Atomic uint64_t asked;
    _Atomic uint64_t answered;
    int32_t answer;
    /* The GPUs that this process sees beneath it, including those that CUDA_VISIBLE_DEVICES hides. */
    struct inventory inventory;
    struct control_request request;
};

/* This process's page; valid after control_initialise. */
struct control *control(void);
CUresult control_initialise(void);
/* In a forked child: it isn't a CUDA process. */
void control_forget(void);
/* Starts the restore thread and shows the page. */
CUresult restore_thread_start(void);

#endif
