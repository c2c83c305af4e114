/* SPDX-License-Identifier: Apache-2.0 */
/* The real NCCL functions behind our functions of the same names: pncclX of the loaded libnccl. */
#ifndef LIVESHIFT_INTERPOSER_NCCL_REAL_H
#define LIVESHIFT_INTERPOSER_NCCL_REAL_H

#include "nccl_abi.h"

#include <stdatomic.h>

/* clang-format off */
/* The arguments that most collectives share; each is given in full below. */
#define NCCL_DATA const void *, void *, size_t, ncclDataType_t

/* X(name without prefix, parameters) of every function that we call and that returns
   ncclResult_t. */
#define NCCL_REAL_FUNCTIONS(X)                                                                     \
    X(AllReduce, (NCCL_DATA, ncclRedOp_t, ncclComm_t, nccl_stream))                                \
    X(Broadcast, (NCCL_DATA, int, ncclComm_t, nccl_stream))                                        \
    X(Bcast, (void *, size_t, ncclDataType_t, int, ncclComm_t, nccl_stream))                       \
    X(Reduce, (NCCL_DATA, ncclRedOp_t, int, ncclComm_t, nccl_stream))                              \
    X(AllGather, (NCCL_DATA, ncclComm_t, nccl_stream))                                             \
    X(ReduceScatter, (NCCL_DATA, ncclRedOp_t, ncclComm_t, nccl_stream))                            \
    X(AlltoAll, (NCCL_DATA, ncclComm_t, nccl_stream))                                              \
    X(Gather, (NCCL_DATA, int, ncclComm_t, nccl_stream))                                           \
    X(Scatter, (NCCL_DATA, int, ncclComm_t, nccl_stream))                                          \
    X(AllReduceConfig, (NCCL_DATA, ncclRedOp_t, ncclComm_t, nccl_stream, const void *))            \
    X(BroadcastConfig, (NCCL_DATA, int, ncclComm_t, nccl_stream, const void *))                    \
    X(ReduceConfig, (NCCL_DATA, ncclRedOp_t, int, ncclComm_t, nccl_stream, const void *))          \
    X(AllGatherConfig, (NCCL_DATA, ncclComm_t, nccl_stream, const void *))                         \
    X(ReduceScatterConfig, (NCCL_DATA, ncclRedOp_t, ncclComm_t, nccl_stream, const void *))        \
    X(AlltoAllConfig, (NCCL_DATA, ncclComm_t, nccl_stream, const void *))                          \
    X(GatherConfig, (NCCL_DATA, int, ncclComm_t, nccl_stream, const void *))                       \
    X(ScatterConfig, (NCCL_DATA, int, ncclComm_t, nccl_stream, const void *))                      \
    X(Send, (const void *, size_t, ncclDataType_t, int, ncclComm_t, nccl_stream))                  \
    X(Recv, (void *, size_t, ncclDataType_t, int, ncclComm_t, nccl_stream))                        \
    X(PutSignal, (const void *, size_t, ncclDataType_t, int, ncclWindow_t, size_t, int, int,       \
                  unsigned, ncclComm_t, nccl_stream))                                              \
    X(Signal, (int, int, int, unsigned, ncclComm_t, nccl_stream))                                  \
    X(WaitSignal, (int, ncclWaitSignalDesc_t *, ncclComm_t, nccl_stream))                          \
    X(GroupStart, (void))                                                                          \
    X(GroupEnd, (void))                                                                            \
    X(GroupSimulateEnd, (void *))                                                                  \
    X(GetUniqueId, (ncclUniqueId *))                                                               \
    X(CommGetUniqueId, (ncclComm_t, ncclUniqueId *))                                               \
    X(CommInitRank, (ncclComm_t *, int, ncclUniqueId, int))                                        \
    X(CommInitRankConfig, (ncclComm_t *, int, ncclUniqueId, int, void *))                          \
    X(CommInitRankScalable, (ncclComm_t *, int, int, int, ncclUniqueId *, void *))                 \
    X(CommInitAll, (ncclComm_t *, int, const int *))                                               \
    X(CommSplit, (ncclComm_t, int, int, ncclComm_t *, void *))                                     \
    X(CommShrink, (ncclComm_t, int *, int, ncclComm_t *, void *, int))                             \
    X(CommGrow, (ncclComm_t, int, const ncclUniqueId *, int, ncclComm_t *, void *))                \
    X(CommFinalize, (ncclComm_t))                                                                  \
    X(CommDestroy, (ncclComm_t))                                                                   \
    X(CommAbort, (ncclComm_t))                                                                     \
    X(CommRevoke, (ncclComm_t, int))                                                               \
    X(CommSuspend, (ncclComm_t, int))                                                              \
    X(CommResume, (ncclComm_t))                                                                    \
    X(CommMemStats, (ncclComm_t, ncclCommMemStat_t, uint64_t *))                                   \
    X(CommGetAsyncError, (ncclComm_t, ncclResult_t *))                                             \
    X(CommCount, (ncclComm_t, int *))                                                              \
    X(CommCuDevice, (ncclComm_t, int *))                                                           \
    X(CommUserRank, (ncclComm_t, int *))                                                           \
    X(MemAlloc, (void **, size_t))                                                                 \
    X(MemFree, (void *))                                                                           \
    X(CommRegister, (ncclComm_t, void *, size_t, void **))                                         \
    X(CommDeregister, (ncclComm_t, void *))                                                        \
    X(CommWindowRegister, (ncclComm_t, void *, size_t, ncclWindow_t *, int))                       \
    X(CommWindowDeregister, (ncclComm_t, ncclWindow_t))                                            \
    X(WinGetUserPtr, (ncclComm_t, ncclWindow_t, void **))                                          \
    X(RedOpCreatePreMulSum, (ncclRedOp_t *, void *, ncclDataType_t, ncclScalarResidence_t,         \
                             ncclComm_t))                                                          \
    X(RedOpDestroy, (ncclRedOp_t, ncclComm_t))                                                     \
    X(SetEncryption, (const void *))                                                               \
    X(CommQueryProperties, (ncclComm_t, void *))                                                   \
    X(DevCommCreate, (ncclComm_t, const void *, void *))                                           \
    X(DevCommDestroy, (ncclComm_t, const void *))                                                  \
    X(GinBarrierCreateRequirement, (ncclComm_t, ncclTeam_t, int, void *, void *))                  \
    X(GetLsaDevicePointer, (ncclWindow_t, size_t, int, void **))                                   \
    X(GetPeerDevicePointer, (ncclWindow_t, size_t, int, void **))                                  \
    X(GetLsaMultimemDevicePointer, (ncclWindow_t, size_t, void **))                                \
    X(GetMultimemDevicePointer, (ncclWindow_t, size_t, void *, void **))                           \
    X(GetMultimemDeviceLeInfo, (ncclWindow_t, size_t, uint32_t *, size_t *))                       \
    X(GetCftDeviceLeInfo, (ncclWindow_t, size_t, int, ncclTeam_t, uint32_t *, size_t *))           \
    X(GetPeerDeviceLeInfo, (ncclWindow_t, size_t, int, uint32_t *, size_t *))

