/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page's table of streams: those that CUDA was seen to make, and others once communication is
 * enqueued on them. The default stream has a row per device, with the handle CUDA gives it a name
 * by: STREAM_LEGACY or STREAM_PER_THREAD.
 */
#ifndef LIVESHIFT_INTERPOSER_STREAMS_H
#define LIVESHIFT_INTERPOSER_STREAMS_H

#include "gate/page.h"

#include <stdbool.h>
#include <stdint.h>

#define STREAM_LEGACY 1u     /* cudaStreamLegacy; NULL means it, where code asks for no other */
#define STREAM_PER_THREAD 2u /* cudaStreamPerThread */

/* Bits of `use`. */
#define STREAM_CARRIED 1u   /* communication was enqueued since the last drain */
#define STREAM_CAPTURING 2u /* captured into a graph now */

void stream_made(uint64_t handle, int32_t device, uint32_t flags, int32_t priority);

/* The row of a stream, added if it is unknown; NULL: there is no room (said once on stderr, counted
   in ledger.missed). `handle` 0 is taken for STREAM_LEGACY. `device`: of the default streams; a
   row that is found keeps its own. */
struct liveshift_stream *stream_row(uint64_t handle, int32_t device);

/* Whether its making was seen: then its captures are, too, since they pass by the same libraries.
   A stream of a statically linked runtime isn't. */
bool stream_seen(const struct liveshift_stream *row);

/* The device of a stream that is known, otherwise `device`. */
int32_t stream_device(uint64_t handle, int32_t device);

/* Before the call that destroys it, and after it. */
struct liveshift_stream *stream_leave(uint64_t handle);
void stream_left(struct liveshift_stream *row, uint64_t handle, bool destroyed);

void streams_reset(int32_t device);
void streams_forked(void);

#endif
