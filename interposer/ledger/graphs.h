/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CUDA graphs: how many there are, and which of them contain NCCL operations. NCCL keeps a
 * communicator alive until every graph that captured it is destroyed, and every graph executable
 * made from such a graph. ncclCommDestroy hangs until then (pytorch#115388).
 */
#ifndef LIVESHIFT_INTERPOSER_GRAPHS_H
#define LIVESHIFT_INTERPOSER_GRAPHS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* How many captures have begun and not ended. Too high if the interposer did not see an end. */
extern _Atomic uint32_t captures_under_way;

/* A capture of this stream begins. `into_graph`: into a graph that the application made before. */
void capture_begun(uint64_t stream, int32_t device, bool into_graph);

/* A hook calls this when it enqueues communication on a stream that is being captured. */
void ledger_capture_has_nccl(uint64_t stream);

/* Called after the call that ends a stream's capture, with capture_number's answer from before it,
   and with the graph that came out, 0 if the capture failed. */
void capture_ended(uint64_t stream, int32_t device, uint64_t capture, uint64_t graph);

void graph_created(void);
/* `copy` was made from `graph`: by cloning it, or (`executable`) by instantiating it. */
void graph_copied(uint64_t graph, uint64_t copy, bool executable);
/* Call graph_destroy_begin before the call that destroys a graph; it returns whether the graph
   contains NCCL operations. If that call fails, call graph_destroy_failed, which enters the graph
   again. */
bool graph_destroy_begin(uint64_t graph, bool executable);
void graph_destroy_failed(uint64_t graph, bool executable, bool had_nccl);

void graphs_forked(void);

#endif
