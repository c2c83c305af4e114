/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooked gloo entry points. This list exists only here: the hooks, the counters of the page and
 * the table that liveshift.interposer.page checks against a torch library all expand from it.
 *
 * gloo is linked into libtorch_cpu.so, which exports these C++ functions with default visibility
 * and calls them through its own PLT, so a preloaded library that defines the same mangled name is
 * called instead. Each takes one reference to an options object and returns void: in C, a pointer.
 *
 * required: every torch that can run a gloo job has it; its absence means the job isn't seen.
 * optional: only some versions of torch link it in. torch 2.13.0 lacks only gatherv.
 *
 * Point-to-point operations (send, recv, monitored_barrier) are virtual methods of gloo's unbound
 * buffers, don't pass here and aren't counted. torch 2.13.0 makes its reduce_scatter over gloo of
 * allreduces and calls gatherv nowhere.
 */
#ifndef LIVESHIFT_INTERPOSER_ENTRY_POINTS_H
#define LIVESHIFT_INTERPOSER_ENTRY_POINTS_H

/* X(kind, mangled name, need); append new ones at the end of the list */
#define LIVESHIFT_GLOO_ENTRY_POINTS(X)                                                             \
    X(allgather, _ZN4gloo9allgatherERNS_16AllgatherOptionsE, required)                             \
    X(allgatherv, _ZN4gloo10allgathervERNS_17AllgathervOptionsE, optional)                         \
    X(allreduce, _ZN4gloo9allreduceERKNS_16AllreduceOptionsE, required)                            \
    X(alltoall, _ZN4gloo8alltoallERNS_15AlltoallOptionsE, required)                                \
    X(alltoallv, _ZN4gloo9alltoallvERNS_16AlltoallvOptionsE, required)                             \
    X(barrier, _ZN4gloo7barrierERNS_14BarrierOptionsE, required)                                   \
    X(broadcast, _ZN4gloo9broadcastERNS_16BroadcastOptionsE, required)                             \
    X(gather, _ZN4gloo6gatherERNS_13GatherOptionsE, required)                                      \
    X(gatherv, _ZN4gloo7gathervERNS_14GathervOptionsE, optional)                                   \
    X(reduce, _ZN4gloo6reduceERNS_13ReduceOptionsE, required)                                      \
    X(scatter, _ZN4gloo7scatterERNS_14ScatterOptionsE, required)

#endif
