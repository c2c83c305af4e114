/* SPDX-License-Identifier: Apache-2.0 */
/* ncclCommSuspend, Resume, MemStats (2.29.7): device memory goes, connections and threads stay. */
#include "sim.h"

#if SIMNCCL_VERSION >= 22907
/* Waits for all members; counted as running, so that an abort on another thread waits for its end. */
static ncclResult_t all_together(struct ncclComm *comm) {
    pthread_mutex_lock(&comm->lock);
    uint64_t key = EXCHANGE_KEY(EXCHANGE_OTHER, comm->exchanges++);
    bool possible = comm->connected && !comm->aborted && !comm->stopping;
    comm->running += possible;
    pthread_mutex_unlock(&comm->lock);
    if (!possible)
        return ncclInternalError;
    ncclResult_t result = mesh_exchange(comm, key, NULL, 0, NULL, NULL);
    pthread_mutex_lock(&comm->lock);
    comm->running--;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    return result;
}

/* Needs the other members: a barrier over the old connections (so no means of moving away). */
API(ncclResult_t, ncclCommSuspend, (ncclComm_t handle, int flags)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    ncclResult_t result = comm_ready(comm);
    if (result == ncclSuccess && flags != NCCL_SUSPEND_MEM)
        result = ncclInvalidArgument;
    if (result == ncclSuccess && (comm->shares || comm->suspended))
        result = fail(ncclInvalidUsage, comm->suspended ? "already suspended"
                                                        : "the communicator shares its resources");
    if (result == ncclSuccess)
        result = all_together(comm);
    if (result == ncclSuccess && cuda_free(comm->device, comm->device_memory) != 0)
        result = ncclUnhandledCudaError;
    if (result == ncclSuccess) {
        pthread_mutex_lock(&comm->lock);
        comm->device_memory = NULL;
        comm->suspended = true;
        pthread_mutex_unlock(&comm->lock);
    }
    comm_release(comm);
    return result;
}

API(ncclResult_t, ncclCommResume, (ncclComm_t handle)) {
    void *memory = NULL;
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    ncclResult_t result = comm_ready(comm);
    if (result == ncclSuccess && !comm->suspended)
        result = ncclInvalidUsage;
    if (result == ncclSuccess && cuda_allocate(comm->device, &memory, SCRATCH_BYTES) != 0)
        result = ncclUnhandledCudaError;
    if (result == ncclSuccess) {
        pthread_mutex_lock(&comm->lock);
        comm->device_memory = memory;
        comm->suspended = false;
        pthread_mutex_unlock(&comm->lock);
        result = all_together(comm);
    }
    comm_release(comm);
    return result;
}

API(ncclResult_t, ncclCommMemStats, (ncclComm_t handle, ncclCommMemStat_t stat, uint64_t *value)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    ncclResult_t result = value == NULL ? ncclInvalidArgument : ncclSuccess;
    pthread_mutex_lock(&comm->lock);
    if (result == ncclSuccess)
        switch (stat) {
        case ncclStatGpuMemSuspend:
        case ncclStatGpuMemTotal:
            *value = SCRATCH_BYTES;
            break;
        case ncclStatGpuMemSuspended:
            *value = comm->suspended;
            break;
        case ncclStatGpuMemPersist:
            *value = 0;
            break;
        default:
            result = ncclInvalidArgument;
        }
    pthread_mutex_unlock(&comm->lock);
    comm_release(comm);
    return result;
}
#endif
