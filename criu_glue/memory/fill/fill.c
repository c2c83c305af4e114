// SPDX-License-Identifier: Apache-2.0

#include "fill.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

void fill_fail(struct fill *f, const char *format, ...) {
    if (f->report.phase >= FILL_FINISHED)
        return; // the report keeps the first reason
    va_list list;
    va_start(list, format);
    vsnprintf(f->report.why, WHY, format, list);
    va_end(list);
    f->report.phase = FILL_FAILED;
    pthread_cond_broadcast(&f->changed);
    (void)!write(f->wake, &(uint64_t){1}, sizeof(uint64_t));
}

static const struct image *unrestored_image(const struct fill *f) {
    for (uint32_t i = 0; i < f->store->images; i++) {
        const struct process *p = f->processes;
        while (p != NULL && p->pid != f->store->image[i].pid)
            p = p->next;
        if (p == NULL && f->store->image[i].data > 0)
            return &f->store->image[i];
    }
    return NULL;
}

void fill_update_phase(struct fill *f) {
    if (!f->drained || f->report.phase >= FILL_FILLED)
        return;
    const struct image *image = unrestored_image(f);
    if (f->report.phase == FILL_WAITING) {
        fill_fail(f, "CRIU did not connect to the fill to ask for memory");
        return;
    }
    if (image != NULL) {
        fill_fail(f, "CRIU did not restore process %" PRIu32 ", whose table has %" PRIu64 " pages",
                  image->pid, image->pages);
        return;
    }
    for (const struct process *p = f->processes; p != NULL; p = p->next)
        if (p->pieces.to_do > 0 && !p->exited)
            return;
    f->report.phase = FILL_FILLED;
    pthread_cond_broadcast(&f->changed);
    (void)!write(f->wake, &(uint64_t){1}, sizeof(uint64_t));
}

// Returns 0 or an error number. pthread_create() returns that and leaves errno alone.
static int start_threads(struct fill *f, uint32_t threads) {
    f->thread = calloc(threads + 1, sizeof *f->thread);
    if (f->thread == NULL)
        return ENOMEM;
    int error = pthread_create(&f->events, NULL, fill_event_thread, f);
    while (error == 0 && f->threads_used < threads) {
        error = pthread_create(&f->thread[f->threads_used], NULL, fill_copy_thread, f);
        if (error == 0)
            f->threads_used++;
    }
    return f->threads_used > 0 ? 0 : error;
}

struct fill *fill_start(struct store *s, int listener, uint32_t threads, const struct plan *plan,
                        char *why) {
    struct fill *f = calloc(1, sizeof *f);
    if (f == NULL) {
        snprintf(why, WHY, "%s", strerror(errno));
        close(listener);
        return NULL;
    }
    f->store = s;
    f->plan = plan;
    f->listener = listener;
    f->connection = -1;
    f->epoll = epoll_create1(EPOLL_CLOEXEC);
    f->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&f->lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&f->changed, &clock);
    pthread_cond_init(&f->work, &clock);
    pthread_condattr_destroy(&clock);
    for (uint32_t i = 0; i < s->images; i++)
        f->report.total += s->image[i].data;
    fill_watch(f, f->wake, &f->wake);
    fill_watch(f, listener, &f->listener);
    sigset_t all, before; // the fill's threads must not take the agent's signals
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool watched = f->report.phase != FILL_FAILED;
    int error = watched ? start_threads(f, threads) : 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!watched || error != 0) {
        if (watched)
            snprintf(why, WHY, "the threads that fill memory cannot be started: %s",
                     strerror(error));
        else
            snprintf(why, WHY, "%s", f->report.why);
        fill_stop(f);
        return NULL;
    }
    return f;
}

void fill_all_registered(struct fill *f) {
    pthread_mutex_lock(&f->lock);
    f->all_registered = true;
    pthread_mutex_unlock(&f->lock);
    (void)!write(f->wake, &(uint64_t){1}, sizeof(uint64_t));
}

void fill_wait(struct fill *f, uint32_t phase, uint32_t ms, struct fill_report *report) {
    uint64_t until = fill_now() + ms * UINT64_C(1000000);
    struct timespec t = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
    pthread_mutex_lock(&f->lock);
    while (f->report.phase < phase && pthread_cond_timedwait(&f->changed, &f->lock, &t) == 0)
        continue;
    *report = f->report;
    pthread_mutex_unlock(&f->lock);
}

void fill_stop(struct fill *f) {
    pthread_mutex_lock(&f->lock);
    f->stopping = true;
    pthread_cond_broadcast(&f->work);
    pthread_mutex_unlock(&f->lock);
    (void)!write(f->wake, &(uint64_t){1}, sizeof(uint64_t));
    if (f->events)
        pthread_join(f->events, NULL);
    for (uint32_t i = 0; i < f->threads_used; i++)
        pthread_join(f->thread[i], NULL);
    while (f->processes != NULL) {
        struct process *p = f->processes;
        f->processes = p->next;
        if (p->fd >= 0)
            close(p->fd);
        pthread_rwlock_destroy(&p->copy_lock);
        free(p->pieces.piece);
        free(p);
    }
    for (int *fd = (int[]){f->connection, f->listener, f->wake, f->epoll, -2}; *fd != -2; fd++)
        if (*fd >= 0)
            close(*fd);
    pthread_cond_destroy(&f->changed);
    pthread_cond_destroy(&f->work);
    pthread_mutex_destroy(&f->lock);
    free(f->thread);
    free(f);
}
