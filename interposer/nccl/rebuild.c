/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes communicators again beneath their handles, one after the other, in an order that is the
 * same on all ranks. Each is made by an init with a fresh unique id, no matter how it was made
 * first. Then what the application attached to it is made again.
 *
 * A thread of the application does this if one waits at the gate: NCCL then sees the thread, and
 * the current device, that it knew before. If none comes in APPLICATION_THREAD_MS,
 * a thread of ours does it.
 *
 * The init gets the application's own config, blocking or not. If we made it non-blocking, NCCL
 * would start a thread for every group in which the communicator is used later. So an init may
 * block its thread, waiting for a peer that never comes. Another thread ends such an init: it
 * aborts the communicator.
 */

#include "cuda/device_calls.h"
#include "gate/thread.h"
#include "nccl_calls.h"
#include "service/service.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How long a thread of the application may take to come, in ms. */
#define APPLICATION_THREAD_MS 200

/* One rebuild. If NCCL never returns, it exists longer than its task: then it is leaked. */
struct rebuild_run {
    struct vcomm **all; /* in the global order */
    unsigned many;
    int result;
    char message[160];
    _Atomic unsigned at, until; /* [at, until) is being made now */
    _Atomic bool cancelled, finished, aborted;
};

/* The rebuild that a thread of the application may take; NULL: none. */
static _Atomic(struct rebuild_run *) waiting_rebuild;

static uint32_t order_of(const struct vcomm *v) { return atomic_load(&v->row->rebuild_order); }

static ncclResult_t init(struct vcomm *v) {
    struct nccl_config *config = config_or_default(v->config);
    ncclUniqueId id;
    memcpy(&id, v->row->rebuild_id, sizeof id);
    v->real = NULL;
    atomic_store(&v->real_claimed, false);
    cuda_use_device(v->device);
    ncclResult_t result =
        config != NULL ? NCCL_CALL(CommInitRankConfig, &v->real, v->size, id, v->rank, config)
                       : ncclSystemError;
    config_free(config);
    return result;
}

static ncclResult_t await(struct rebuild_run *run, struct vcomm *v) {
    ncclResult_t state = ncclInProgress;
    while (v->real != NULL && !atomic_load(&run->cancelled)) {
        if (NCCL_CALL(CommGetAsyncError, v->real, &state) != ncclSuccess)
            return ncclSystemError;
        if (state != ncclInProgress)
            return state;
        task_pause();
    }
    return state;
}

/* Makes the communicators [at, until), which have the same place in the order. These are one
   communicator, or several members of one in this process. Such members wait for each other, so
   they form a group. */
static ncclResult_t rebuild_group(struct rebuild_run *run, unsigned at, unsigned until,
                                  const char **what) {
    bool group = until - at > 1;
    ncclResult_t result = ncclSuccess, end;
    *what = "its init";
    if (group)
        NCCL_CALL(GroupStart);
    for (unsigned i = at; i < until && (result == ncclSuccess || result == ncclInProgress); i++)
        result = init(run->all[i]);
    if (group && (end = NCCL_CALL(GroupEnd)) != ncclSuccess)
        result = end;
    if (result == ncclInProgress)
        result = ncclSuccess;
    for (unsigned i = at; i < until && result == ncclSuccess; i++)
        result = await(run, run->all[i]);
    if (result != ncclSuccess)
        return result;
    if (group)
        NCCL_CALL(GroupStart);
    for (unsigned i = at; i < until && result == ncclSuccess; i++) {
        cuda_use_device(run->all[i]->device);
        result = records_replay(run->all[i], what);
    }
    if (group && (end = NCCL_CALL(GroupEnd)) != ncclSuccess)
        result = end;
    for (unsigned i = at; i < until && result == ncclSuccess; i++)
        result = await(run, run->all[i]);
    return result;
}

static void abort_group(struct rebuild_run *run, unsigned at, unsigned until) {
    for (unsigned i = at; i < until; i++) {
        /* The thread that rebuilds it may be inside NCCL, which writes v->real before it waits. */
        ncclComm_t real = __atomic_load_n(&run->all[i]->real, __ATOMIC_ACQUIRE);
        if (real != NULL && !atomic_exchange(&run->all[i]->real_claimed, true))
            NCCL_CALL(CommAbort, real);
    }
}

static void rebuild_all(struct rebuild_run *run) {
    void *context = NULL;
    DEVICE_CALL(cuCtxGetCurrent, &context);
    for (unsigned at = 0, until; at < run->many && run->result == 0; at = until) {
        const char *what;
        char name[80];
        for (until = at + 1;
             until < run->many && order_of(run->all[until]) == order_of(run->all[at]);)
            until++;
        atomic_store(&run->at, at);
        atomic_store(&run->until, until);
        ncclResult_t result =
            atomic_load(&run->cancelled) ? ncclInProgress : rebuild_group(run, at, until, &what);
        if (result == ncclSuccess && !atomic_load(&run->cancelled)) {
            for (unsigned i = at; i < until; i++) {
                struct vcomm *v = run->all[i];
                uint32_t down = VCOMM_DOWN;
                atomic_fetch_add(&v->row->generation, 1);
                if (atomic_compare_exchange_strong(&v->state, &down, VCOMM_LIVE))
                    atomic_store(&v->row->state, LIVESHIFT_COMM_LIVE);
                else /* the application has aborted it meanwhile */
                    abort_group(run, i, i + 1);
            }
            continue;
        }
        run->result = atomic_load(&run->cancelled) ? ETIMEDOUT : EIO;
        if (run->result == ETIMEDOUT)
            snprintf(run->message, sizeof run->message,
                     "%s was not rebuilt in time: a member is missing",
                     task_name(run->all[at], name));
        else
            snprintf(run->message, sizeof run->message, "%s: %s failed: NCCL's error %d",
                     task_name(run->all[at], name), what, result);
        abort_group(run, at, until);
    }
    atomic_store(&run->until, atomic_load(&run->at));
    DEVICE_CALL(cuCtxSetCurrent, context);
    atomic_store(&run->finished, true);
}

