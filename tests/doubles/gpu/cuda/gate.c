/* SPDX-License-Identifier: Apache-2.0 */
#include "gate.h"

#include "control.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static _Atomic uint32_t shut;
static unsigned int inside;
/* A waiter is inside from the moment the gate opens, also if it is stopped: driver 580 takes
   glibc's read-write lock (seen on an H100, 2026-11). */
static unsigned int waiting;
static _Atomic uint32_t openings;
static atomic_bool initialised;
static atomic_bool forked;
static _Thread_local unsigned int depth;
static _Thread_local bool in_host_function;

void monotonic_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* A forked child has this library's memory but none of its threads: as with the real driver, CUDA is
   of no use there. Whoever asks by pid must not find its parent's control page in it either. */
static void after_fork(void) {
    atomic_store(&forked, true);
    control_forget();
}

void gate_initialise(void) {
    monotonic_condition(&changed);
    pthread_atfork(NULL, NULL, after_fork);
    atomic_store(&initialised, true);
}

bool gate_initialised(void) { return atomic_load(&initialised) && !atomic_load(&forked); }
bool gate_forked(void) { return atomic_load(&forked); }

CUresult gate_enter(void) {
    if (!gate_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (in_host_function)
        return CUDA_ERROR_NOT_PERMITTED;
    if (depth++ > 0)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    uint32_t before = atomic_load(&openings);
    bool wait = atomic_load(&shut) != 0;
    *(wait ? &waiting : &inside) += 1;
    pthread_mutex_unlock(&lock);
    while (wait && atomic_load(&openings) == before)
        syscall(SYS_futex, &openings, FUTEX_WAIT_PRIVATE, before, NULL, NULL, 0);
    return CUDA_SUCCESS;
}

void gate_leave(const int *entered) {
    (void)entered;
    if (--depth > 0)
        return;
    pthread_mutex_lock(&lock);
    if (--inside == 0 && atomic_load(&shut) != 0)
        pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

bool gate_shut(const struct timespec *deadline) {
    bool empty = true;
    pthread_mutex_lock(&lock);
    atomic_store(&shut, 1);
    while (inside > 0 && empty) {
        if (deadline == NULL)
            pthread_cond_wait(&changed, &lock);
        else if (pthread_cond_timedwait(&changed, &lock, deadline) == ETIMEDOUT)
            empty = inside == 0;
    }
    pthread_mutex_unlock(&lock);
    return empty;
}

void gate_open(void) {
    pthread_mutex_lock(&lock);
    atomic_store(&shut, 0);
    inside += waiting;
    waiting = 0;
    atomic_fetch_add(&openings, 1);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    syscall(SYS_futex, &openings, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void gate_in_host_function(bool now) { in_host_function = now; }
