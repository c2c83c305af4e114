/* SPDX-License-Identifier: Apache-2.0 */
/* The state machine of a process that is checkpointed and restored, run by its restore thread. */
#include "served.h"

#include "content.h"
#include "gate.h"
#include "handles.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A restore found too little memory: see there. */
static bool stuck;

static CUprocessState state(void) { return (CUprocessState)atomic_load(&control()->state); }
static void become(CUprocessState next) { atomic_store(&control()->state, (uint32_t)next); }

static struct timespec *after(uint32_t milliseconds, struct timespec *deadline) {
    if (milliseconds == 0)
        return NULL;
    clock_gettime(CLOCK_MONOTONIC, deadline);
    deadline->tv_sec += milliseconds / 1000;
    deadline->tv_nsec += (long)(milliseconds % 1000) * 1000000;
    if (deadline->tv_nsec >= 1000000000) {
        deadline->tv_sec++;
        deadline->tv_nsec -= 1000000000;
    }
    return deadline;
}

/* No new call comes in; what was submitted runs to its end, host functions too. */
static CUresult lock(uint32_t timeout_ms) {
    struct timespec at, *deadline = after(timeout_ms, &at);
    if (state() != CU_PROCESS_STATE_RUNNING)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (!gate_shut(deadline) || !streams_drain(NULL, deadline)) {
        gate_open();
        return CUDA_ERROR_NOT_READY;
    }
    become(CU_PROCESS_STATE_LOCKED);
    return CUDA_SUCCESS;
}

/* Driver 580's limits: no managed memory, no IPC of either kind. For the first the README of
   cuda-checkpoint says that the process isn't kept in a good state; for the others it says nothing,
   and here they leave it LOCKED. */
static CUresult checkpoint(void) {
    if (state() != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    /* Reports differ on addresses that are reserved and hold nothing: some checkpoints hang. */
    const char *bare = getenv("SIMCUDA_BARE_RESERVATIONS");
    if (bare != NULL && reservations_bare()) {
        while (strcmp(bare, "hang") == 0)
            pause();
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    switch (content_obstacle()) {
    case OBSTACLE_MANAGED:
        become(CU_PROCESS_STATE_FAILED);
        return CUDA_ERROR_NOT_SUPPORTED;
    case OBSTACLE_IPC:
        /* Driver 610 brought IPC inside a job; VMM handles stayed out of it. */
        return CUDA_ERROR_NOT_SUPPORTED;
    case OBSTACLE_NONE:
        break;
    }
    if (!content_save()) {
        become(CU_PROCESS_STATE_FAILED);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    devices_vacate();
    become(CU_PROCESS_STATE_CHECKPOINTED);
    return CUDA_SUCCESS;
}

/* The GPU of the host that a map, or identity without one, gives to one of ours; NULL: none. */
static const struct gpu *destination(const struct control_request *request, const struct gpu *old) {
    const void *uuid = request->pair_count == 0 ? old->uuid : NULL;
    for (uint32_t i = 0; i < request->pair_count; i++)
        if (memcmp(request->pairs[i].oldUuid.bytes, old->uuid, sizeof old->uuid) == 0)
            uuid = request->pairs[i].newUuid.bytes;
    for (uint32_t i = 0; i < request->host.count && uuid != NULL; i++)
        if (memcmp(request->host.gpus[i].uuid, uuid, sizeof old->uuid) == 0)
            return &request->host.gpus[i];
    return NULL;
}

static CUresult restore(const struct control_request *request) {
    struct inventory *mine = &control()->inventory;
    const struct gpu *there[MAX_DEVICES];
    if (state() != CU_PROCESS_STATE_CHECKPOINTED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (stuck)
        return CUDA_ERROR_OPERATING_SYSTEM;
    /* The map must name every GPU that the process could see, used or not and also those that
       CUDA_VISIBLE_DEVICES hides (NVIDIA/cuda-checkpoint#35, #47, #54; cuda-python PR 1983). */
    for (uint32_t i = 0; i < mine->count; i++) {
        there[i] = destination(request, &mine->gpus[i]);
        if (there[i] == NULL || strcmp(there[i]->chip, mine->gpus[i].chip) != 0)
            return CUDA_ERROR_INVALID_VALUE;
        for (uint32_t j = 0; j < i; j++)
            if (there[j] == there[i])
                return CUDA_ERROR_INVALID_VALUE;
    }
    /* Too little memory: CHECKPOINTED for good; only killing it helps (cuda-checkpoint#44). */
    for (uint32_t i = 0; i < mine->count; i++)
        if (there[i]->used > there[i]->total || gpu_vacated(i) > there[i]->total - there[i]->used) {
            stuck = true;
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    devices_move(there, request->host.driver);
    content_bring_back();
    become(CU_PROCESS_STATE_LOCKED);
    return CUDA_SUCCESS;
}

static CUresult unlock(void) {
    if (state() != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    become(CU_PROCESS_STATE_RUNNING);
    gate_open();
    return CUDA_SUCCESS;
}

CUresult serve_request(const struct control_request *request) {
    switch (request->operation) {
    case CONTROL_LOCK:
        return lock(request->timeout_ms);
    case CONTROL_CHECKPOINT:
        return checkpoint();
    case CONTROL_RESTORE:
        return restore(request);
    case CONTROL_UNLOCK:
        return unlock();
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}
