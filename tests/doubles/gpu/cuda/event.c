/* SPDX-License-Identifier: Apache-2.0 */
/* Events: places in the work of a stream. */
#include "capture.h"
#include "context.h"
#include "gate.h"
#include "stream.h"

#include <stdlib.h>

struct CUevent_st {
    unsigned int flags;
    /* Where it was recorded last; NULL if never. */
    struct completion *recorded;
    /* Or the place in a capture. */
    struct captured_place place;
    CUevent next;
};

static CUevent events;

static CUresult find(CUevent handle) {
    for (CUevent e = events; e != NULL; e = e->next)
        if (e == handle)
            return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    API_CALL();
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (event == NULL || flags > 7 ||
        ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    pthread_mutex_lock(&streams_lock);
    (*event)->next = events;
    events = *event;
    pthread_mutex_unlock(&streams_lock);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    API_CALL();
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&streams_lock);
    for (CUevent *e = &events; *e != NULL; e = &(*e)->next)
        if (*e == event) {
            *e = event->next;
            completion_drop(event->recorded);
            captured_place_clear(&event->place);
            free(event);
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

static CUresult record(CUevent event, CUstream stream) {
    if (stream->capture != NULL)
        return capture_mark(stream, &event->place);
    if (stream == stream->context->legacy && stream_capturing(stream->context) != NULL)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    captured_place_clear(&event->place);
    completion_drop(event->recorded);
    event->recorded = stream_append(stream, (struct work){0}, NULL);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
    API_CALL();
    CUstream stream;
    pthread_mutex_lock(&streams_lock);
    CUresult result = find(event);
    if (result == CUDA_SUCCESS)
        result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS)
        result = record(event, stream);
    pthread_mutex_unlock(&streams_lock);
    return result;
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE : cuEventRecord(event, stream);
}

CUresult cuEventQuery(CUevent event) {
    API_CALL();
    pthread_mutex_lock(&streams_lock);
    CUresult result = find(event);
    if (result == CUDA_SUCCESS && captured_place_current(&event->place))
        result = CUDA_ERROR_CAPTURED_EVENT;
    else if (result == CUDA_SUCCESS && event->recorded != NULL && !event->recorded->done)
        result = CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&streams_lock);
    return result;
}

CUresult cuEventSynchronize(CUevent event) {
    API_CALL();
    pthread_mutex_lock(&streams_lock);
    CUresult result = find(event);
    if (result == CUDA_SUCCESS && captured_place_current(&event->place)) {
        result = CUDA_ERROR_CAPTURED_EVENT;
    } else if (result == CUDA_SUCCESS && event->recorded != NULL) {
        /* The event may be recorded anew or destroyed meanwhile. */
        struct completion *recorded = event->recorded;
        recorded->refs++;
        completion_wait(recorded);
        completion_drop(recorded);
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    API_CALL();
    if (milliseconds == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&streams_lock);
    CUresult result = find(start);
    if (result == CUDA_SUCCESS)
        result = find(end);
    if (result == CUDA_SUCCESS && (start->recorded == NULL || end->recorded == NULL ||
                                   ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)))
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (result == CUDA_SUCCESS && !(start->recorded->done && end->recorded->done))
        result = CUDA_ERROR_NOT_READY;
    if (result == CUDA_SUCCESS)
        *milliseconds = (float)(end->recorded->when - start->recorded->when);
    pthread_mutex_unlock(&streams_lock);
    return result;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags) {
    API_CALL();
    CUstream stream;
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&streams_lock);
    CUresult result = find(event);
    if (result == CUDA_SUCCESS)
        result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && captured_place_current(&event->place)) {
        result = capture_join(stream, &event->place);
    } else if (result == CUDA_SUCCESS && stream->capture != NULL) {
        /* Work outside the capture can't be a dependency of a node. */
        capture_invalidate(stream->capture);
        result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    } else if (result == CUDA_SUCCESS && event->recorded != NULL) {
        completion_drop(stream_append(stream, (struct work){0}, event->recorded));
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}
