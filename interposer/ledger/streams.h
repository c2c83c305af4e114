/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page's table of streams. It has the streams whose creation the interposer saw, and other
 * streams once communication is enqueued on them. The default stream has a row for each device; its
 * handle is CUDA's name for it: STREAM_LEGACY or STREAM_PER_THREAD.
 */
#ifndef LIVESHIFT_INTERPOSER_STREAMS_H
#define LIVESHIFT_INTERPOSER_STREAMS_H

#include "gate/page.h"

#include <stdbool.h>
#include <stdint.h>

#define STREAM_LEGACY 1u     /* cudaStreamLegacy; NULL means it unless code asks for per-thread */
#define STREAM_PER_THREAD 2u /* cudaStreamPerThread */

/* Bits of `use`. */
#define STREAM_DIRTY 1u     /* communication was enqueued since the last drain */
#define STREAM_CAPTURING 2u /* captured into a graph now */

void stream_created(uint64_t handle, int32_t device, uint32_t flags, int32_t priority);

/* The row of a stream; adds one if the stream is unknown. NULL: there is no room (one line on
   stderr says so, and ledger.missed counts it). `handle` 0 means STREAM_LEGACY. `device` selects
   among the default streams' rows and is stored in a new row; a row that exists keeps its
   device. */
struct liveshift_stream *stream_row(uint64_t handle, int32_t device);

/* Whether the interposer saw this stream being made. Then it sees its captures, too, since these go
   through the same libraries. It does not see streams of a statically linked runtime. */
bool stream_seen(const struct liveshift_stream *row);

/* The device of a stream that is in the table, otherwise `device`. */
int32_t stream_device(uint64_t handle, int32_t device);

/* A hook calls stream_destroy_begin before the call that destroys a stream, and stream_destroy_end
   after it. */
struct liveshift_stream *stream_destroy_begin(uint64_t handle);
void stream_destroy_end(struct liveshift_stream *row, uint64_t handle, bool destroyed);

/* Keep a row's stream from being destroyed until stream_kept. False if the row no longer has the
   handle; then nothing is kept. Meanwhile the caller may ask the driver about the stream, but call
   nothing that waits, and no function that is hooked. */
bool stream_keep(struct liveshift_stream *row, uint64_t handle);
void stream_kept(void);

void streams_reset(int32_t device);
void streams_forked(void);

#endif
