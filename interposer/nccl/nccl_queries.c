/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions that may be called for a communicator at any moment, for example by PyTorch's watchdog.
 * The first ones answer from our record where it knows, and never wait. The ones with WITH_REAL
 * wait for the end of a rebuild. Some note down what a teardown can't carry through: device code
 * that knows addresses inside of NCCL, and encryption.
 */

#include "hooks/exported.h"
#include "nccl_calls.h"

static __attribute__((noinline)) ncclResult_t async_error(ncclComm_t comm, ncclResult_t *error) {
    struct vcomm *v = vcomm_of(comm);
    if (v == NULL)
        return NCCL_CALL(CommGetAsyncError, comm, error);
    if (error == NULL)
        return ncclInvalidArgument;
    if (!vcomm_enter(v)) {
        uint32_t state = atomic_load(&v->state);
        if (state == VCOMM_ENDED)
            return ncclInvalidArgument;
        *error = state == VCOMM_STARTING ? ncclInProgress : ncclSuccess;
        return ncclSuccess;
    }
    creation_poll(v);
    ncclResult_t result = ncclSuccess;
    if (atomic_load(&v->state) == VCOMM_MAKING)
        *error = ncclInProgress;
    else /* v->real is NULL if the creation failed: NCCL has an error for that */
        result = NCCL_CALL(CommGetAsyncError, v->real, error);
    vcomm_leave(v);
    return result;
}

EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    struct vcomm *v = vcomm_of(comm);
    nccl_real_CommGetAsyncError *real = nccl_known(NCCL_DO_CommGetAsyncError);
    if (v == NULL && real != NULL)
        return real(comm, error); /* NCCL itself calls this in each of its calls */
    return async_error(comm, error);
}

#define ASK(name, field)                                                                           \
    EXPORTED ncclResult_t ncclComm##name(ncclComm_t comm, int *value) {                            \
        struct vcomm *v = vcomm_of(comm);                                                          \
        if (v == NULL || value == NULL)                                                            \
            return NCCL_CALL(Comm##name, v != NULL ? v->real : comm, value);                       \
        uint32_t state = atomic_load(&v->state);                                                   \
        if (state == VCOMM_ENDED)                                                                  \
            return ncclInvalidArgument;                                                            \
        if (state != VCOMM_LIVE && state != VCOMM_DOWN)                                            \
            return NCCL_CALL(Comm##name, v->real, value);                                          \
        *value = v->field;                                                                         \
        return ncclSuccess;                                                                        \
    }

ASK(Count, size)
ASK(UserRank, rank)
ASK(CuDevice, device)

EXPORTED const char *ncclGetLastError(ncclComm_t comm) {
    const char *(*real)(ncclComm_t) = nccl_real(NCCL_DO_GetLastError);
    struct vcomm *v = vcomm_of(comm);
    if (real == NULL || (v != NULL && !vcomm_enter(v)))
        return "";
    nccl_thread.inside++;
    const char *text = real(v != NULL ? v->real : comm); /* static or per thread, not the comm's */
    nccl_thread.inside--;
    if (v != NULL)
        vcomm_leave(v);
    return text;
}

/* Calls a function with the real communicator in place of the vcomm. */
#define WITH_REAL(call_it)                                                                         \
    struct vcomm *v = vcomm_of(comm);                                                              \
    if (v != NULL && !vcomm_enter_waiting(v))                                                      \
        return ncclInvalidArgument;                                                                \
    ncclComm_t real = v != NULL ? v->real : comm;                                                  \
    ncclResult_t result = call_it;                                                                 \
    if (v != NULL)                                                                                 \
        vcomm_leave(v);                                                                            \
    return result

static void device_side(ncclComm_t comm) {
    struct vcomm *v = vcomm_of(comm);
    if (v != NULL)
        vcomm_unsafe(v, "device code communicates on it (ncclDevCommCreate)");
}

EXPORTED ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value) {
    WITH_REAL(NCCL_CALL(CommMemStats, real, stat, value));
}

EXPORTED ncclResult_t ncclCommQueryProperties(ncclComm_t comm, void *properties) {
    WITH_REAL(NCCL_CALL(CommQueryProperties, real, properties));
}

