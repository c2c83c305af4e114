/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: each a FIFO of work and a thread that does it. */
#ifndef SIMCUDA_STREAM_H
#define SIMCUDA_STREAM_H

#include "cuda_abi.h"

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

/* Something to be done on a stream, once or at each launch of a graph. */
struct work {
    /* NULL: nothing to do, only a place in the order. */
    void (*run)(void *argument);
    void *argument;
    /* Called once when run will not be called (again); may be NULL. */
    void (*release)(void *argument);
    CUgraphNodeType type;
};

/* One end of an item of work, which others wait for. Guarded by streams_lock. */
struct completion {
    unsigned int refs;
    bool done;
    /* CLOCK_MONOTONIC, ms; valid once done. */
    double when;
};

struct capture;

struct CUstream_st {
    CUcontext context;
    unsigned int flags;
    int priority;
    unsigned long long id;
    struct item *first, *last;
    /* An item is being run. */
    bool busy;
    /* Of the item that was submitted last; NULL before the first. */
    struct completion *newest;
    pthread_cond_t more;
    bool destroyed;
    /* Not NULL while the stream captures; see capture.h. */
    struct capture *capture;
    /* Nodes that the next captured one comes after. */
    CUgraphNode *tail;
    size_t tail_count;
    struct CUstream_st *next;
};

/* Guards streams, completions, events and captures. Never held while work runs. */
extern pthread_mutex_t streams_lock;
extern CUstream all_streams;

void streams_initialise(void);
/* Makes a stream and its thread; NULL: no thread could be had. */
CUstream stream_make(CUcontext context, unsigned int flags, int priority);

/* Submits work, or adds it to the graph that the stream captures; it owns the argument from then on,
   unless it fails. */
CUresult stream_submit(CUstream stream, struct work work);
/* The same, and waits for the end of it. Refused while the stream captures. */
CUresult stream_do(CUstream stream, struct work work);
/* Waits for all work of a context; refused while one of its streams captures. */
CUresult stream_context_synchronize(CUcontext context);

/* Waits until all streams of a context (NULL: of all) are idle. false: not at the deadline. */
bool streams_drain(CUcontext context, const struct timespec *deadline);

/* With streams_lock held ------------------------------------------------------------------------ */

/* The stream that a handle names: NULL, the two special handles, or one that was created. */
CUresult stream_find(CUstream handle, CUstream *stream);
/* Adds work and says how it ends: the completion is the caller's to drop. */
struct completion *stream_append(CUstream stream, struct work work, struct completion *after);
void completion_drop(struct completion *completion);
void completion_wait(struct completion *completion);
bool stream_blocking(CUstream stream);
/* One of the context's streams that captures, besides those in relaxed mode; NULL if none. */
CUstream stream_capturing(CUcontext context);

#endif
