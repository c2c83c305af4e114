/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include "capture.h"
#include "context.h"
#include "gate.h"
#include "simcuda.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

struct item {
    struct work work;
    struct completion *done;
    /* What else must have come to its end before this runs. */
    struct completion **after;
    size_t after_count;
    struct item *next;
};

pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
/* Some completion was reached. */
static pthread_cond_t progress;
CUstream all_streams;
static unsigned long long last_id;
/* The per-thread default stream, one per thread and made at its first use. */
static _Thread_local CUstream per_thread;

void streams_initialise(void) { monotonic_condition(&progress); }

void completion_drop(struct completion *completion) {
    if (completion != NULL && --completion->refs == 0)
        free(completion);
}

void completion_wait(struct completion *completion) {
    while (!completion->done)
        pthread_cond_wait(&progress, &streams_lock);
}

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void run_item(struct item *item) {
    for (size_t i = 0; i < item->after_count; i++) {
        completion_wait(item->after[i]);
        completion_drop(item->after[i]);
    }
    pthread_mutex_unlock(&streams_lock);
    if (item->work.run != NULL)
        item->work.run(item->work.argument);
    if (item->work.release != NULL)
        item->work.release(item->work.argument);
    pthread_mutex_lock(&streams_lock);
    item->done->when = milliseconds();
    item->done->done = true;
    completion_drop(item->done);
    free(item->after);
    free(item);
    pthread_cond_broadcast(&progress);
}

/* Runs a stream's first item. */
static void run_first(CUstream stream) {
    struct item *item = stream->first;
    stream->first = item->next;
    stream->busy = true;
    run_item(item);
    stream->busy = false;
}

static void *worker(void *argument) {
    CUstream stream = argument;
    /* A name of the driver's threads: like a GPU it works on while the process's threads are held. */
    prctl(PR_SET_NAME, "cuda-EvtHandlr");
    pthread_mutex_lock(&streams_lock);
    for (;;) {
        while (stream->busy || (stream->first == NULL && !stream->destroyed))
            pthread_cond_wait(&stream->more, &streams_lock);
        if (stream->first == NULL)
            break;
        run_first(stream);
    }
    completion_drop(stream->newest);
    pthread_mutex_unlock(&streams_lock);
    pthread_cond_destroy(&stream->more);
    free(stream);
    return NULL;
}

static bool start_worker(CUstream stream) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    /* The program's signals are for its own threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int error = pthread_create(&thread, &attributes, worker, stream);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0;
}

CUstream stream_make(CUcontext context, unsigned int flags, int priority) {
    CUstream stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return NULL;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    monotonic_condition(&stream->more);
    if (!start_worker(stream)) {
        pthread_cond_destroy(&stream->more);
        free(stream);
        return NULL;
    }
    pthread_mutex_lock(&streams_lock);
    stream->id = ++last_id;
    stream->next = all_streams;
    all_streams = stream;
    pthread_mutex_unlock(&streams_lock);
    return stream;
}

bool stream_blocking(CUstream stream) {
    return stream != stream->context->legacy && !(stream->flags & CU_STREAM_NON_BLOCKING);
}

CUstream stream_capturing(CUcontext context) {
    for (CUstream s = all_streams; s != NULL; s = s->next)
        if (s->context == context && s->capture != NULL &&
            capture_mode(s->capture) != CU_STREAM_CAPTURE_MODE_RELAXED)
            return s;
    return NULL;
}

static CUresult find_per_thread(CUcontext context, CUstream *stream) {
    if (per_thread == NULL || per_thread->context != context) {
        pthread_mutex_unlock(&streams_lock);
        per_thread = stream_make(context, 0, 0);
        pthread_mutex_lock(&streams_lock);
    }
    *stream = per_thread;
    return per_thread ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult stream_find(CUstream handle, CUstream *stream) {
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        CUcontext context;
        CUresult result = context_current_or_first(&context);
        if (result != CUDA_SUCCESS)
            return result;
        if (handle == CU_STREAM_PER_THREAD)
            return find_per_thread(context, stream);
        *stream = context->legacy;
        return CUDA_SUCCESS;
    }
    for (CUstream s = all_streams; s != NULL; s = s->next)
        if (s == handle) {
            *stream = s;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_HANDLE;
}

static void wait_for(struct item *item, struct completion *completion) {
    if (completion == NULL || completion->done)
        return;
    item->after = realloc(item->after, (item->after_count + 1) * sizeof *item->after);
    item->after[item->after_count++] = completion;
    completion->refs++;
}

struct completion *stream_append(CUstream stream, struct work work, struct completion *after) {
    struct item *item = calloc(1, sizeof *item);
    item->work = work;
    item->done = calloc(1, sizeof *item->done);
    wait_for(item, after);
    /* The legacy default stream comes after what blocking streams were given before, and what they
       are given later comes after it. */
    if (stream_blocking(stream))
        wait_for(item, stream->context->legacy->newest);
    else if (stream == stream->context->legacy)
        for (CUstream s = all_streams; s != NULL; s = s->next)
            if (s->context == stream->context && stream_blocking(s))
                wait_for(item, s->newest);
    completion_drop(stream->newest);
    stream->newest = item->done;
    /* One each for the item, the stream and the caller. */
    item->done->refs = 3;
    if (stream->first == NULL)
        stream->first = item;
    else
        stream->last->next = item;
    stream->last = item;
    pthread_cond_signal(&stream->more);
    return item->done;
}