static void rebuild_on_this_thread(uint32_t kind) {
    if (kind < NCCL_AllReduce) /* a gloo thread has no device set */
        return;
    struct rebuild_run *run = atomic_exchange(&waiting_rebuild, NULL);
    if (run != NULL)
        rebuild_all(run);
}

static void rebuild_thread(void *of) { rebuild_all(of); }

static void abort_thread(void *of) {
    struct rebuild_run *run = of;
    abort_group(run, atomic_load(&run->at), atomic_load(&run->until));
    atomic_store(&run->aborted, true);
}

static bool wait_for_flag(_Atomic bool *flag, int64_t deadline_ns) {
    while (!atomic_load(flag)) {
        if (task_now_ns() > deadline_ns)
            return false;
        task_pause();
    }
    return true;
}

static int by_order(const void *a, const void *b) {
    uint32_t one = order_of(*(struct vcomm *const *)a), other = order_of(*(struct vcomm *const *)b);
    return (one > other) - (one < other);
}

void fresh_ids(struct task *task) {
    unsigned many;
    struct vcomm **all = vcomms_snapshot(&many);
    for (unsigned i = 0; i < many && task->result == 0; i++) {
        struct vcomm *v = all[i];
        ncclUniqueId id;
        char name[80];
        if (atomic_load(&v->state) != VCOMM_DOWN || atomic_load(&v->finalized) || v->rank != 0)
            continue;
        cuda_use_device(v->device);
        ncclResult_t result = NCCL_CALL(GetUniqueId, &id);
        if (result != ncclSuccess) {
            task_fail(task, EIO, "%s: ncclGetUniqueId failed: NCCL's error %d", task_name(v, name),
                      result);
            break;
        }
        memcpy(v->row->fresh_id, &id, sizeof id);
        atomic_store(&v->row->fresh_attempt, task->order.attempt);
    }
    free(all);
}

/* Called when the time is up. NCCL has only one way to end an init that waits: an abort. */
static void cancel_rebuild(struct rebuild_run *run, int64_t last) {
    atomic_store(&run->cancelled, true);
    if (thread_start("liveshift abort", abort_thread, run) != 0)
        atomic_store(&run->aborted, true);
    wait_for_flag(&run->aborted, last);
    wait_for_flag(&run->finished, last);
}

void rebuild(struct task *task) {
    struct rebuild_run *run = calloc(1, sizeof *run);
    if (run == NULL || (run->all = vcomms_snapshot(&run->many)) == NULL) {
        free(run);
        task_fail(task, ENOMEM, "no memory");
        return;
    }
    unsigned kept = 0;
    for (unsigned i = 0; i < run->many; i++)
        if (atomic_load(&run->all[i]->state) == VCOMM_DOWN &&
            !atomic_load(&run->all[i]->finalized) && order_of(run->all[i]) != 0)
            run->all[kept++] = run->all[i];
    run->many = kept;
    qsort(run->all, kept, sizeof *run->all, by_order);
    if (kept == 0)
        atomic_store(&run->finished, true);
    else {
        atomic_store(&task->gate->callback, rebuild_on_this_thread);
        atomic_store(&waiting_rebuild, run);
        int64_t until_ns = task_now_ns() + (int64_t)APPLICATION_THREAD_MS * 1000000;
        while (atomic_load(&waiting_rebuild) != NULL && task_now_ns() < until_ns)
            task_pause();
        int failure = 0;
        if (atomic_exchange(&waiting_rebuild, NULL) == run)
            failure = thread_start("liveshift init", rebuild_thread, run);
        if (failure != 0) {
            task_fail(task, failure, "cannot start a thread to rebuild communicators: %s",
                      strerror(failure));
            atomic_store(&run->finished, true);
        }
    }
    if (!wait_for_flag(&run->finished, task->deadline_ns))
        cancel_rebuild(run, task->abort_deadline_ns);
    if (!atomic_load(&run->finished)) {
        task_fail(task, ETIMEDOUT, "NCCL's init neither came to an end nor could be aborted");
        return; /* `run` is leaked: a thread still reads it */
    }
    if (run->result != 0)
        task_fail(task, run->result, "%s", run->message);
    if (task->result == 0)
        atomic_store(&task->gate->page->answer.down, 0);
    if (!atomic_load(&run->cancelled) || atomic_load(&run->aborted)) {
        free(run->all);
        free(run);
    }
}