EXPORTED ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void *wants, void *out) {
    device_side(comm);
    WITH_REAL(NCCL_CALL(DevCommCreate, real, wants, out));
}

EXPORTED ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const void *device) {
    WITH_REAL(NCCL_CALL(DevCommDestroy, real, device));
}

EXPORTED ncclResult_t ncclGinBarrierCreateRequirement(ncclComm_t comm, ncclTeam_t team, int count,
                                                      void *handle, void *out) {
    device_side(comm);
    WITH_REAL(NCCL_CALL(GinBarrierCreateRequirement, real, team, count, handle, out));
}

EXPORTED ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void **pointer) {
    ncclWindow_t now = window_exported(window);
    WITH_REAL(NCCL_CALL(WinGetUserPtr, real, now, pointer));
}

#define EXPORT_WINDOW(name, parameters, ...)                                                       \
    EXPORTED ncclResult_t nccl##name parameters {                                                  \
        window = window_exported(window);                                                          \
        return NCCL_CALL(name, __VA_ARGS__);                                                       \
    }

EXPORT_WINDOW(GetLsaDevicePointer, (ncclWindow_t window, size_t at, int rank, void **out), window,
              at, rank, out)
EXPORT_WINDOW(GetPeerDevicePointer, (ncclWindow_t window, size_t at, int peer, void **out), window,
              at, peer, out)
EXPORT_WINDOW(GetLsaMultimemDevicePointer, (ncclWindow_t window, size_t at, void **out), window, at,
              out)
EXPORT_WINDOW(GetMultimemDevicePointer,
              (ncclWindow_t window, size_t at, void *multimem, void **out), window, at, multimem,
              out)
EXPORT_WINDOW(GetMultimemDeviceLeInfo, (ncclWindow_t window, size_t at, uint32_t *id, size_t *le),
              window, at, id, le)
EXPORT_WINDOW(GetCftDeviceLeInfo,
              (ncclWindow_t window, size_t at, int peer, ncclTeam_t team, uint32_t *id, size_t *le),
              window, at, peer, team, id, le)
EXPORT_WINDOW(GetPeerDeviceLeInfo,
              (ncclWindow_t window, size_t at, int peer, uint32_t *id, size_t *le), window, at,
              peer, id, le)

EXPORTED ncclResult_t ncclSetEncryption(const void *config) {
    ncclResult_t result = NCCL_CALL(SetEncryption, config);
    if (result == ncclSuccess)
        atomic_store(&vcomms_unsafe, "NCCL's traffic is encrypted (ncclSetEncryption)");
    return result;
}

/* A team describes places of ranks. A rebuild doesn't change them. */

#define REAL_OF(comm)                                                                              \
    struct vcomm *v = vcomm_of(comm);                                                              \
    if (v != NULL)                                                                                 \
    comm = v->real

#define TEAM(name)                                                                                 \
    EXPORTED ncclTeam_t nccl##name(ncclComm_t comm) {                                              \
        ncclTeam_t (*real)(ncclComm_t) = nccl_real(NCCL_DO_##name);                                \
        REAL_OF(comm);                                                                             \
        return real != NULL ? real(comm) : (ncclTeam_t){0, 0, 0};                                  \
    }

TEAM(TeamWorld)
TEAM(TeamLsa)
TEAM(TeamRail)
TEAM(TeamCftMultimem)

EXPORTED ncclTeam_t ncclTeamCft(ncclComm_t comm, int mode) {
    ncclTeam_t (*real)(ncclComm_t, int) = nccl_real(NCCL_DO_TeamCft);
    REAL_OF(comm);
    return real != NULL ? real(comm, mode) : (ncclTeam_t){0, 0, 0};
}

#define TEAM_RANK(name)                                                                            \
    EXPORTED int nccl##name(ncclComm_t comm, ncclTeam_t team, int rank) {                          \
        int (*real)(ncclComm_t, ncclTeam_t, int) = nccl_real(NCCL_DO_##name);                      \
        REAL_OF(comm);                                                                             \
        return real != NULL ? real(comm, team, rank) : -1;                                         \
    }

TEAM_RANK(TeamRankToWorld)
TEAM_RANK(TeamRankToLsa)
