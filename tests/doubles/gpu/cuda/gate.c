/* SPDX-License-Identifier: Apache-2.0 */
#include "gate.h"

#include "control.h"

#include <errno.h>
#include <stdatomic.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static bool shut;
static unsigned int inside;
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
    while (shut)
        pthread_cond_wait(&changed, &lock);
    inside++;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

void gate_leave(const int *entered) {
    (void)entered;
    if (--depth > 0)
        return;
    pthread_mutex_lock(&lock);
    if (--inside == 0 && shut)
        pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

bool gate_shut(const struct timespec *deadline) {
    bool empty = true;
    pthread_mutex_lock(&lock);
    shut = true;
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
    shut = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void gate_in_host_function(bool now) { in_host_function = now; }
