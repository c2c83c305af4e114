/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device API's host side (2.28): there are no device kernels here to use any of it. A device
 * communicator can be made and destroyed; of the structure it is returned in only the first two
 * fields, rank and count, are filled. Pointers exist for one's own part of a window; what needs
 * NVLink, multicast, GIN or CFT is refused.
 */
#include <string.h>

#include "sim.h"

#if SIMNCCL_VERSION >= 22803
static ncclResult_t refused(const char *what) {
    return fail(ncclInvalidUsage, "%s is not simulated", what);
}

static ncclTeam_t team(ncclComm_t handle, bool alone) {
    ncclTeam_t result = {0, 0, 0};
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return result;
    result = alone ? (ncclTeam_t){1, 0, 1} : (ncclTeam_t){comm->count, comm->rank, 1};
    comm_release(comm);
    return result;
}

API(ncclTeam_t, ncclTeamWorld, (ncclComm_t comm)) { return team(comm, false); }

/* Each member is a node of its own, with no load/store access to another. */
API(ncclTeam_t, ncclTeamLsa, (ncclComm_t comm)) { return team(comm, true); }

API(ncclTeam_t, ncclTeamRail, (ncclComm_t comm)) { return team(comm, false); }

API(int, ncclTeamRankToWorld, (ncclComm_t comm, ncclTeam_t of, int rank)) {
    return team(comm, false).rank + (rank - of.rank) * of.stride;
}

API(int, ncclTeamRankToLsa, (ncclComm_t comm, ncclTeam_t of, int rank)) {
    (void)comm;
    return (rank - of.rank) * of.stride;
}

static ncclResult_t count_device_comm(ncclComm_t handle, int change) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    pthread_mutex_lock(&comm->lock);
    ncclResult_t result = comm->device_comms + change < 0 ? ncclInvalidArgument : ncclSuccess;
    if (result == ncclSuccess)
        comm->device_comms += change;
    pthread_mutex_unlock(&comm->lock);
    comm_release(comm);
    return result;
}

API(ncclResult_t, ncclDevCommCreate,
    (ncclComm_t comm, const void *requirements, void *device_comm)) {
    if (requirements == NULL || device_comm == NULL)
        return ncclInvalidArgument;
    RETURN_UNLESS_SUCCESS(count_device_comm(comm, 1));
    ncclTeam_t world = team(comm, false);
    memcpy(device_comm, &(int[2]){world.rank, world.nRanks}, 2 * sizeof(int));
    return ncclSuccess;
}

API(ncclResult_t, ncclDevCommDestroy, (ncclComm_t comm, const void *device_comm)) {
    return device_comm == NULL ? ncclInvalidArgument : count_device_comm(comm, -1);
}

API(ncclResult_t, ncclLsaBarrierCreateRequirement,
    (ncclTeam_t of, int barriers, void *handle, void *requirement)) {
    (void)of, (void)barriers, (void)handle, (void)requirement;
    return refused("an LSA barrier");
}

API(ncclResult_t, ncclGinBarrierCreateRequirement,
    (ncclComm_t comm, ncclTeam_t of, int barriers, void *handle, void *requirement)) {
    (void)comm, (void)of, (void)barriers, (void)handle, (void)requirement;
    return refused("a GIN barrier");
}

API(int, ncclLLA2ACalcSlots, (int elements, int element_size)) {
    return elements * ((element_size + 7) / 8);
}

API(ncclResult_t, ncclLLA2ACreateRequirement,
    (int blocks, int slots, void *handle, void *requirement)) {
    (void)blocks, (void)slots, (void)handle, (void)requirement;
    return refused("LLA2A");
}

API(ncclResult_t, ncclGinOutboxCreateRequirement,
    (int blocks, int size_log2, void *handle, void *requirement)) {
    (void)blocks, (void)size_log2, (void)handle, (void)requirement;
    return refused("a GIN outbox");
}

API(ncclResult_t, ncclGinInboxA2ACreateRequirement,
    (ncclTeam_t peers, int blocks, int size_log2, void *handle, void *requirement)) {
    (void)peers, (void)blocks, (void)size_log2, (void)handle, (void)requirement;
    return refused("a GIN inbox");
}
#endif

#if SIMNCCL_VERSION >= 22902
struct properties_begin {
    size_t size;
    unsigned int magic, version;
    int rank, count, device, nvml_device;
    bool device_api, multimem;
};

API(ncclResult_t, ncclCommQueryProperties, (ncclComm_t handle, void *properties)) {
    struct properties_begin *told = properties;
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    bool valid = told != NULL && told->magic == NCCL_API_MAGIC && told->size >= sizeof *told;
    if (valid) {
        told->rank = comm->rank;
        told->count = comm->count;
        told->device = told->nvml_device = comm->device;
        told->device_api = told->multimem = false;
    }
    comm_release(comm);
    return valid ? ncclSuccess : ncclInvalidArgument;
}

static ncclResult_t own_part(ncclWindow_t handle, size_t offset, bool own, void **pointer) {
    struct ncclWindow_vidmem *window = window_find(handle);
    if (window == NULL || pointer == NULL || offset >= window->size)
        return ncclInvalidArgument;
    *pointer = own ? (char *)window->buffer + offset : NULL; /* NULL: not reachable by load/store */
    return ncclSuccess;
}

API(ncclResult_t, ncclGetLsaDevicePointer,
    (ncclWindow_t window, size_t offset, int rank, void **pointer)) {
    return rank == 0 ? own_part(window, offset, true, pointer) : ncclInvalidArgument;
}

API(ncclResult_t, ncclGetPeerDevicePointer,
    (ncclWindow_t window, size_t offset, int peer, void **pointer)) {
    struct ncclWindow_vidmem *found = window_find(window);
    if (found == NULL || peer < 0 || peer >= found->comm->count)
        return ncclInvalidArgument;
    return own_part(window, offset, peer == found->comm->rank, pointer);
}

API(ncclResult_t, ncclGetLsaMultimemDevicePointer,
    (ncclWindow_t window, size_t offset, void **pointer)) {
    (void)window, (void)offset, (void)pointer;
    return refused("multicast");
}

API(ncclResult_t, ncclGetMultimemDevicePointer,
    (ncclWindow_t window, size_t offset, void *multimem, void **pointer)) {
    (void)window, (void)offset, (void)multimem, (void)pointer;
    return refused("multicast");
}
#endif

#if SIMNCCL_VERSION >= 23203
API(ncclTeam_t, ncclTeamCft, (ncclComm_t comm, int mode)) {
    (void)mode;
    return team(comm, true);
}

API(ncclTeam_t, ncclTeamCftMultimem, (ncclComm_t comm)) { return team(comm, true); }

API(ncclResult_t, ncclGetMultimemDeviceLeInfo,
    (ncclWindow_t window, size_t offset, uint32_t *id, size_t *le_offset)) {
    (void)window, (void)offset, (void)id, (void)le_offset;
    return refused("CFT");
}

API(ncclResult_t, ncclGetCftDeviceLeInfo,
    (ncclWindow_t window, size_t offset, int peer, ncclTeam_t of, uint32_t *id,
     size_t *le_offset)) {
    (void)window, (void)offset, (void)peer, (void)of, (void)id, (void)le_offset;
    return refused("CFT");
}

API(ncclResult_t, ncclGetPeerDeviceLeInfo,
    (ncclWindow_t window, size_t offset, int peer, uint32_t *id, size_t *le_offset)) {
    (void)window, (void)offset, (void)peer, (void)id, (void)le_offset;
    return refused("CFT");
}
#endif
