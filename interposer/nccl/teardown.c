/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes real communicators down beneath their handles. NCCL has no deadlines, so a separate thread
 * does that: it finalizes them in one group, then destroys them, children before parents. When the
 * time is up, a second thread aborts what is left (the last resort that NCCL offers; PyTorch does
 * the same). Then NCCL must have left nothing that a dump would take along.
 */

#include "cuda/cuda_calls.h"
#include "gate/thread.h"
#include "service/service.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One teardown. It outlives its task if NCCL never comes back: then it is leaked. */
struct felling {
    struct vcomm **all;
    bool *failed; /* which of them can only be aborted */
    unsigned many;
    _Atomic bool give_up;
    _Atomic uint32_t running; /* threads */
};

/* Claims the real communicator, which both threads may try to end. True: this thread must do it. */
static bool mine(struct vcomm *v) { return !atomic_exchange(&v->real_claimed, true); }

static bool ended(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

/* NCCL refuses to finalize or destroy a communicator that had an error. In a group it then does
   nothing for the others either. After such a destroy it believes that the thread is in a group. */
static bool has_failed(struct vcomm *v) {
    ncclResult_t state;
    return NCCL_CALL(CommGetAsyncError, v->real, &state) != ncclSuccess ||
           (state != ncclSuccess && state != ncclInProgress);
}

static void await_finalized(struct felling *f, struct vcomm *v) {
    ncclResult_t state = ncclInProgress;
    while (!atomic_load(&f->give_up) &&
           NCCL_CALL(CommGetAsyncError, v->real, &state) == ncclSuccess && state == ncclInProgress)
        task_pause();
}

static void fell(void *of) {
    struct felling *f = of;
    for (unsigned i = 0; i < f->many; i++)
        f->failed[i] = has_failed(f->all[i]);
    NCCL_CALL(GroupStart);
    for (unsigned i = 0; i < f->many; i++)
        if (!f->failed[i] && !atomic_load(&f->all[i]->finalized)) {
            cuda_use_device(f->all[i]->device);
            NCCL_CALL(CommFinalize, f->all[i]->real);
        }
    NCCL_CALL(GroupEnd);
    for (unsigned i = 0; i < f->many; i++)
        await_finalized(f, f->all[i]);
    for (unsigned i = f->many; i-- > 0 && !atomic_load(&f->give_up);)
        if (mine(f->all[i])) {
            cuda_use_device(f->all[i]->device);
            bool failed = f->failed[i] || has_failed(f->all[i]);
            ncclResult_t result = failed ? NCCL_CALL(CommAbort, f->all[i]->real)
                                         : NCCL_CALL(CommDestroy, f->all[i]->real);
            atomic_store(&f->all[i]->real_gone, ended(result));
        }
    atomic_fetch_sub(&f->running, 1);
}

static void abort_rest(void *of) {
    struct felling *f = of;
    for (unsigned i = f->many; i-- > 0;)
        if (mine(f->all[i]))
            atomic_store(&f->all[i]->real_gone, ended(NCCL_CALL(CommAbort, f->all[i]->real)));
    atomic_fetch_sub(&f->running, 1);
}

/* Waits until no thread is left, or until `deadline_ns`; false: one is left. */
static bool over(struct felling *f, int64_t deadline_ns) {
    while (atomic_load(&f->running) > 0) {
        if (task_now_ns() > deadline_ns)
            return false;
        task_pause();
    }
    return true;
}

static int start(struct felling *f, void (*body)(void *)) {
    atomic_fetch_add(&f->running, 1);
    int failure = thread_start("liveshift fell", body, f);
    if (failure != 0)
        atomic_fetch_sub(&f->running, 1);
    return failure;
}

/* The agent should not order a teardown in these cases: there is no boundary while a communicator
   is being made, and drain has reported the others. This is for an agent that orders it anyway. */
static bool all_can(struct task *task) {
    unsigned many;
    struct vcomm **all = vcomms_now(&many);
    for (unsigned i = 0; i < many; i++) {
        char name[80];
        uint32_t state = atomic_load(&all[i]->state);
        if (state == VCOMM_MAKING)
            task_fails(task, EBUSY, "%s is being made", task_name(all[i], name));
        else if (state == VCOMM_LIVE && all[i]->row == NULL)
            task_fails(task, EOPNOTSUPP, "%s has no identity that its members agree on",
                       task_name(all[i], name));
    }
    free(all);
    return task->result == 0;
}

/* Takes all LIVE communicators to DOWN, and puts them into f->all. Then waits until no thread is
   inside them, or until the task is late. */
static void take_down(struct task *task, struct felling *f) {
    unsigned many;
    struct vcomm **all = vcomms_now(&many);
    f->all = all;
    for (unsigned i = 0; i < many; i++) {
        struct vcomm *v = all[i];
        uint32_t live = VCOMM_LIVE;
        if (!atomic_compare_exchange_strong(&v->state, &live, VCOMM_DOWN))
            continue;
        if (!atomic_load(&v->finalized))
            atomic_store(&v->row->state, LIVESHIFT_COMM_DOWN);
        atomic_store(&v->real_claimed, false);
        atomic_store(&v->real_gone, false);
        f->all[f->many++] = v;
    }
    for (unsigned i = 0; i < f->many; i++)
        while (atomic_load(&f->all[i]->uses) > 0 && !task_late(task))
            task_pause();
}

/* NCCL's threads that outlive communicators by design, each with a remark for the agent or NULL.
   Only the first two keep peers or devices. The third is the root of a unique id, which listens
   until all members have come. If a rebuild was given up, it listens for ever. */
static const struct {
    const char *name, *remark;
} lasting[] = {
    {"NCCL RAS", "NCCL's monitor outlives the communicators and keeps connections to other hosts; "
                 "start the job with NCCL_RAS_ENABLE=0"},
    {"NCCL IbAsync",
     "NCCL's InfiniBand plugin keeps its devices open as long as the process lives"},
    {"NCCL BootstrapR", NULL},
};

/* Finds a thread of NCCL's that should be gone, and its name. False: none. If a lasting thread has
   a remark, it goes to *remark. */
static bool thread_left(char name[static 32], const char **remark) {
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
        size_t i = 0, known = sizeof lasting / sizeof *lasting;
        while (i < known && strcmp(comm, lasting[i].name) != 0)
            i++;
        found = i == known;
        if (found)
            memcpy(name, comm, sizeof comm);
        else if (lasting[i].remark != NULL)
            *remark = lasting[i].remark;
    }
    if (tasks != NULL)
        closedir(tasks);
    return found;
}

