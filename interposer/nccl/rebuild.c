/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes communicators again beneath their handles, one after the other, in an order that is the
 * same on all ranks. Each is made by an init with a fresh unique id, no matter how it was made
 * first. Then what the application attached to it is made again.
 *
 * A thread of the application does this if one waits at the gate: NCCL then sees the thread, and
 * the current device, that it knew before. If none comes in GRACE_MS, a thread of ours does it.
 *
 * The init gets the application's own config, blocking or not. If we made it non-blocking, NCCL
 * would start a thread for every group in which the communicator is used later. So an init may
 * block its thread, waiting for a peer that never comes. Another thread ends such an init: it
 * aborts the communicator.
 */

#include "cuda/cuda_calls.h"
#include "gate/thread.h"
#include "nccl_calls.h"
#include "service/service.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How long a thread of the application may take to come, in ms. */
#define GRACE_MS 200

/* One rebuild. It outlives its task if NCCL never comes back: then it is leaked. */
struct raising {
    struct vcomm **all; /* in the global order */
    unsigned many;
    int result;
    char trouble[160];
    _Atomic unsigned at, until; /* [at, until) is being made now */
    _Atomic bool give_up, over, aborted;
};

/* The rebuild that a thread of the application may take; NULL: none. */
static _Atomic(struct raising *) offered;

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

