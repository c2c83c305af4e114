/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Our own declarations of the part of NCCL's C interface, 2.26 to 2.32, that the interposer needs.
 * The job brings the NCCL it was built with, and liveshift is built without NCCL. Values and
 * layouts are NCCL's ABI (nccl.h of 2.29.7 and 2.32.3); tests/interposer/nccl/test_nccl_adapter.py
 * compares them with the headers from which the simulated NCCL was built.
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

#define NCCL_NUM_OPS 5     /* 0 to 4: ncclSum to ncclAvg; 5 and above: made by ncclRedOpCreate… */
#define NCCL_SCALAR_HOST 1 /* ncclScalarHostImmediate: the scalar may be gone after the call */
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_MAGIC 0xcafebeefu
#define NCCL_SPLIT_NOCOLOR (-1)

/* The part of ncclConfig_t that we read or write. More fields follow; `size` gives the version. */
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

/* The part of ncclCollConfig_t (2.32) that we read. */
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
