/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our own minimal declarations of NCCL's C interface, 2.26 to 2.32: the simulated library is built
 * from them, and test programs that run on it or on the real one. Values and layouts are the ABI of
 * the real header (compared by scripts outside the tree with nccl.h 2.29.7 and 2.32.3).
 *
 * Every public function exists twice: ncclX (weak) and pncclX (strong), as in the real library.
 */
#ifndef LIVESHIFT_TESTS_NCCL_ABI_H
#define LIVESHIFT_TESTS_NCCL_ABI_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* a cudaStream_t or CUstream, a cudaEvent_t: the same pointers in both of CUDA's interfaces */
typedef struct CUstream_st *nccl_stream;
typedef struct CUevent_st *nccl_event;

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef struct ncclParamHandle *ncclParamHandle_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclTimeout = 8, /* from 2.30.4 */
} ncclResult_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12,
} ncclDataType_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5, /* also the least value of an operator made by ncclRedOpCreate… */
    ncclMaxRedOp = 0x7fffffff,
} ncclRedOp_t;

typedef enum { ncclScalarDevice = 0, ncclScalarHostImmediate = 1 } ncclScalarResidence_t;

typedef enum {
    ncclStatGpuMemSuspend = 0,   /* bytes that can be suspended */
    ncclStatGpuMemSuspended = 1, /* 0 active, 1 suspended */
    ncclStatGpuMemPersist = 2,   /* bytes that can't be suspended */
    ncclStatGpuMemTotal = 3,
} ncclCommMemStat_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_SPLIT_NOCOLOR (-1)
#define NCCL_API_MAGIC 0xcafebeefu
#define NCCL_SIM_INFO_MAGIC 0x74685283u
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01
#define NCCL_REVOKE_DEFAULT 0x00
#define NCCL_SUSPEND_MEM 0x01

/* Versioned by size and append-only; which version ends where: nccl_config_size() below. */
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
    int trafficClass; /* the last of 2.26 */
    const char *commName;
    int collnetEnable;
    int CTAPolicy;
    int shrinkShare;
    int nvlsCTAs; /* the last of 2.27 */
    int nChannelsPerNetPeer;
    int nvlinkCentricSched; /* the last of 2.28 */
    int graphUsageMode;
    int numRmaCtx; /* the last of 2.29 */
    int maxP2pPeers;
    int graphStreamOrdering; /* the last of 2.30 */
    int launchOrderImplicit;
    int numRmaSig;
    int rmaEagerInit;
    int hostCftMode;
    int nvlsHostMode; /* the last of 2.32 */
} ncclConfig_t;

/* Per call, from 2.32; `ext` is a list of vendor options, which NCCL itself ignores. */
typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    void *ext;
    int minCTAs;
    int maxCTAs;
    int nvlsCTAs;
    int cgaClusterSize;
    const char *algSelection;
    int forceAlgSelection;
    int CTAPolicy;
    uint64_t userProfilerTag;
    nccl_event launchCompletionEvent;
} ncclCollConfig_t;

typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    float estimatedTime;
} ncclSimInfo_t;

typedef struct {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int mode; /* 0 plaintext, 1 pre-shared key */
    const char *psk;
} ncclEncryptionConfig_t;

typedef struct {
    int opCnt;
    int peer;
    int sigIdx;
    int ctx;
} ncclWaitSignalDesc_t;

typedef struct {
    int nRanks, rank, stride;
} ncclTeam_t;

/* The size that a program built against `version` (22907 is 2.29.7) puts into its config. */
static inline size_t nccl_config_size(int version) {
    size_t end = version < 22700   ? offsetof(ncclConfig_t, commName)
                 : version < 22800 ? offsetof(ncclConfig_t, nChannelsPerNetPeer)
                 : version < 22900 ? offsetof(ncclConfig_t, graphUsageMode)
                 : version < 23000 ? offsetof(ncclConfig_t, maxP2pPeers)
                 : version < 23007 ? offsetof(ncclConfig_t, graphStreamOrdering)
                 : version < 23100 ? offsetof(ncclConfig_t, launchOrderImplicit)
                                   : sizeof(ncclConfig_t);
    return (end + _Alignof(ncclConfig_t) - 1) / _Alignof(ncclConfig_t) * _Alignof(ncclConfig_t);
}