/* Functions that return another type; we call them through nccl_real() and a cast. */
#define NCCL_OTHER_FUNCTIONS(X)                                                                    \
    X(GetLastError) X(TeamWorld) X(TeamLsa) X(TeamRail) X(TeamCft) X(TeamCftMultimem)              \
    X(TeamRankToWorld) X(TeamRankToLsa)
/* clang-format on */

enum nccl_function {
#define X(name, parameters) NCCL_DO_##name,
    NCCL_REAL_FUNCTIONS(X)
#undef X
#define X(name) NCCL_DO_##name,
        NCCL_OTHER_FUNCTIONS(X)
#undef X
            NCCL_FUNCTIONS
};

#define X(name, parameters) typedef ncclResult_t nccl_real_##name parameters;
NCCL_REAL_FUNCTIONS(X)
#undef X

extern _Atomic(void *) nccl_reals[NCCL_FUNCTIONS];

/* What a thread is doing. It is one variable, so the fast path of a collective looks it up once. */
struct nccl_thread {
    /* gettid(). 0: not asked for yet, or the thread is in a group; then it takes no fast path. */
    int32_t tid;
    /* How many real functions the thread is inside. libnccl calls some of its own exports, and so
       reaches our functions with handles that the application never got. */
    unsigned inside;
    /* How many groups the thread is inside. */
    unsigned groups;
};
extern __thread struct nccl_thread nccl_thread __attribute__((tls_model("initial-exec")));

/* Looks a function up in the loaded libnccl. NULL: it has none; one line on stderr says so once. */
void *nccl_find(enum nccl_function which);

/* The real function if it was looked up before. NULL: it was not, or libnccl doesn't have it. */
static inline void *nccl_known(enum nccl_function which) {
    return atomic_load_explicit(&nccl_reals[which], memory_order_relaxed);
}

static inline void *nccl_real(enum nccl_function which) {
    void *found = atomic_load_explicit(&nccl_reals[which], memory_order_relaxed);
    return __builtin_expect(found != NULL, 1) ? found : nccl_find(which);
}

/* Calls the real function. The value is its result, or ncclInvalidUsage if this NCCL has none. */
#define NCCL_CALL(name, ...)                                                                       \
    __extension__({                                                                                \
        nccl_real_##name *real_ = (nccl_real_##name *)nccl_real(NCCL_DO_##name);                   \
        nccl_thread.inside++;                                                                      \
        ncclResult_t result_ = real_ != NULL ? real_(__VA_ARGS__) : ncclInvalidUsage;              \
        nccl_thread.inside--;                                                                      \
        result_;                                                                                   \
    })

#endif
