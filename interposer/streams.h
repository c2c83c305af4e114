/* SPDX-License-Identifier: Apache-2.0 */
/* The page's rows of streams: which ones exist, and which carry communication. */
#ifndef LIVESHIFT_INTERPOSER_STREAMS_H
#define LIVESHIFT_INTERPOSER_STREAMS_H

#include "process.h"

/* The legacy default stream is NULL in calls and 1 in rows, where 0 is a free row; both are its
   names in CUDA. 2 is a different stream on each thread. */
#define STREAM_LEGACY 1
#define STREAM_PER_THREAD 2

enum stream_use { STREAM_UNUSED = 0, STREAM_CARRIES = 1, STREAM_CAPTURED = 2 };

/* The row of a stream, made if it has none; NULL: the table is full. */
struct liveshift_stream *stream_row(struct gate *gate, void *handle, int device);

/* Communication is about to be enqueued: STREAM_CARRIES, or STREAM_CAPTURED where that goes into a
   graph instead. `known` is the caller's guess at the row, kept up to date. */
enum stream_use stream_carries(int device, void *handle, _Atomic(struct liveshift_stream *) *known);

/* The stream exists no longer. */
void stream_gone(void *handle);

#endif