/* What NCCL_CONFIG_INITIALIZER gives a program built against `version`. */
static inline ncclConfig_t nccl_config(int version) {
    const int unset = NCCL_CONFIG_UNDEF_INT;
    return (ncclConfig_t){
        .size = nccl_config_size(version),
        .magic = NCCL_API_MAGIC,
        .version = (unsigned int)version,
        .blocking = unset,
        .cgaClusterSize = unset,
        .minCTAs = unset,
        .maxCTAs = unset,
        .splitShare = unset,
        .trafficClass = unset,
        .collnetEnable = unset,
        .CTAPolicy = unset,
        .shrinkShare = unset,
        .nvlsCTAs = unset,
        .nChannelsPerNetPeer = unset,
        .nvlinkCentricSched = unset,
        .graphUsageMode = unset,
        .numRmaCtx = unset,
        .maxP2pPeers = unset,
        .graphStreamOrdering = unset,
        .launchOrderImplicit = unset,
        .numRmaSig = unset,
        .rmaEagerInit = unset,
        .hostCftMode = unset,
        .nvlsHostMode = unset,
    };
}

/* What NCCL_COLLCONFIG_INITIALIZER gives. */
static inline ncclCollConfig_t nccl_coll_config(int version) {
    const int unset = NCCL_CONFIG_UNDEF_INT;
    return (ncclCollConfig_t){
        .size = sizeof(ncclCollConfig_t),
        .magic = NCCL_API_MAGIC,
        .version = (unsigned int)version,
        .minCTAs = unset,
        .maxCTAs = unset,
        .nvlsCTAs = unset,
        .cgaClusterSize = unset,
        .forceAlgSelection = 1,
        .CTAPolicy = unset,
    };
}

#define NCCL_DECLARE(result, name, parameters)                                                     \
    result name parameters;                                                                        \
    result p##name parameters;

