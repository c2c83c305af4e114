/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooked gloo entry points. These are the only copies of the lists: the hooks, the counters of
 * the page and the table that liveshift.interposer.library checks against a torch library expand
 * from them.
 *
 * gloo is linked into libtorch_cpu.so, which exports these C++ functions with default visibility
 * and calls them through its own PLT. So a preloaded library that defines the same mangled name is
 * called instead. Each takes one reference to an options object (in C, a pointer) and returns void.
 *
 * required: every torch that can run a gloo job has it. Without it the interposer does not see the
 *           job.
 * optional: only some versions of torch link it in. torch 2.13.0 lacks only gatherv.
 * identity: without it collectives pass as ever, but the job has no boundary: the ranks cannot
 *           match their collectives, or the interposer does not see point-to-point operations.
 *
 * torch 2.13.0 makes its reduce_scatter over gloo from allreduces and never calls gatherv.
 */
#ifndef LIVESHIFT_INTERPOSER_ENTRY_POINTS_H
#define LIVESHIFT_INTERPOSER_ENTRY_POINTS_H

/* X(kind, mangled name, need). Append new ones at the end of the list. */
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

/* Point-to-point: virtual methods of gloo's unbound buffers. A vtable's entries are symbolic
   relocations, so here, too, a preloaded definition is called. send, recv and monitored_barrier use
   these methods. So does every part of a collective, which the interposer does not count.
   X(name, mangled name, need) */
#define LIVESHIFT_GLOO_PAIR_POINTS(X)                                                              \
    X(send, _ZN4gloo9transport3tcp13UnboundBuffer4sendEimmm, identity)                             \
    X(recv, _ZN4gloo9transport3tcp13UnboundBuffer4recvEimmm, identity)                             \
    X(recv_any, _ZN4gloo9transport3tcp13UnboundBuffer4recvESt6vectorIiSaIiEEmmm, identity)         \
    X(sent, _ZN4gloo9transport3tcp13UnboundBuffer20handleSendCompletionEi, identity)               \
    X(received, _ZN4gloo9transport3tcp13UnboundBuffer20handleRecvCompletionEi, identity)           \
    X(buffer_end, _ZN4gloo9transport3tcp13UnboundBufferD1Ev, identity)

/* How a context (gloo's communicator) is made, connects to its peers and ends. The last two give it
   a name for display. X(name, mangled name, need) */
#define LIVESHIFT_GLOO_CONTEXT_POINTS(X)                                                                    \
    X(context_make, _ZN4gloo7ContextC2Eiii, identity)                                                       \
    X(context_end, _ZN4gloo7ContextD2Ev, identity)                                                          \
    X(connect_full_mesh,                                                                                    \
      _ZN4gloo10rendezvous7Context15connectFullMeshESt10shared_ptrINS0_5StoreEERS2_INS_9transport6DeviceEE, \
      identity)                                                                                             \
    X(connect_all_pairs,                                                                                    \
      _ZN4gloo9transport3tcp7Context24createAndConnectAllPairsESt10shared_ptrINS_6IStoreEE,                 \
      identity)                                                                                             \
    X(own_address, _ZNK4gloo9transport3tcp4Rank5bytesEv, identity)                                          \
    X(peer_address, _ZN4gloo9transport3tcp4RankC1ERKSt6vectorIcSaIcEE, identity)                            \
    X(group_name,                                                                                           \
      _ZN4c10d12ProcessGroup12setGroupNameERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE,          \
      optional)                                                                                             \
    X(group_description,                                                                                    \
      _ZN4c10d12ProcessGroup12setGroupDescERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE,          \
      optional)

#endif
