// SPDX-License-Identifier: Apache-2.0
//
// The one thread that reads CRIU's messages, and the kernel's messages about each process.

#include "fill.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/userfaultfd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MESSAGES = 16, EVENTS = 16 };

void fill_watch(struct fill *f, int fd, void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    if (epoll_ctl(f->epoll, EPOLL_CTL_ADD, fd, &event) != 0)
        fill_fail(f, "a descriptor of the fill cannot be watched: %s", strerror(errno));
}

struct process *fill_add_process(struct fill *f, uint32_t pid, int fd) {
    struct process *p = calloc(1, sizeof *p);
    if (p == NULL) {
        close(fd);
        fill_fail(f, "out of memory for process %" PRIu32, pid);
        return NULL;
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    p->fd = fd;
    p->pid = pid;
    pthread_rwlockattr_t kind;
    pthread_rwlockattr_init(&kind);
    pthread_rwlockattr_setkind_np(&kind, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&p->copy_lock, &kind);
    pthread_rwlockattr_destroy(&kind);
    p->next = f->processes;
    f->processes = p;
    f->report.processes++;
    fill_watch(f, fd, p);
    return p;
}

static int wake(const struct process *p, uint64_t address) {
    struct uffdio_range range = {.start = address, .len = PAGE};
    return ioctl(p->fd, UFFDIO_WAKE, &range);
}

// Serves a fault: gives the kernel the store's page, or zeros if no piece has this page.
static int serve_fault(struct fill *f, struct process *p, uint64_t address) {
    struct piece *piece = pieces_find(&p->pieces, address);
    int rc;
    if (piece != NULL) {
        uint32_t slot = piece->slot + (uint32_t)((address - piece->address) / PAGE);
        struct uffdio_copy c = {
            .dst = address, .src = (uintptr_t)store_content(f->store, slot), .len = PAGE};
        rc = ioctl(p->fd, UFFDIO_COPY, &c);
    } else {
        struct uffdio_zeropage z = {.range = {.start = address, .len = PAGE}};
        rc = ioctl(p->fd, UFFDIO_ZEROPAGE, &z);
    }
    if (rc == 0)
        return 0;
    if (errno == ESRCH) {
        p->exited = true;
        return 0;
    }
    if (errno != EEXIST && errno != EAGAIN && errno != ENOENT)
        return -1;
    return wake(p, address) == 0 || errno == ESRCH || errno == ENOENT ? 0 : -1;
}

// Handles one message. The caller holds the lock, and no thread copies into the process.
static int handle_event(struct fill *f, struct process *p, const struct uffd_msg *m) {
    if (m->event == UFFD_EVENT_PAGEFAULT)
        return serve_fault(f, p, m->arg.pagefault.address & ~(uint64_t)(PAGE - 1));
    if (m->event == UFFD_EVENT_FORK && fill_add_process(f, p->pid, (int)m->arg.fork.ufd) == NULL)
        return -1;
    if (p->pieces.to_do > 0)
        fill_fail(f,
                  "process %" PRIu32 " forked or changed its address space before it had all of "
                  "its memory",
                  p->pid);
    return 0;
}

static void handle_events(struct fill *f, struct process *p) {
    struct uffd_msg messages[MESSAGES];
    int rc = 0;
    pthread_rwlock_wrlock(&p->copy_lock);
    ssize_t n = read(p->fd, messages, sizeof messages);
    pthread_mutex_lock(&f->lock);
    if (n == 0 || (n > 0 && n % (ssize_t)sizeof *messages != 0)) { // this is no userfaultfd
        errno = EPROTO;
        rc = -1;
    }
    for (ssize_t i = 0; n > 0 && i < n / (ssize_t)sizeof *messages && rc == 0; i++)
        rc = handle_event(f, p, &messages[i]);
    if (rc != 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        fill_fail(f, "process %" PRIu32 ": its page faults cannot be served: %s", p->pid,
                  strerror(errno));
    pthread_cond_broadcast(&f->work);
    fill_update_phase(f);
    pthread_mutex_unlock(&f->lock);
    pthread_rwlock_unlock(&p->copy_lock);
}

static void drain_criu(struct fill *f) {
    while (fill_read_criu(f))
        continue;
    pthread_mutex_lock(&f->lock);
    if (f->all_registered && !f->drained) {
        f->drained = true;
        pthread_cond_broadcast(&f->work);
        fill_update_phase(f);
    }
    pthread_mutex_unlock(&f->lock);
}

static void close_descriptors(struct fill *f) {
    for (struct process *p = f->processes; p != NULL; p = p->next)
        if (p->fd >= 0) {
            close(p->fd);
            p->fd = -1;
        }
}

void *fill_event_thread(void *fill) {
    struct fill *f = fill;
    struct epoll_event ready[EVENTS];
    while (true) {
        pthread_mutex_lock(&f->lock);
        bool complete = f->finished && f->report.phase == FILL_FILLED;
        bool failed = f->report.phase == FILL_FAILED, stopping = f->stopping;
        bool draining = f->all_registered && !f->drained;
        pthread_mutex_unlock(&f->lock);
        if (complete) { // no thread copies now, since no pieces are left
            close_descriptors(f);
            pthread_mutex_lock(&f->lock);
            f->report.phase = FILL_FINISHED;
            pthread_cond_broadcast(&f->changed);
            pthread_mutex_unlock(&f->lock);
        }
        // After a failure the descriptors stay open, and no thread reads them, until the tree has
        // ended. If they were closed, missing pages would read as zeros.
        if (complete || failed || stopping)
            return NULL;
        if (draining) {
            drain_criu(f);
            continue;
        }
        int n = epoll_wait(f->epoll, ready, EVENTS, -1);
        for (int i = 0; i < n; i++) {
            void *what = ready[i].data.ptr;
            uint64_t word;
            if (what == &f->wake)
                (void)!read(f->wake, &word, sizeof word);
            else if (what == &f->listener || what == &f->connection)
                fill_read_criu(f);
            else
                handle_events(f, what);
        }
    }
}