/* Work on the legacy default stream would have to wait for a blocking stream that only records. */
static CUresult refuse_implicit(CUstream stream) {
    if (stream != stream->context->legacy)
        return CUDA_SUCCESS;
    CUstream capturing = stream_capturing(stream->context);
    if (capturing == NULL || !stream_blocking(capturing))
        return CUDA_SUCCESS;
    capture_invalidate(capturing->capture);
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

CUresult stream_submit(CUstream handle, struct work work) {
    CUstream stream;
    pthread_mutex_lock(&streams_lock);
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream->capture != NULL) {
        result = capture_add(stream, work);
    } else if (result == CUDA_SUCCESS) {
        result = refuse_implicit(stream);
        if (result == CUDA_SUCCESS)
            completion_drop(stream_append(stream, work, NULL));
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

/* On an idle stream the caller does it itself: the real driver, too, copies while every other thread
   of the process is stopped. */
static void do_at_once(CUstream stream, struct completion *done) {
    struct item *item = stream->first;
    if (stream->busy || item == NULL || item->done != done || item->after_count > 0)
        return;
    run_first(stream);
    pthread_cond_signal(&stream->more); /* what came meanwhile, or the stream's end */
}

CUresult stream_do(CUstream handle, struct work work) {
    CUstream stream;
    pthread_mutex_lock(&streams_lock);
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream->capture != NULL) {
        capture_invalidate(stream->capture);
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    } else if (result == CUDA_SUCCESS) {
        result = refuse_implicit(stream);
    }
    if (result == CUDA_SUCCESS) {
        struct completion *done = stream_append(stream, work, NULL);
        do_at_once(stream, done);
        completion_wait(done);
        completion_drop(done);
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

bool streams_drain(CUcontext context, const struct timespec *deadline) {
    bool idle = false, late = false;
    pthread_mutex_lock(&streams_lock);
    while (!idle && !late) {
        idle = true;
        for (CUstream s = all_streams; s != NULL && idle; s = s->next)
            idle =
                (context != NULL && s->context != context) || s->newest == NULL || s->newest->done;
        if (!idle && deadline == NULL)
            pthread_cond_wait(&progress, &streams_lock);
        else if (!idle)
            late = pthread_cond_timedwait(&progress, &streams_lock, deadline) == ETIMEDOUT;
    }
    pthread_mutex_unlock(&streams_lock);
    return idle;
}

CUresult stream_context_synchronize(CUcontext context) {
    pthread_mutex_lock(&streams_lock);
    CUstream capturing = stream_capturing(context);
    if (capturing != NULL)
        capture_invalidate(capturing->capture);
    pthread_mutex_unlock(&streams_lock);
    if (capturing != NULL)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    streams_drain(context, NULL);
    return CUDA_SUCCESS;
}

/* ---- entry points ----------------------------------------------------------------------------- */

int simcuda_enqueue_owned(void *stream, void (*work)(void *), void *argument,
                          void (*release)(void *)) {
    API_CALL();
    return (int)stream_submit(stream,
                              (struct work){work, argument, release, CU_GRAPH_NODE_TYPE_KERNEL});
}

int simcuda_enqueue(void *stream, void (*work)(void *), void *argument) {
    return simcuda_enqueue_owned(stream, work, argument, NULL);
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    API_CALL();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (stream == NULL || (flags & ~(unsigned int)CU_STREAM_NON_BLOCKING) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *stream = stream_make(context, flags, priority);
    return *stream ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

/* Returns at once; the thread finishes what was submitted and goes. */
CUresult cuStreamDestroy_v2(CUstream handle) {
    API_CALL();
    CUstream stream;
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&streams_lock);
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS) {
        capture_abandon(stream);
        for (CUstream *s = &all_streams; *s != NULL; s = &(*s)->next)
            if (*s == stream) {
                *s = stream->next;
                break;
            }
        stream->destroyed = true;
        pthread_cond_signal(&stream->more);
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

CUresult cuStreamQuery(CUstream handle) {
    API_CALL();
    CUstream stream;
    pthread_mutex_lock(&streams_lock);
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream->capture != NULL) {
        capture_invalidate(stream->capture);
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    } else if (result == CUDA_SUCCESS) {
        bool idle = stream->newest == NULL || stream->newest->done;
        if (stream == stream->context->legacy)
            for (CUstream s = all_streams; s != NULL; s = s->next)
                if (s->context == stream->context && stream_blocking(s))
                    idle = idle && (s->newest == NULL || s->newest->done);
        result = idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
    API_CALL();
    return stream_do(stream, (struct work){0});
}

#define LOOK_AT(handle, pointer, value)                                                            \
    API_LOOK();                                                                                    \
    CUstream stream;                                                                               \
    if ((pointer) == NULL)                                                                         \
        return CUDA_ERROR_INVALID_VALUE;                                                           \
    pthread_mutex_lock(&streams_lock);                                                             \
    CUresult result = stream_find(handle, &stream);                                                \
    if (result == CUDA_SUCCESS)                                                                    \
        *(pointer) = (value);                                                                      \
    pthread_mutex_unlock(&streams_lock);                                                           \
    return result

CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags) {
    LOOK_AT(handle, flags, stream->flags);
}
CUresult cuStreamGetPriority(CUstream handle, int *priority) {
    LOOK_AT(handle, priority, stream->priority);
}
CUresult cuStreamGetId(CUstream handle, unsigned long long *id) { LOOK_AT(handle, id, stream->id); }
CUresult cuStreamGetCtx(CUstream handle, CUcontext *context) {
    LOOK_AT(handle, context, stream->context);
}
