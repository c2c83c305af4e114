/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes real communicators down beneath their handles. NCCL has no deadlines, so a separate thread
 * does that: it finalizes them in one group, then destroys them, children before parents. When the
 * time is up, a second thread aborts what is left (the last resort that NCCL offers; PyTorch does
 * the same). Then NCCL must have left nothing that a dump would take along.
 */

#include "cuda/device_calls.h"
#include "gate/thread.h"
#include "service/service.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One teardown. If NCCL never returns, it exists longer than its task: then it is leaked. */
struct teardown_run {
    struct vcomm **all;
    bool *failed; /* which of them can only be aborted */
    unsigned many;
    _Atomic bool cancelled;
    _Atomic uint32_t running; /* threads */
};

/* Claims the real communicator, which both threads may try to end. True: this thread must do it. */
static bool claim_real(struct vcomm *v) { return !atomic_exchange(&v->real_claimed, true); }

static bool has_ended(ncclResult_t result) {
    return result == ncclSuccess || result == ncclInProgress;
}

/* NCCL refuses to finalize or destroy a communicator that had an error. In a group it then does
   nothing for the others either. After such a destroy it believes that the thread is in a group. */
static bool has_failed(struct vcomm *v) {
    ncclResult_t state;
    return NCCL_CALL(CommGetAsyncError, v->real, &state) != ncclSuccess ||
           (state != ncclSuccess && state != ncclInProgress);
}

static void await_finalized(struct teardown_run *run, struct vcomm *v) {
    ncclResult_t state = ncclInProgress;
    while (!atomic_load(&run->cancelled) &&
           NCCL_CALL(CommGetAsyncError, v->real, &state) == ncclSuccess && state == ncclInProgress)
        task_pause();
}

static void teardown_thread(void *of) {
    struct teardown_run *run = of;
    for (unsigned i = 0; i < run->many; i++)
        run->failed[i] = has_failed(run->all[i]);
    NCCL_CALL(GroupStart);
    for (unsigned i = 0; i < run->many; i++)
        if (!run->failed[i] && !atomic_load(&run->all[i]->finalized)) {
            cuda_use_device(run->all[i]->device);
            NCCL_CALL(CommFinalize, run->all[i]->real);
        }
    NCCL_CALL(GroupEnd);
    for (unsigned i = 0; i < run->many; i++)
        await_finalized(run, run->all[i]);
    for (unsigned i = run->many; i-- > 0 && !atomic_load(&run->cancelled);)
        if (claim_real(run->all[i])) {
            cuda_use_device(run->all[i]->device);
            bool failed = run->failed[i] || has_failed(run->all[i]);
            ncclResult_t result = failed ? NCCL_CALL(CommAbort, run->all[i]->real)
                                         : NCCL_CALL(CommDestroy, run->all[i]->real);
            atomic_store(&run->all[i]->real_ended, has_ended(result));
        }
    atomic_fetch_sub(&run->running, 1);
}

static void abort_thread(void *of) {
    struct teardown_run *run = of;
    for (unsigned i = run->many; i-- > 0;)
        if (claim_real(run->all[i]))
            atomic_store(&run->all[i]->real_ended,
                         has_ended(NCCL_CALL(CommAbort, run->all[i]->real)));
    atomic_fetch_sub(&run->running, 1);
}

/* Waits until no thread is left, or until `deadline_ns`; false: one is left. */
static bool wait_for_threads(struct teardown_run *run, int64_t deadline_ns) {
    while (atomic_load(&run->running) > 0) {
        if (task_now_ns() > deadline_ns)
            return false;
        task_pause();
    }
    return true;
}

static int start_thread(struct teardown_run *run, const char *name, void (*body)(void *)) {
    atomic_fetch_add(&run->running, 1);
    int failure = thread_start(name, body, run);
    if (failure != 0)
        atomic_fetch_sub(&run->running, 1);
    return failure;
}

/* The agent should not order a teardown in these cases: there is no boundary while a communicator
   is being made, and drain has reported the others. This is for an agent that orders it anyway. */
static bool check_all(struct task *task) {
    unsigned many;
    struct vcomm **all = vcomms_snapshot(&many);
    for (unsigned i = 0; i < many; i++) {
        char name[80];
        uint32_t state = atomic_load(&all[i]->state);
        if (state == VCOMM_MAKING)
            task_fail(task, EBUSY, "%s is being made", task_name(all[i], name));
        else if (state == VCOMM_LIVE && all[i]->row == NULL)
            task_fail(task, EOPNOTSUPP, "%s has no identity that its members agree on",
                      task_name(all[i], name));
    }
    free(all);
    return task->result == 0;
}

/* Takes all LIVE communicators to DOWN, and puts them into run->all. Then it waits until no
   thread is inside them, or until the task has timed out. */
