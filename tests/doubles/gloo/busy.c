/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that use the double of gloo as a program's, its workers' and gloo's own do, all at once,
 * until stdin ends; at every line a child is forked. Some threads make contexts one after the other
 * and use each for collectives and point-to-point operations; some share one context all the while;
 * one stands for gloo's, which completes what was posted. What is received from anybody is left to
 * the beginning, since its sender would be held up by the gate, and here is none; "begun" is
 * printed after it.
 */
#include "members.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAKERS 3
#define SHARERS 2
#define POSTED 64

static atomic_bool stop;
static atomic_int makers = MAKERS;
static struct context shared;

/* What was posted and isn't complete. */
static struct posted {
    struct buffer *buffer;
    int peer;
    bool sending;
} posted[POSTED];
static unsigned waiting;
static pthread_mutex_t posting = PTHREAD_MUTEX_INITIALIZER;

static unsigned below(unsigned *seed, unsigned n) { return (unsigned)rand_r(seed) % n; }

static void nested(void) {
    struct options options = {.context = &shared.base};
    barrier(&options);
}

static void collectives(struct context *context, unsigned n) {
    struct options options = {.context = &context->base};
    for (unsigned i = 0; i < n; i++) {
        options.inside = i % 4 == 3 ? nested : NULL;
        allreduce(&options);
    }
}

/* Not under the lock: the gate may hold it up. */
static void post(struct buffer *buffer, int peer, bool sending) {
    if (sending)
        buffer_send(buffer, peer, 0, 0, 0);
    else
        buffer_recv(buffer, peer, 0, 0, 0);
    pthread_mutex_lock(&posting);
    bool room = waiting < POSTED;
    if (room)
        posted[waiting++] = (struct posted){buffer, peer, sending};
    pthread_mutex_unlock(&posting);
    if (!room)
        sending ? buffer_sent(buffer, peer) : buffer_received(buffer, peer);
}

/* As gloo's thread; complete in any order. */
static void *complete(void *argument) {
    unsigned seed = 1;
    while (atomic_load(&makers) > 0) {
        pthread_mutex_lock(&posting);
        if (waiting > 0) {
            unsigned at = below(&seed, waiting);
            struct posted which = posted[at];
            posted[at] = posted[--waiting];
            if (which.sending)
                buffer_sent(which.buffer, which.peer);
            else
                buffer_received(which.buffer, which.peer);
        }
        pthread_mutex_unlock(&posting);
        sched_yield();
    }
    return argument;
}

/* gloo's own destructor waits until its thread is done with the buffer. */
static void end(struct buffer *buffer) {
    pthread_mutex_lock(&posting);
    for (unsigned at = 0; at < waiting;)
        if (posted[at].buffer == buffer)
            posted[at] = posted[--waiting];
        else
            at++;
    pthread_mutex_unlock(&posting);
    buffer_end(buffer);
}

static void from_anybody(struct context *context) {
    static const int peers[] = {0, 1, 2};
    struct buffer buffer = {.context = &context->transport};
    for (int peer = 0; peer < MEMBERS; peer++) {
        struct ranks any = {peers, peers + MEMBERS, peers + MEMBERS};
        buffer_recv_any(&buffer, &any, 0, 0, 0);
        if (peer != context->base.rank)
            buffer_received(&buffer, peer);
    }
    buffer_end(&buffer); /* with one in flight */
}

static void *make(void *argument) {
    long which = (long)argument;
    unsigned seed = (unsigned)which;
    struct context *context = malloc(sizeof *context);
    struct buffer buffer = {.context = &context->transport};
    struct text name = {"busy", 4};
    for (long life = 0; !atomic_load(&stop); life++) {
        int rank = (int)below(&seed, MEMBERS);
        connect_members(context, rank, which * 1000000 + life, below(&seed, 20) == 0);
        group_name(NULL, &name);
        for (unsigned n = below(&seed, 6); n > 0; n--) {
            collectives(context, below(&seed, 5));
            int peer = (rank + 1 + (int)below(&seed, MEMBERS - 1)) % MEMBERS;
            post(&buffer, peer, below(&seed, 2) == 0);
        }
        if (below(&seed, 2) == 0) { /* whichever comes first */
            end(&buffer);
            context_end(&context->base);
        } else {
            context_end(&context->base);
            end(&buffer);
        }
    }
    free(context);
    atomic_fetch_sub(&makers, 1);
    return NULL;
}

static void *share(void *argument) {
    while (atomic_load(&makers) > 0)
        collectives(&shared, 8);
    return argument;
}

/* Knows nothing of its parent's contexts, and can make its own. */
static void child(void) {
    static struct context own;
    collectives(&shared, 3);
    connect_members(&own, 1, getpid(), false);
    collectives(&own, 3);
    context_end(&own.base);
    _exit(0);
}

int main(void) {
    pthread_t threads[MAKERS + SHARERS + 1];
    connect_members(&shared, 0, 1, false);
    from_anybody(&shared);
    puts("begun");
    fflush(stdout);
    for (long i = 0; i < MAKERS; i++)
        pthread_create(&threads[i], NULL, make, (void *)(i + 1));
    for (long i = 0; i < SHARERS; i++)
        pthread_create(&threads[MAKERS + i], NULL, share, NULL);
    pthread_create(&threads[MAKERS + SHARERS], NULL, complete, NULL);
    while (getchar() != EOF) {
        pid_t pid = fork();
        int status = 1;
        if (pid == 0)
            child();
        if (waitpid(pid, &status, 0) != pid || status != 0)
            return 1;
    }
    atomic_store(&stop, true);
    for (int i = 0; i < MAKERS + SHARERS + 1; i++)
        pthread_join(threads[i], NULL);
    context_end(&shared.base);
    return 0;
}
