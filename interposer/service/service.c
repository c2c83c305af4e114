/* SPDX-License-Identifier: Apache-2.0 */
#include "service.h"
#include "cuda/device_calls.h"
#include "gate/thread.h"
#include "nccl/nccl_calls.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Added to the agent's limit for an abort as the last step: the agent waits a little longer. */
#define LAST_RESORT_NS 1000000000

int64_t task_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

bool task_timed_out(const struct task *task) { return task_now_ns() > task->deadline_ns; }

bool task_obsolete(const struct task *task) {
    struct order now = gate_order(task->gate->page);
    return !same_order(&now, &task->order);
}

void task_pause(void) {
    static const struct timespec pause = {0, 1000000};
    nanosleep(&pause, NULL);
}

int task_fail(struct task *task, int result, const char *format, ...) {
    if (task->result == 0) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(task->message, sizeof task->message, format, arguments);
        va_end(arguments);
        task->result = result;
    }
    return task->result;
}

const char *task_name(const struct vcomm *v, char text[static 80]) {
    const char *name = config_name(v->config);
    snprintf(text, 80, "communicator %u (%.40s)", v->row != NULL ? v->row->ordinal : 0,
             name != NULL && *name != '\0' ? name : "without a name");
    return text;
}

struct vcomm **vcomms_snapshot(unsigned *many) {
    unsigned n = 0;
    pthread_mutex_lock(&vcomms_lock);
    for (struct vcomm *v = vcomms; v != NULL; v = v->next)
        n++;
    struct vcomm **all = calloc(n + 1, sizeof *all);
    *many = 0;
    for (struct vcomm *v = vcomms; v != NULL && all != NULL; v = v->next)
        all[(*many)++] = v;
    pthread_mutex_unlock(&vcomms_lock);
    return all;
}

static void answer(struct task *task) {
    struct liveshift_answer *a = &task->gate->page->answer;
    memcpy(a->message, task->message, sizeof a->message);
    atomic_store(&a->done_result, (uint32_t)task->result);
    atomic_store(&a->done_attempt, task->order.attempt);
    atomic_store(&a->done_version, task->order.version);
    atomic_store(&a->done_want, task->order.want);
}

static void execute(struct task *task) {
    struct liveshift_page *page = task->gate->page;
    struct liveshift_answer *a = &page->answer;
    uint32_t limit_ms = atomic_load(&page->order.limit_ms);
    int64_t began = task_now_ns(), limit = (int64_t)(limit_ms != 0 ? limit_ms : 60000) * 1000000;
    task->deadline_ns = began + limit * 4 / 5;
    task->abort_deadline_ns = began + limit + LAST_RESORT_NS;
    atomic_store(&a->done_want, 0);
    if (task->order.want == LIVESHIFT_CLOSED) {
        device_calls_find(); /* now no thread is stopped inside the dynamic linker */
        drain(task);
        atomic_store(&a->drained_ns, (uint64_t)(task_now_ns() - began));
    } else if (task->order.want == LIVESHIFT_TEARDOWN) {
        teardown(task);
        atomic_store(&a->torn_down_ns, (uint64_t)(task_now_ns() - began));
    } else if (task->order.want == LIVESHIFT_FRESH_IDS)
        fresh_ids(task);
    else if (task->order.want == LIVESHIFT_DEVICES)
        serve_devices(task);
    else {
        rebuild(task);
        atomic_store(&a->rebuilt_ns, (uint64_t)(task_now_ns() - began));
    }
    answer(task);
}

/* Allocates nothing: all other threads may be stopped, one of them while it holds the allocator's
   lock. */
static bool any_creation(void) {
    bool found = false;
    pthread_mutex_lock(&vcomms_lock);
    for (struct vcomm *v = vcomms; v != NULL && !found; v = v->next)
        found = atomic_load(&v->state) == VCOMM_MAKING;
    pthread_mutex_unlock(&vcomms_lock);
    return found;
}

/* Looks at non-blocking creations, since the application may never ask about them. Returns whether
   there are any. A boundary excludes creations, so vcomms_snapshot allocates only while no thread
   is stopped. */
static bool poll_creations(void) {
    if (!any_creation())
        return false;
    unsigned many, making = 0;
    struct vcomm **all = vcomms_snapshot(&many);
    for (unsigned i = 0; i < many; i++)
        if (atomic_load(&all[i]->state) == VCOMM_MAKING && vcomm_enter(all[i])) {
            making++;
            creation_poll(all[i]);
            vcomm_leave(all[i]);
        }
    free(all);
    return making > 0;
}

static _Atomic unsigned runs_in; /* generation + 1 of the process whose service thread runs */

static void serve(void *unused) {
    /* The agent wakes this thread. It also looks by itself, because a wake can get lost, for
       example during a migration. */
    static const struct timespec rarely = {1, 0}, often = {0, 20000000};
    (void)unused;
    struct gate *gate = current_gate();
    struct liveshift_page *page = gate->page;
    struct order done = {0};
    atomic_store(&runs_in, process_generation() + 1);
    for (;;) {
        uint32_t check = atomic_load(&page->order.check);
        struct order order = gate_order(page);
        if (order.want >= LIVESHIFT_CLOSED && !same_order(&order, &done)) {
            struct task task = {.gate = gate, .order = order};
            execute(&task);
            done = order;
            continue;
        }
        if (order.want < LIVESHIFT_CLOSED && done.want != LIVESHIFT_OPEN) {
            atomic_store(&page->answer.done_want, 0);
            done.want = LIVESHIFT_OPEN;
        }
        /* Behind a closed gate no communicator is being made, and a stopped thread may hold a
           lock that this would need. */
        bool busy = order.want != LIVESHIFT_OPEN;
        if (order.want < LIVESHIFT_CLOSED)
            busy |= poll_creations();
        syscall(SYS_futex, &page->order.check, FUTEX_WAIT, check, busy ? &often : &rarely, NULL, 0);
    }
}

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned started_in; /* generation + 1 of the process that has started it; 0: none has */

/* Waits until the new thread runs under its name. A move stops all threads but those whose name it
   knows, so it would stop one that has none yet. The wait is short: if this call comes from a
   library's constructor, the new thread may need a lock that this thread holds. */
static void await_start(void) {
    for (int i = 0; i < 100 && atomic_load(&runs_in) != process_generation() + 1; i++)
        task_pause();
}

void service_begin(void) {
    static bool warned;
    pthread_mutex_lock(&start_lock);
    if (started_in != process_generation() + 1) { /* threads don't survive a fork */
        int failure = thread_start("liveshift", serve, NULL);
        if (failure == 0) {
            started_in = process_generation() + 1;
            await_start();
        } else if (!warned) {
            warned = true;
            dprintf(STDERR_FILENO,
                    "liveshift: cannot start a thread: %s; this process's communicators and "
                    "device memory can't be moved\n",
                    strerror(failure));
        }
    }
    pthread_mutex_unlock(&start_lock);
}

void service_for_memory(void) {
    static _Atomic unsigned looked; /* generation + 1 */
    if (atomic_load_explicit(&looked, memory_order_relaxed) == process_generation() + 1)
        return;
    const char *directory = getenv("LIVESHIFT_PAGES");
    if (directory != NULL && *directory != '\0') {
        device_calls_find();
        service_begin();
    }
    atomic_store(&looked, process_generation() + 1);
}