static ncclResult_t await(struct raising *r, struct vcomm *v) {
    ncclResult_t state = ncclInProgress;
    while (v->real != NULL && !atomic_load(&r->give_up)) {
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
static ncclResult_t raise_some(struct raising *r, unsigned at, unsigned until, const char **what) {
    bool group = until - at > 1;
    ncclResult_t result = ncclSuccess, end;
    *what = "its init";
    if (group)
        NCCL_CALL(GroupStart);
    for (unsigned i = at; i < until && (result == ncclSuccess || result == ncclInProgress); i++)
        result = init(r->all[i]);
    if (group && (end = NCCL_CALL(GroupEnd)) != ncclSuccess)
        result = end;
    if (result == ncclInProgress)
        result = ncclSuccess;
    for (unsigned i = at; i < until && result == ncclSuccess; i++)
        result = await(r, r->all[i]);
    if (result != ncclSuccess)
        return result;
    if (group)
        NCCL_CALL(GroupStart);
    for (unsigned i = at; i < until && result == ncclSuccess; i++) {
        cuda_use_device(r->all[i]->device);
        result = records_replay(r->all[i], what);
    }
    if (group && (end = NCCL_CALL(GroupEnd)) != ncclSuccess)
        result = end;
    for (unsigned i = at; i < until && result == ncclSuccess; i++)
        result = await(r, r->all[i]);
    return result;
}

static void abort_some(struct raising *r, unsigned at, unsigned until) {
    for (unsigned i = at; i < until; i++) {
        /* The thread that raises it may be inside NCCL, which writes v->real before it waits. */
        ncclComm_t real = __atomic_load_n(&r->all[i]->real, __ATOMIC_ACQUIRE);
        if (real != NULL && !atomic_exchange(&r->all[i]->real_claimed, true))
            NCCL_CALL(CommAbort, real);
    }
}

static void raise_all(struct raising *r) {
    void *context = cuda_context();
    for (unsigned at = 0, until; at < r->many && r->result == 0; at = until) {
        const char *what;
        char name[80];
        for (until = at + 1; until < r->many && order_of(r->all[until]) == order_of(r->all[at]);)
            until++;
        atomic_store(&r->at, at);
        atomic_store(&r->until, until);
        ncclResult_t result =
            atomic_load(&r->give_up) ? ncclInProgress : raise_some(r, at, until, &what);
        if (result == ncclSuccess && !atomic_load(&r->give_up)) {
            for (unsigned i = at; i < until; i++) {
                struct vcomm *v = r->all[i];
                uint32_t down = VCOMM_DOWN;
                atomic_fetch_add(&v->row->generation, 1);
                if (atomic_compare_exchange_strong(&v->state, &down, VCOMM_LIVE))
                    atomic_store(&v->row->state, LIVESHIFT_COMM_LIVE);
                else /* the application has aborted it meanwhile */
                    abort_some(r, i, i + 1);
            }
            continue;
        }
        r->result = atomic_load(&r->give_up) ? ETIMEDOUT : EIO;
        if (r->result == ETIMEDOUT)
            snprintf(r->trouble, sizeof r->trouble,
                     "%s was not rebuilt in time: a member is missing",
                     task_name(r->all[at], name));
        else
            snprintf(r->trouble, sizeof r->trouble, "%s: %s failed: NCCL's error %d",
                     task_name(r->all[at], name), what, result);
        abort_some(r, at, until);
    }
    atomic_store(&r->until, atomic_load(&r->at));
    cuda_set_context(context);
    atomic_store(&r->over, true);
}

static void rebuild_on_this_thread(uint32_t kind) {
    if (kind < NCCL_AllReduce) /* a gloo thread has no device set */
        return;
    struct raising *r = atomic_exchange(&offered, NULL);
    if (r != NULL)
        raise_all(r);
}

static void on_our_thread(void *of) { raise_all(of); }

static void abort_current(void *of) {
    struct raising *r = of;
    abort_some(r, atomic_load(&r->at), atomic_load(&r->until));
    atomic_store(&r->aborted, true);
}

static bool await_flag(_Atomic bool *flag, int64_t deadline_ns) {
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
    struct vcomm **all = vcomms_now(&many);
    for (unsigned i = 0; i < many && task->result == 0; i++) {
        struct vcomm *v = all[i];
        ncclUniqueId id;
        char name[80];
        if (atomic_load(&v->state) != VCOMM_DOWN || atomic_load(&v->finalized) || v->rank != 0)
            continue;
        cuda_use_device(v->device);
        ncclResult_t result = NCCL_CALL(GetUniqueId, &id);
        if (result != ncclSuccess) {
            task_fails(task, EIO, "%s: ncclGetUniqueId failed: NCCL's error %d", task_name(v, name),
                       result);
            break;
        }
        memcpy(v->row->fresh_id, &id, sizeof id);
        atomic_store(&v->row->fresh_attempt, task->attempt);
    }
    free(all);
}

/* Called when the time is up. NCCL has only one way to end an init that waits: an abort. */
static void give_up(struct raising *r, int64_t last) {
    atomic_store(&r->give_up, true);
    if (thread_start("liveshift fell", abort_current, r) != 0)
        atomic_store(&r->aborted, true);
    await_flag(&r->aborted, last);
    await_flag(&r->over, last);
}

void rebuild(struct task *task) {
    struct raising *r = calloc(1, sizeof *r);
    if (r == NULL || (r->all = vcomms_now(&r->many)) == NULL) {
        free(r);
        task_fails(task, ENOMEM, "no memory");
        return;
    }
    unsigned kept = 0;
    for (unsigned i = 0; i < r->many; i++)
        if (atomic_load(&r->all[i]->state) == VCOMM_DOWN && !atomic_load(&r->all[i]->finalized) &&
            order_of(r->all[i]) != 0)
            r->all[kept++] = r->all[i];
    r->many = kept;
    qsort(r->all, kept, sizeof *r->all, by_order);
    if (kept == 0)
        atomic_store(&r->over, true);
    else {
        atomic_store(&task->gate->callback, rebuild_on_this_thread);
        atomic_store(&offered, r);
        int64_t grace = task_now_ns() + (int64_t)GRACE_MS * 1000000;
        while (atomic_load(&offered) != NULL && task_now_ns() < grace)
            task_pause();
        int failure = 0;
        if (atomic_exchange(&offered, NULL) == r)
            failure = thread_start("liveshift raise", on_our_thread, r);
        if (failure != 0) {
            task_fails(task, failure, "cannot start a thread to rebuild communicators: %s",
                       strerror(failure));
            atomic_store(&r->over, true);
        }
    }
    if (!await_flag(&r->over, task->deadline_ns))
        give_up(r, task->last_ns);
    if (!atomic_load(&r->over)) {
        task_fails(task, ETIMEDOUT, "NCCL's init neither came to an end nor could be aborted");
        return; /* r is leaked: a thread still reads it */
    }
    if (r->result != 0)
        task_fails(task, r->result, "%s", r->trouble);
    if (task->result == 0)
        atomic_store(&task->gate->page->answer.down, 0);
    if (!atomic_load(&r->give_up) || atomic_load(&r->aborted)) {
        free(r->all);
        free(r);
    }
}
