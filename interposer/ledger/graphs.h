/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Graphs: how many there are, and which have NCCL's operations in them. NCCL keeps a communicator
 * alive until every graph that captured it, and everything instantiated from that, is destroyed;
 * ncclCommDestroy hangs until then (facts: quiesce.md, pytorch#115388).
 */
#ifndef LIVESHIFT_INTERPOSER_GRAPHS_H
#define LIVESHIFT_INTERPOSER_GRAPHS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* How many captures were seen to begin and not to end; too many where an end wasn't seen. */
extern _Atomic uint32_t captures_under_way;

/* A stream begins to be captured; into a graph that the application has made already, or not. */
void capture_begun(uint64_t stream, int32_t device, bool into_graph);

/* To be called by whoever enqueues communication on a stream that is being captured. */
void ledger_capture_has_nccl(uint64_t stream);

/* Before the call that ends a stream's capture: its number, 0 if it isn't known. After it: the
   graph that came out, 0 if the capture failed. */
uint64_t capture_ending(uint64_t stream);
void capture_ended(uint64_t stream, int32_t device, uint64_t capture, uint64_t graph);

void graph_made(uint64_t graph);
/* One was made of another: by cloning it, or (`executable`) by instantiating it. */
void graph_copied(uint64_t graph, uint64_t copy, bool executable);
/* Before the call that destroys it; it is called again with `back` if that fails. */
bool graph_leave(uint64_t graph, bool executable);
void graph_back(uint64_t graph, bool executable, bool had_nccl);

void graphs_forked(void);

#endif
