/* SPDX-License-Identifier: Apache-2.0 */
#include "capture.h"

#include "context.h"
#include "gate.h"
#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct capture {
    unsigned long long id;
    CUstreamCaptureMode mode;
    /* The stream with which it began and must end; NULL once it has ended. */
    CUstream origin;
    pthread_t thread;
    bool invalid;
    CUgraph graph;
    /* The streams in it and the events that mark places in it. */
    unsigned int refs;
};

static unsigned long long last_id;
/* What cuThreadExchangeStreamCaptureMode sets; kept but not acted on. */
static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUstreamCaptureMode capture_mode(const struct capture *capture) { return capture->mode; }
void capture_invalidate(struct capture *capture) { capture->invalid = true; }

static void drop(struct capture *capture) {
    if (capture == NULL || --capture->refs > 0)
        return;
    if (capture->graph != NULL)
        graph_drop(capture->graph);
    free(capture);
}

static void set_tail(CUstream stream, CUgraphNode *nodes, size_t count) {
    free(stream->tail);
    stream->tail = nodes;
    stream->tail_count = count;
}

static void leave(CUstream stream) {
    set_tail(stream, NULL, 0);
    drop(stream->capture);
    stream->capture = NULL;
}

static CUgraphNode *copied(const CUgraphNode *from, size_t count) {
    CUgraphNode *nodes = malloc((count + 1) * sizeof *nodes);
    if (count > 0)
        memcpy(nodes, from, count * sizeof *nodes);
    return nodes;
}

CUresult capture_add(CUstream stream, struct work work) {
    struct capture *capture = stream->capture;
    if (capture->invalid || capture->graph == NULL)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    for (size_t i = 0; i < stream->tail_count; i++)
        stream->tail[i]->followed = true;
    CUgraphNode *node = malloc(sizeof *node);
    *node = graph_add(capture->graph, work);
    set_tail(stream, node, 1);
    return CUDA_SUCCESS;
}

void capture_abandon(CUstream stream) {
    if (stream->capture == NULL)
        return;
    stream->capture->invalid = true;
    if (stream->capture->origin == stream)
        stream->capture->origin = NULL;
    leave(stream);
}

CUresult capture_mark(CUstream stream, struct captured_place *place) {
    if (stream->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    captured_place_clear(place);
    stream->capture->refs++;
    place->capture = stream->capture;
    place->nodes = copied(stream->tail, stream->tail_count);
    place->count = stream->tail_count;
    return CUDA_SUCCESS;
}

bool captured_place_current(const struct captured_place *place) {
    return place->capture != NULL && place->capture->origin != NULL;
}

void captured_place_clear(struct captured_place *place) {
    drop(place->capture);
    free(place->nodes);
    *place = (struct captured_place){0};
}

CUresult capture_join(CUstream stream, const struct captured_place *place) {
    if (place->capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture == NULL) {
        if (stream == stream->context->legacy)
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        place->capture->refs++;
        stream->capture = place->capture;
    } else if (stream->capture != place->capture) {
        stream->capture->invalid = place->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    CUgraphNode *nodes = malloc((stream->tail_count + place->count + 1) * sizeof *nodes);
    size_t count = 0;
    for (size_t i = 0; i < stream->tail_count; i++)
        nodes[count++] = stream->tail[i];
    for (size_t i = 0; i < place->count; i++)
        nodes[count++] = place->nodes[i];
    set_tail(stream, nodes, count);
    return CUDA_SUCCESS;
}

/* ---- entry points ----------------------------------------------------------------------------- */

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
    API_CALL();
    CUstream stream;
    if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&streams_lock);
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream == stream->context->legacy)
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (result == CUDA_SUCCESS && stream->capture != NULL)
        result = CUDA_ERROR_ILLEGAL_STATE;
    if (result == CUDA_SUCCESS) {
        stream->capture = calloc(1, sizeof *stream->capture);
        *stream->capture =
            (struct capture){++last_id, mode, stream, pthread_self(), false, graph_make(), 1};
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

/* Whether all that was captured leads to the end of the stream with which it began. */
static bool joined(const struct capture *capture, CUstream origin) {
    const struct parts *parts = &capture->graph->parts;
    for (size_t i = 0; i < parts->node_count; i++) {
        bool leads = parts->nodes[i]->followed;
        for (size_t t = 0; t < origin->tail_count && !leads; t++)
            leads = origin->tail[t] == parts->nodes[i];
        if (!leads)
            return false;
    }
    return true;
}

static void all_leave(struct capture *capture) {
    for (CUstream s = all_streams; s != NULL; s = s->next)
        if (s->capture == capture)
            leave(s);
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
    API_CALL();
    CUstream stream;
    if (graph == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    CUgraph abandoned = NULL;
    pthread_mutex_lock(&streams_lock);
    CUresult result = stream_find(handle, &stream);
    struct capture *capture = result == CUDA_SUCCESS ? stream->capture : NULL;
    if (result == CUDA_SUCCESS && capture == NULL) {
        result = CUDA_ERROR_ILLEGAL_STATE;
    } else if (result == CUDA_SUCCESS && capture->origin != stream) {
        capture->invalid = true;
        result = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    } else if (result == CUDA_SUCCESS && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
               !pthread_equal(capture->thread, pthread_self())) {
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    } else if (result == CUDA_SUCCESS) {
        if (capture->invalid)
            result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        else if (!joined(capture, stream))
            result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        if (result == CUDA_SUCCESS)
            *graph = capture->graph;
        else
            abandoned = capture->graph;
        capture->graph = NULL;
        capture->origin = NULL;
        capture->refs++;
        all_leave(capture);
        drop(capture);
    }
    pthread_mutex_unlock(&streams_lock);
    if (abandoned != NULL)
        graph_drop(abandoned);
    return result;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    return cuStreamGetCaptureInfo_v2(handle, status, NULL, NULL, NULL, NULL);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *graph, const CUgraphNode **dependencies,
                                   size_t *count) {
    API_CALL();
    CUstream stream;
    if (status == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&streams_lock);
    CUresult result = stream_find(handle, &stream);
    if (result == CUDA_SUCCESS && stream == stream->context->legacy &&
        stream_capturing(stream->context) != NULL) {
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    } else if (result == CUDA_SUCCESS) {
        const struct capture *capture = stream->capture;
        *status = capture == NULL    ? CU_STREAM_CAPTURE_STATUS_NONE
                  : capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                     : CU_STREAM_CAPTURE_STATUS_ACTIVE;
        if (id != NULL)
            *id = capture ? capture->id : 0;
        if (graph != NULL)
            *graph = capture ? capture->graph : NULL;
        if (dependencies != NULL)
            *dependencies = stream->tail;
        if (count != NULL)
            *count = stream->tail_count;
    }
    pthread_mutex_unlock(&streams_lock);
    return result;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                   CUgraph *graph, const CUgraphNode **dependencies,
                                   const CUgraphEdgeData **edges, size_t *count) {
    if (edges != NULL)
        *edges = NULL;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    API_LOOK();
    if (mode == NULL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
