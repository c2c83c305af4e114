/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's operations that need their peers, by NCCL's names without the prefix. This is the only
   copy of the list. A ...Config variant (NCCL 2.32) counts as the operation whose variant it is. */
#ifndef LIVESHIFT_INTERPOSER_NCCL_OPERATIONS_H
#define LIVESHIFT_INTERPOSER_NCCL_OPERATIONS_H

#define LIVESHIFT_NCCL_OPERATIONS(X)                                                               \
    X(AllReduce)                                                                                   \
    X(Broadcast)                                                                                   \
    X(Bcast)                                                                                       \
    X(Reduce)                                                                                      \
    X(AllGather)                                                                                   \
    X(ReduceScatter)                                                                               \
    X(AlltoAll)                                                                                    \
    X(Gather)                                                                                      \
    X(Scatter)                                                                                     \
    X(Send)                                                                                        \
    X(Recv)                                                                                        \
    X(PutSignal)                                                                                   \
    X(Signal)                                                                                      \
    X(WaitSignal)                                                                                  \
    X(CommInit)                                                                                    \
    X(CommSplit)                                                                                   \
    X(CommShrink)                                                                                  \
    X(CommGrow)                                                                                    \
    X(CommFinalize)                                                                                \
    X(CommDestroy)                                                                                 \
    X(CommAbort)                                                                                   \
    X(CommSuspend)                                                                                 \
    X(CommResume)                                                                                  \
    X(CommWindowRegister)                                                                          \
    X(CommWindowDeregister)

#endif
