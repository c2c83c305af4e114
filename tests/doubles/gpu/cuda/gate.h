/* SPDX-License-Identifier: Apache-2.0 */
/* The door through which every call that touches GPU state comes in; a checkpoint's lock shuts it. */
#ifndef SIMCUDA_GATE_H
#define SIMCUDA_GATE_H

#include "cuda_abi.h"

#include <stdbool.h>
#include <time.h>

/* Lets a call in, or waits while the process is locked. CUDA_ERROR_NOT_INITIALIZED before cuInit and
   in a forked child, CUDA_ERROR_NOT_PERMITTED inside a host function (cuLaunchHostFunc's rule). */
CUresult gate_enter(void);
void gate_leave(const int *entered);

/* First statement of an entry point that the lock blocks. */
#define API_CALL()                                                                                 \
    CUresult may_enter = gate_enter();                                                             \
    if (may_enter != CUDA_SUCCESS)                                                                 \
        return may_enter;                                                                          \
    __attribute__((cleanup(gate_leave), unused)) const int entered = 1

/* For entry points that only look: they answer while the process is locked too. */
#define API_LOOK()                                                                                 \
    if (!gate_initialised())                                                                       \
    return CUDA_ERROR_NOT_INITIALIZED

void gate_initialise(void);
bool gate_initialised(void);
bool gate_forked(void);

/* Keeps new calls out and waits until none is inside. false: one still was at the deadline (NULL:
   none); the gate stays shut all the same. */
bool gate_shut(const struct timespec *deadline);
void gate_open(void);

/* Marks the thread as running a host function, in which CUDA may not be called. */
void gate_in_host_function(bool inside);

/* A condition that counts on CLOCK_MONOTONIC. */
#include <pthread.h>
void monotonic_condition(pthread_cond_t *condition);

#endif