static void mark_down(struct task *task, struct teardown_run *run) {
    unsigned many;
    struct vcomm **all = vcomms_snapshot(&many);
    run->all = all;
    for (unsigned i = 0; i < many; i++) {
        struct vcomm *v = all[i];
        uint32_t live = VCOMM_LIVE;
        if (!atomic_compare_exchange_strong(&v->state, &live, VCOMM_DOWN))
            continue;
        if (!atomic_load(&v->finalized))
            atomic_store(&v->row->state, LIVESHIFT_COMM_DOWN);
        atomic_store(&v->real_claimed, false);
        atomic_store(&v->real_ended, false);
        run->all[run->many++] = v;
    }
    for (unsigned i = 0; i < run->many; i++)
        while (atomic_load(&run->all[i]->uses) > 0 && !task_timed_out(task))
            task_pause();
}

/* NCCL's threads that stay after their communicators by design, each with a remark for the agent or
   NULL. Only the first two keep peers or devices. The third is the root of a unique id, which
   listens until all members have come. If a rebuild was cancelled, it listens for ever. */
static const struct {
    const char *name, *remark;
} persistent_threads[] = {
    {"NCCL RAS", "NCCL's monitor outlives the communicators and keeps connections to other hosts; "
                 "start the job with NCCL_RAS_ENABLE=0"},
    {"NCCL IbAsync",
     "NCCL's InfiniBand plugin keeps its devices open as long as the process lives"},
    {"NCCL BootstrapR", NULL},
};

/* Finds a thread of NCCL's that should have ended, and its name. False: none. If a persistent
   thread has a remark, *remark gets it. */
static bool find_nccl_thread(char name[static 32], const char **remark) {
    DIR *tasks = opendir("/proc/self/task");
    bool found = false;
    for (struct dirent *entry; tasks != NULL && !found && (entry = readdir(tasks)) != NULL;) {
        char path[300], comm[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        int fd = entry->d_name[0] != '.' ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        ssize_t length = fd >= 0 ? read(fd, comm, sizeof comm - 1) : 0;
        if (fd >= 0)
            close(fd);
        if (length <= 0 || strncmp(comm, "NCCL", 4) != 0)
            continue;
        comm[strcspn(comm, "\n")] = '\0';
        size_t i = 0, known = sizeof persistent_threads / sizeof *persistent_threads;
        while (i < known && strcmp(comm, persistent_threads[i].name) != 0)
            i++;
        found = i == known;
        if (found)
            memcpy(name, comm, sizeof comm);
        else if (persistent_threads[i].remark != NULL)
            *remark = persistent_threads[i].remark;
    }
    if (tasks != NULL)
        closedir(tasks);
    return found;
}

static void check_no_thread_left(struct task *task) {
    char name[32];
    const char *remark = NULL;
    bool left;
    while ((left = find_nccl_thread(name, &remark)) && !task_timed_out(task))
        task_pause();
    if (left)
        task_fail(task, ETIMEDOUT, "NCCL's thread \"%s\" is left after all communicators ended",
                  name);
    else if (remark != NULL && task->message[0] == '\0')
        snprintf(task->message, sizeof task->message, "%s", remark);
}

void teardown(struct task *task) {
    if (!check_all(task))
        return;
    if (!gate_keep_closed(task->gate, task->order.attempt)) {
        task_fail(task, ECANCELED, "the gate was opened, because the agent sent no heartbeat");
        return;
    }
    struct teardown_run *run = calloc(1, sizeof *run);
    if (run == NULL) {
        task_fail(task, ENOMEM, "no memory");
        return;
    }
    mark_down(task, run);
    run->failed = calloc(run->many + 1, sizeof *run->failed);
    int failure = run->failed == NULL ? ENOMEM
                  : run->many > 0     ? start_thread(run, "liveshift down", teardown_thread)
                                      : 0;
    if (failure != 0)
        task_fail(task, failure, "cannot start a thread to tear communicators down: %s",
                  strerror(failure));
    bool all_returned = wait_for_threads(run, task->deadline_ns);
    unsigned aborted = 0;
    for (unsigned i = 0; i < run->many; i++)
        aborted += !atomic_load(&run->all[i]->real_ended);
    if (aborted > 0) {
        atomic_store(&run->cancelled, true);
        failure = start_thread(run, "liveshift abort", abort_thread);
        all_returned = failure == 0 && wait_for_threads(run, task->abort_deadline_ns);
        task->deadline_ns = task->abort_deadline_ns;
        snprintf(task->message, sizeof task->message,
                 "%u of %u communicators did not end by themselves and were aborted", aborted,
                 run->many);
    }
    for (unsigned i = 0; i < run->many; i++) {
        char name[80];
        if (!atomic_load(&run->all[i]->real_ended))
            task_fail(task, ETIMEDOUT, "%s could be neither destroyed nor aborted",
                      task_name(run->all[i], name));
        else
            run->all[i]->real = NULL;
    }
    if (task->result == 0)
        check_no_thread_left(task);
    if (run->many == 0) /* then there is nothing to rebuild either */
        atomic_store(&task->gate->page->answer.down, 0);
    if (all_returned) { /* otherwise a thread still reads them */
        free(run->all);
        free(run->failed);
        free(run);
    }
}
