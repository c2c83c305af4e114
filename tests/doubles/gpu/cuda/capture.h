/* SPDX-License-Identifier: Apache-2.0 */
/* Captures: streams that record into a graph instead of doing. With streams_lock held throughout. */
#ifndef SIMCUDA_CAPTURE_H
#define SIMCUDA_CAPTURE_H

#include "stream.h"

CUstreamCaptureMode capture_mode(const struct capture *capture);
/* Adds a node after the stream's last ones. */
CUresult capture_add(CUstream stream, struct work work);
/* What was captured becomes worthless; EndCapture will say so. */
void capture_invalidate(struct capture *capture);
/* The stream that goes away takes its capture with it. */
void capture_abandon(CUstream stream);

/* An event's side of a capture: the place that it marks. */
struct captured_place {
    struct capture *capture;
    CUgraphNode *nodes;
    size_t count;
};
CUresult capture_mark(CUstream stream, struct captured_place *place);
/* What the stream captures next comes after the place; a stream that doesn't capture begins to. */
CUresult capture_join(CUstream stream, const struct captured_place *place);
void captured_place_clear(struct captured_place *place);
/* Whether the capture that marked the place still runs. */
bool captured_place_current(const struct captured_place *place);

#endif