#pragma GCC visibility push(default)
/* clang-format off */
/* up to 2.26 */
NCCL_DECLARE(ncclResult_t, ncclGetVersion, (int *version))
NCCL_DECLARE(const char *, ncclGetErrorString, (ncclResult_t result))
NCCL_DECLARE(const char *, ncclGetLastError, (ncclComm_t comm))
NCCL_DECLARE(void, ncclResetDebugInit, (void))
void ncclResetDebugInitInternal(void);
NCCL_DECLARE(ncclResult_t, ncclGetUniqueId, (ncclUniqueId *id))
NCCL_DECLARE(ncclResult_t, ncclCommInitRank, (ncclComm_t *comm, int count, ncclUniqueId id, int rank))
NCCL_DECLARE(ncclResult_t, ncclCommInitRankConfig, (ncclComm_t *comm, int count, ncclUniqueId id, int rank, ncclConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclCommInitRankScalable, (ncclComm_t *comm, int count, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclCommInitAll, (ncclComm_t *comm, int count, const int *devices))
NCCL_DECLARE(ncclResult_t, ncclCommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclCommFinalize, (ncclComm_t comm))
NCCL_DECLARE(ncclResult_t, ncclCommDestroy, (ncclComm_t comm))
NCCL_DECLARE(ncclResult_t, ncclCommAbort, (ncclComm_t comm))
NCCL_DECLARE(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t *error))
NCCL_DECLARE(ncclResult_t, ncclCommCount, (const ncclComm_t comm, int *count))
NCCL_DECLARE(ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int *device))
NCCL_DECLARE(ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int *rank))
NCCL_DECLARE(ncclResult_t, ncclCommRegister, (const ncclComm_t comm, void *buffer, size_t size, void **handle))
NCCL_DECLARE(ncclResult_t, ncclCommDeregister, (const ncclComm_t comm, void *handle))
NCCL_DECLARE(ncclResult_t, ncclMemAlloc, (void **pointer, size_t size))
NCCL_DECLARE(ncclResult_t, ncclMemFree, (void *pointer))
NCCL_DECLARE(ncclResult_t, ncclRedOpCreatePreMulSum, (ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t comm))
NCCL_DECLARE(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t comm))
NCCL_DECLARE(ncclResult_t, ncclGroupStart, (void))
NCCL_DECLARE(ncclResult_t, ncclGroupEnd, (void))
NCCL_DECLARE(ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t *info))
NCCL_DECLARE(ncclResult_t, ncclAllReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclBroadcast, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclBcast, (void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclReduce, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclAllGather, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclReduceScatter, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclSend, (const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclRecv, (void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, nccl_stream stream))
/* from 2.27 */
NCCL_DECLARE(ncclResult_t, ncclCommShrink, (ncclComm_t comm, int *excluded, int excluded_count, ncclComm_t *child, ncclConfig_t *config, int flags))
NCCL_DECLARE(ncclResult_t, ncclCommWindowRegister, (ncclComm_t comm, void *buffer, size_t size, ncclWindow_t *window, int flags))
NCCL_DECLARE(ncclResult_t, ncclCommWindowDeregister, (ncclComm_t comm, ncclWindow_t window))
/* from 2.28.3 */
NCCL_DECLARE(ncclResult_t, ncclAlltoAll, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclGather, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclScatter, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclDevCommCreate, (ncclComm_t comm, const void *requirements, void *device_comm))
NCCL_DECLARE(ncclResult_t, ncclDevCommDestroy, (ncclComm_t comm, const void *device_comm))
NCCL_DECLARE(ncclTeam_t, ncclTeamWorld, (ncclComm_t comm))
NCCL_DECLARE(ncclTeam_t, ncclTeamLsa, (ncclComm_t comm))
NCCL_DECLARE(ncclTeam_t, ncclTeamRail, (ncclComm_t comm))
NCCL_DECLARE(int, ncclTeamRankToWorld, (ncclComm_t comm, ncclTeam_t team, int rank))
NCCL_DECLARE(int, ncclTeamRankToLsa, (ncclComm_t comm, ncclTeam_t team, int rank))
NCCL_DECLARE(ncclResult_t, ncclLsaBarrierCreateRequirement, (ncclTeam_t team, int barriers, void *handle, void *requirement))
NCCL_DECLARE(ncclResult_t, ncclGinBarrierCreateRequirement, (ncclComm_t comm, ncclTeam_t team, int barriers, void *handle, void *requirement))
NCCL_DECLARE(int, ncclLLA2ACalcSlots, (int elements, int element_size))
NCCL_DECLARE(ncclResult_t, ncclLLA2ACreateRequirement, (int blocks, int slots, void *handle, void *requirement))
NCCL_DECLARE(ncclResult_t, ncclGinOutboxCreateRequirement, (int blocks, int size_log2, void *handle, void *requirement))
NCCL_DECLARE(ncclResult_t, ncclGinInboxA2ACreateRequirement, (ncclTeam_t peers, int blocks, int size_log2, void *handle, void *requirement))
/* from 2.28.7 */
NCCL_DECLARE(ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int flags))
/* from 2.29.2 */
NCCL_DECLARE(ncclResult_t, ncclCommGetUniqueId, (ncclComm_t comm, ncclUniqueId *id))
NCCL_DECLARE(ncclResult_t, ncclCommGrow, (ncclComm_t comm, int count, const ncclUniqueId *id, int rank, ncclComm_t *child, ncclConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclPutSignal, (const void *local, size_t count, ncclDataType_t type, int peer, ncclWindow_t window, size_t offset, int signal, int context, unsigned int flags, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclSignal, (int peer, int signal, int context, unsigned int flags, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclWaitSignal, (int count, ncclWaitSignalDesc_t *signals, ncclComm_t comm, nccl_stream stream))
NCCL_DECLARE(ncclResult_t, ncclWinGetUserPtr, (ncclComm_t comm, ncclWindow_t window, void **pointer))
NCCL_DECLARE(ncclResult_t, ncclCommQueryProperties, (ncclComm_t comm, void *properties))
NCCL_DECLARE(ncclResult_t, ncclGetLsaDevicePointer, (ncclWindow_t window, size_t offset, int rank, void **pointer))
NCCL_DECLARE(ncclResult_t, ncclGetPeerDevicePointer, (ncclWindow_t window, size_t offset, int peer, void **pointer))
NCCL_DECLARE(ncclResult_t, ncclGetLsaMultimemDevicePointer, (ncclWindow_t window, size_t offset, void **pointer))
/* the fourth, ncclMultimemHandle, is a pointer in a structure of its own: passed as one */
NCCL_DECLARE(ncclResult_t, ncclGetMultimemDevicePointer, (ncclWindow_t window, size_t offset, void *multimem, void **pointer))
/* from 2.29.7 */
NCCL_DECLARE(ncclResult_t, ncclCommSuspend, (ncclComm_t comm, int flags))
NCCL_DECLARE(ncclResult_t, ncclCommResume, (ncclComm_t comm))
NCCL_DECLARE(ncclResult_t, ncclCommMemStats, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value))
/* from 2.30.4 */
NCCL_DECLARE(ncclResult_t, ncclParamBind, (ncclParamHandle_t *handle, const char *key))
NCCL_DECLARE(ncclResult_t, ncclParamGetI8, (ncclParamHandle_t handle, int8_t *value))
NCCL_DECLARE(ncclResult_t, ncclParamGetI16, (ncclParamHandle_t handle, int16_t *value))
NCCL_DECLARE(ncclResult_t, ncclParamGetI32, (ncclParamHandle_t handle, int32_t *value))
NCCL_DECLARE(ncclResult_t, ncclParamGetI64, (ncclParamHandle_t handle, int64_t *value))
NCCL_DECLARE(ncclResult_t, ncclParamGetU8, (ncclParamHandle_t handle, uint8_t *value))
NCCL_DECLARE(ncclResult_t, ncclParamGetU16, (ncclParamHandle_t handle, uint16_t *value))
NCCL_DECLARE(ncclResult_t, ncclParamGetU32, (ncclParamHandle_t handle, uint32_t *value))
NCCL_DECLARE(ncclResult_t, ncclParamGetU64, (ncclParamHandle_t handle, uint64_t *value))
NCCL_DECLARE(ncclResult_t, ncclParamGetStr, (ncclParamHandle_t handle, const char **value))
NCCL_DECLARE(ncclResult_t, ncclParamGet, (ncclParamHandle_t handle, void *value, int capacity, int *length))
NCCL_DECLARE(ncclResult_t, ncclParamGetParameter, (const char *key, const char **value, int *length))
NCCL_DECLARE(ncclResult_t, ncclParamGetAllParameterKeys, (const char ***table, int *length))
NCCL_DECLARE(void, ncclParamDumpAll, (void))
/* from 2.31 and 2.32 */
NCCL_DECLARE(ncclResult_t, ncclAllReduceConfig, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclBroadcastConfig, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclReduceConfig, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclAllGatherConfig, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclReduceScatterConfig, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclAlltoAllConfig, (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclGatherConfig, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclScatterConfig, (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config))
NCCL_DECLARE(ncclResult_t, ncclSetEncryption, (const ncclEncryptionConfig_t *config))
NCCL_DECLARE(ncclTeam_t, ncclTeamCft, (ncclComm_t comm, int mode))
NCCL_DECLARE(ncclTeam_t, ncclTeamCftMultimem, (ncclComm_t comm))
NCCL_DECLARE(ncclResult_t, ncclGetMultimemDeviceLeInfo, (ncclWindow_t window, size_t offset, uint32_t *id, size_t *le_offset))
NCCL_DECLARE(ncclResult_t, ncclGetCftDeviceLeInfo, (ncclWindow_t window, size_t offset, int peer, ncclTeam_t team, uint32_t *id, size_t *le_offset))
NCCL_DECLARE(ncclResult_t, ncclGetPeerDeviceLeInfo, (ncclWindow_t window, size_t offset, int peer, uint32_t *id, size_t *le_offset))
/* clang-format on */
#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
