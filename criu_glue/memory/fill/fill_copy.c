// SPDX-License-Identifier: Apache-2.0

#include "fill.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/userfaultfd.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

enum { RETRY_NS = 1000000 }; // wait before a new try where memory was not registered

uint64_t fill_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

enum copy_result { COPIED, NOT_REGISTERED, INTERRUPTED, EXITED, NOT_MAPPED, FAILED };

struct job {
    struct process *process;
    uint32_t first, end; // indices of the pieces
    uint64_t address;    // of the page that could not be copied
    int error;
};

// Copies as much of the piece as possible. The piece then names the pages that are left.
static enum copy_result copy(struct fill *f, struct job *job, struct piece *p,
                             bool all_registered) {
    uint32_t most = PIECE_PAGES; // fewer where the pages lie in several VMAs
    while (p->pages > 0) {
        uint32_t pages = p->pages < most ? p->pages : most;
        struct uffdio_copy c = {
            .dst = p->address,
            .src = (uintptr_t)store_content(f->store, p->slot),
            .len = (uint64_t)pages * PAGE,
        };
        int rc = ioctl(job->process->fd, UFFDIO_COPY, &c);
        int error = rc == 0 ? 0 : errno;
        uint32_t done = rc == 0 ? pages : c.copy > 0 ? (uint32_t)(c.copy / PAGE) : 0;
        if (done == 0 && error == EEXIST)
            done = 1; // it came from CRIU's images, or for a fault
        if (done > 0 && f->store->free_after_copy)
            store_free(f->store, p->slot, done);
        p->address += (uint64_t)done * PAGE;
        p->slot += done;
        p->pages -= (uint16_t)done;
        if (done > 0)
            continue;
        job->address = p->address;
        job->error = error;
        if (error == EAGAIN)
            return INTERRUPTED;
        if (error == ESRCH)
            return EXITED;
        if (error == ENOENT && !all_registered)
            return NOT_REGISTERED;
        if (error != ENOENT)
            return FAILED;
        if (pages == 1)
            return NOT_MAPPED;
        most = pages / 2;
    }
    return COPIED;
}

// Takes pieces of one process that no other thread copies. The caller holds the lock.
static bool claim_pieces(struct process *p, struct job *job) {
    struct pieces *list = &p->pieces;
    while (list->cursor < list->used && list->piece[list->cursor].state != PIECE_TO_DO)
        list->cursor++;
    *job = (struct job){.process = p, .first = list->cursor, .end = list->cursor};
    for (uint32_t pages = 0; job->end < list->used && pages < PIECE_PAGES; job->end++) {
        struct piece *next = &list->piece[job->end];
        if (next->state != PIECE_TO_DO)
            break;
        pages += next->pages;
        next->state = PIECE_BUSY;
    }
    list->cursor = job->end;
    return job->end > job->first;
}

static void report_failure(struct fill *f, const struct job *job, enum copy_result copy_result) {
    uint32_t pid = job->process->pid;
    if (copy_result == NOT_MAPPED)
        fill_fail(f,
                  "process %" PRIu32 ": no memory was restored at %#" PRIx64 ", where its table "
                  "has a page",
                  pid, job->address);
    else if (copy_result == EXITED)
        fill_fail(f, "process %" PRIu32 " ended while its memory was filled", pid);
    else
        fill_fail(f, "process %" PRIu32 ": the page at %#" PRIx64 " cannot be filled: %s", pid,
                  job->address, strerror(job->error));
}

// Does one job. The caller holds the process's lock for reading, so its pieces stay as they are.
static void run_job(struct fill *f, struct job *job) {
    struct process *p = job->process;
    uint64_t before = 0, after = 0;
    enum copy_result copy_result = COPIED;
    uint32_t at = job->first;
    bool all_registered = f->drained;
    for (uint32_t i = job->first; i < job->end; i++)
        before += p->pieces.piece[i].pages;
    while (at < job->end &&
           (copy_result = copy(f, job, &p->pieces.piece[at], all_registered)) == COPIED)
        at++;
    for (uint32_t i = at; i < job->end; i++)
        after += p->pieces.piece[i].pages;
    pthread_mutex_lock(&f->lock);
    f->report.filled += before - after;
    for (uint32_t i = job->first; i < job->end; i++) {
        p->pieces.piece[i].state = i < at ? PIECE_DONE : PIECE_TO_DO;
        p->pieces.to_do -= i < at;
    }
    if (at < job->end) {
        if (at < p->pieces.cursor)
            p->pieces.cursor = at;
        pthread_cond_broadcast(&f->work);
    }
    if (copy_result == NOT_REGISTERED)
        p->not_before = fill_now() + RETRY_NS;
    else if (copy_result != COPIED && copy_result != INTERRUPTED)
        report_failure(f, job, copy_result);
    fill_update_phase(f);
    pthread_mutex_unlock(&f->lock);
}

// Returns a process with pieces to copy. NULL: there is none now; later is the time in ns when one
// has, or 0. The caller holds the lock.
static struct process *next_process(struct fill *f, uint64_t *later) {
    uint64_t now = fill_now();
    *later = 0;
    if (f->report.phase == FILL_FAILED)
        return NULL;
    for (struct process *p = f->processes; p != NULL; p = p->next) {
        struct pieces *list = &p->pieces;
        if (p->exited || list->to_do == 0 || list->cursor >= list->used)
            continue;
        if (p->not_before <= now || f->drained)
            return p;
        if (*later == 0 || p->not_before < *later)
            *later = p->not_before;
    }
    return NULL;
}

void *fill_copy_thread(void *fill) {
    struct fill *f = fill;
    pthread_mutex_lock(&f->lock);
    while (!f->stopping) {
        uint64_t later;
        struct process *p = next_process(f, &later);
        if (p == NULL && later == 0) {
            pthread_cond_wait(&f->work, &f->lock);
        } else if (p == NULL) {
            struct timespec t = {(time_t)(later / 1000000000), (long)(later % 1000000000)};
            pthread_cond_timedwait(&f->work, &f->lock, &t);
        } else {
            struct job job;
            pthread_mutex_unlock(&f->lock);
            pthread_rwlock_rdlock(&p->copy_lock);
            pthread_mutex_lock(&f->lock);
            bool claimed = !f->stopping && claim_pieces(p, &job);
            pthread_mutex_unlock(&f->lock);
            if (claimed)
                run_job(f, &job);
            pthread_rwlock_unlock(&p->copy_lock);
            pthread_mutex_lock(&f->lock);
        }
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}
