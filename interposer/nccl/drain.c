/* SPDX-License-Identifier: Apache-2.0 */
/* What the service thread does at the boundary: it finds out whether everything can be torn down,
   and waits until the streams are idle. */

#include "nccl_calls.h"
#include "service/service.h"

#include <errno.h>
#include <stdlib.h>

/* Whether a graph with NCCL operations in it exists, or may come out of a capture under way. NCCL's
   destroy and abort hang until the last such graph is gone (pytorch#115388; ledger/graphs.h). */
static bool graphs_left(struct liveshift_page *page) {
    if (atomic_load(&page->ledger.graphs_with_nccl) > 0)
        return true;
    struct liveshift_stream *streams = liveshift_streams(page);
    for (uint32_t at = 0; at < atomic_load(&page->streams); at++)
        if (atomic_load(&streams[at].handle) != 0 &&
            (atomic_load(&streams[at].use) & STREAM_CAPTURING) != 0)
            return true;
    return false;
}

/* Fails the task if something can't be torn down. Until here nothing has been torn down. */
static void refuse_what_is_unsafe(struct task *task) {
    const char *process = atomic_load(&vcomms_unsafe);
    if (process != NULL)
        task_fail(task, EOPNOTSUPP, "%s", process);
    unsigned many;
    struct vcomm **all = vcomms_snapshot(&many);
    for (unsigned i = 0; i < many; i++) {
        char name[80], why[VCOMM_WHY];
        uint32_t state = atomic_load(&all[i]->state);
        if (!graphs_left(task->gate->page))
            vcomm_not_captured(all[i]);
        if (vcomm_is_unsafe(all[i], why))
            task_fail(task, EOPNOTSUPP, "%s: %s", task_name(all[i], name), why);
        else if (all[i]->row == NULL && state != VCOMM_BROKEN && state != VCOMM_STARTING)
            task_fail(task, EOPNOTSUPP, "%s has no identity that its members agree on",
                      task_name(all[i], name));
    }
    free(all);
}

enum asked { STREAM_GONE, STREAM_CAPTURES, STREAM_ANSWERED };

/* Ask the driver about a stream, which the application may destroy at any moment. A stream that is
   captured is not asked: that would spoil the capture. */
static enum asked ask(struct liveshift_stream *row, uint64_t number, int *state) {
    void *stream = (void *)(uintptr_t)number;
    if (!stream_keep(row, number))
        return STREAM_GONE;
    bool captures = cuda_captures(stream);
    if (!captures)
        *state = DEVICE_CALL(cuStreamQuery, stream);
    stream_kept();
    return captures ? STREAM_CAPTURES : STREAM_ANSWERED;
}

/* Whether a stream has done what it carried. True also if the task failed over it. */
static bool idle(struct task *task, struct liveshift_stream *row) {
    uint64_t number = atomic_load(&row->handle);
    int state = CUDA_OK;
    if (number == 0 || number == UINT64_MAX || (atomic_load(&row->use) & STREAM_DIRTY) == 0)
        return true;
    if (number == STREAM_PER_THREAD) {
        task_fail(task, EOPNOTSUPP,
                  "NCCL was used on the per-thread default stream, which no other thread can see");
        return true;
    }
    cuda_use_device(row->device); /* this thread has no context of its own */
    enum asked asked = ask(row, number, &state);
    if (asked == STREAM_GONE)
        return true;
    /* A stream that is captured is not idle: what was enqueued before the capture is unknown. */
    if (asked == STREAM_CAPTURES || state == CUDA_BUSY)
        return false;
    if (state == CUDA_OK)
        atomic_fetch_and(&row->use, ~STREAM_DIRTY);
    else
        task_fail(task, EIO,
                  "cuStreamQuery failed with error %d on a stream that carried NCCL operations",
                  state);
    return true;
}

/* Whether NCCL has enqueued all that it was given. For a non-blocking communicator it does that on
   threads of its own, after the call has come back. */
static bool enqueued(void) {
    unsigned many;
    struct vcomm **all = vcomms_snapshot(&many);
    bool busy = false;
    for (unsigned i = 0; i < many && !busy; i++)
        if (vcomm_enter(all[i])) {
            ncclResult_t state = ncclSuccess;
            busy = atomic_load(&all[i]->state) == VCOMM_LIVE &&
                   NCCL_CALL(CommGetAsyncError, all[i]->real, &state) == ncclSuccess &&
                   state == ncclInProgress;
            vcomm_leave(all[i]);
        }
    free(all);
    return !busy;
}

void drain(struct task *task) {
    struct liveshift_page *page = task->gate->page;
    struct liveshift_stream *streams = liveshift_streams(page);
    vcomms_clear_fast_stream(); /* the next operation must mark its stream again */
    refuse_what_is_unsafe(task);
    int mode = cuda_relax_captures(CUDA_CAPTURES_RELAXED);
    uint32_t at = 0;
    bool all_enqueued = false;
    while (task->result == 0 && (!all_enqueued || at < atomic_load(&page->streams))) {
        if (!all_enqueued && enqueued())
            all_enqueued = true;
        else if (all_enqueued && idle(task, &streams[at]))
            at++;
        else if (task_obsolete(task))
            task_fail(task, ECANCELED, "another order came while the streams were drained");
        else if (task_timed_out(task) && !all_enqueued)
            task_fail(task, ETIMEDOUT, "an operation of a non-blocking communicator goes on");
        else if (task_timed_out(task))
            task_fail(task, ETIMEDOUT, "a stream with NCCL operations on device %d is not idle",
                      streams[at].device);
        else
            task_pause();
    }
    cuda_relax_captures(mode);
}
