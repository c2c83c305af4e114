/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the adapter needs of NCCL's C interface, 2.26 to 2.32, in declarations of our own: the job
 * brings whatever NCCL it was built with, and building liveshift needs none. Values and layouts are
 * NCCL's ABI (nccl.h of 2.29.7 and 2.32.3); tests/test_nccl_adapter.py compares them with those that
 * the simulated NCCL was built from.
 */
#ifndef LIVESHIFT_INTERPOSER_NCCL_ABI_H
#define LIVESHIFT_INTERPOSER_NCCL_ABI_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

typedef struct CUstream_st *nccl_stream; /* cudaStream_t and CUstream are one pointer */

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
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
} ncclResult_t;

typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef int ncclScalarResidence_t;
typedef int ncclCommMemStat_t;

#define NCCL_NUM_OPS 5 /* ncclSum to ncclAvg; from here on, operators made by ncclRedOpCreate… */
#define NCCL_SCALAR_HOST 1 /* ncclScalarHostImmediate: the scalar may be gone after the call */
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_SPLIT_NOCOLOR (-1)

/* ncclConfig_t as far as we read or write it; it goes on, versioned by `size`. */
struct nccl_config {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char *netName;
    int splitShare;
    int trafficClass;     /* the last of 2.26 */
    const char *commName; /* from 2.27 */
};

/* ncclCollConfig_t (2.32) likewise. */
struct nccl_call_config {
    size_t size;
    unsigned magic;
    unsigned version;
    void *ext;
    int minCTAs;
    int maxCTAs;
    int nvlsCTAs;
    int cgaClusterSize;
    const char *algSelection;
};

typedef struct {
    int opCnt;
    int peer;
    int sigIdx;
    int ctx;
} ncclWaitSignalDesc_t;

typedef struct {
    int nRanks, rank, stride;
} ncclTeam_t;

#endif