static void nothing_left(struct task *task) {
    char name[32];
    const char *remark = NULL;
    bool left;
    while ((left = thread_left(name, &remark)) && !task_late(task))
        task_pause();
    if (left)
        task_fails(task, ETIMEDOUT, "NCCL's thread \"%s\" is left after all communicators ended",
                   name);
    else if (remark != NULL && task->trouble[0] == '\0')
        snprintf(task->trouble, sizeof task->trouble, "%s", remark);
}

void teardown(struct task *task) {
    if (!all_can(task))
        return;
    if (!gate_keep_closed(task->gate, task->attempt)) {
        task_fails(task, ECANCELED, "the gate was opened, because the agent had fallen silent");
        return;
    }
    struct felling *f = calloc(1, sizeof *f);
    if (f == NULL) {
        task_fails(task, ENOMEM, "no memory");
        return;
    }
    take_down(task, f);
    f->failed = calloc(f->many + 1, sizeof *f->failed);
    int failure = f->failed == NULL ? ENOMEM : f->many > 0 ? start(f, fell) : 0;
    if (failure != 0)
        task_fails(task, failure, "cannot start a thread to tear communicators down: %s",
                   strerror(failure));
    bool clean = over(f, task->deadline_ns);
    unsigned aborted = 0;
    for (unsigned i = 0; i < f->many; i++)
        aborted += !atomic_load(&f->all[i]->real_gone);
    if (aborted > 0) {
        atomic_store(&f->give_up, true);
        failure = start(f, abort_rest);
        clean = failure == 0 && over(f, task->last_ns);
        task->deadline_ns = task->last_ns;
        snprintf(task->trouble, sizeof task->trouble,
                 "%u of %u communicators did not end by themselves and were aborted", aborted,
                 f->many);
    }
    for (unsigned i = 0; i < f->many; i++) {
        char name[80];
        if (!atomic_load(&f->all[i]->real_gone))
            task_fails(task, ETIMEDOUT, "%s could be neither destroyed nor aborted",
                       task_name(f->all[i], name));
        else
            f->all[i]->real = NULL;
    }
    if (task->result == 0)
        nothing_left(task);
    if (f->many == 0) /* then there is nothing to rebuild either */
        atomic_store(&task->gate->page->answer.down, 0);
    if (clean) { /* otherwise a thread still reads them */
        free(f->all);
        free(f->failed);
        free(f);
    }
}
