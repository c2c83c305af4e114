/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of communicators: finalize, destroy, abort, revoke.
 *
 * - Finalize and destroy wait for the operations already enqueued and then for all other members to
 *   come that far: destroying is collective in effect.
 * - All of them wait until no captured graph refers to the communicator (pytorch#115388: destroying
 *   hangs with live graphs).
 * - Abort ends what hangs; the other members see a closed connection: ncclRemoteError.
 */
#include "sim.h"

/* What runs on streams ends now, whatever it waits for; what is still enqueued will not begin. */
void comm_stop_operations(struct ncclComm *comm) {
    pthread_mutex_lock(&comm->lock);
    comm->aborted = true;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    mesh_shut(comm);
}

void comm_tear_down(struct ncclComm *comm) {
    pthread_mutex_lock(&comm->lock);
    comm->stopping = true;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    mesh_shut(comm);
    pthread_mutex_lock(&comm->lock);
    while (comm->running > 0)
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    proxy_stop(comm);
    mesh_close(comm);
    registrations_free(comm);
    if (comm->device_memory != NULL)
        cuda_free(comm->device, comm->device_memory);
    comm->device_memory = NULL;
}

static bool all_said_goodbye(const struct ncclComm *comm) {
    for (int rank = 0; rank < comm->count; rank++)
        if (rank != comm->rank && !comm->peers[rank].said_goodbye && !comm->peers[rank].gone)
            return false;
    return true;
}

static void say_goodbye(struct ncclComm *comm) {
    struct header head = {0};
    for (int rank = 0; rank < comm->count; rank++)
        if (rank != comm->rank)
            mesh_send(comm, rank, MESSAGE_GOODBYE, &head, NULL);
}

static ncclResult_t finalize_run(struct job *job) {
    struct ncclComm *comm = job->comm;
    pthread_mutex_lock(&comm->lock);
    while ((comm->pending > 0 || comm->persistent > 0) && !comm->aborted)
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    say_goodbye(comm);
    pthread_mutex_lock(&comm->lock);
    while (!all_said_goodbye(comm) && !comm->aborted)
        pthread_cond_wait(&comm->changed, &comm->lock);
    comm->finalized = true;
    pthread_mutex_unlock(&comm->lock);
    return ncclSuccess;
}

static ncclResult_t destroy_run(struct job *job) {
    struct ncclComm *comm = job->comm;
    pthread_mutex_lock(&comm->lock);
    while (comm->jobs > 0)
        pthread_cond_wait(&comm->changed, &comm->lock);
    bool revoked = comm->revoked;
    bool finalize = comm->connected && !comm->finalize_called && !revoked && !comm->aborted;
    pthread_mutex_unlock(&comm->lock);
    if (finalize)
        finalize_run(job);
    else if (revoked && comm->connected)
        say_goodbye(comm);
    pthread_mutex_lock(&comm->lock);
    while (comm->persistent > 0)
        pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    comm_tear_down(comm);
    comm_retire(comm);
    return ncclSuccess;
}

static ncclResult_t end_comm(struct ncclComm *comm) {
    struct job *job = job_new(comm, destroy_run, NULL, 0);
    job->ending = true;
    job->blocking = true;
    comm_release(comm);
    return group_add_job(job);
}

static bool first_end(struct ncclComm *comm) {
    pthread_mutex_lock(&comm->lock);
    bool first = !comm->destroy_called;
    comm->destroy_called = true;
    pthread_mutex_unlock(&comm->lock);
    if (!first) {
        warn("comm %p has already been destroyed", (void *)comm);
        comm_release(comm);
    }
    return first;
}

API(ncclResult_t, ncclCommFinalize, (ncclComm_t handle)) {
    if (handle == NULL)
        return ncclSuccess;
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return group_fail(ncclInvalidArgument);
    ncclResult_t result = comm_ready(comm);
    pthread_mutex_lock(&comm->lock);
    if (result == ncclSuccess && comm->revoked)
        result = ncclInvalidUsage;
    if (result == ncclSuccess && comm->finalize_called)
        result = ncclInvalidArgument;
    if (result == ncclSuccess)
        comm->finalize_called = true;
    pthread_mutex_unlock(&comm->lock);
    if (result == ncclSuccess)
        result = group_add_job(job_new(comm, finalize_run, NULL, 0));
    else
        group_fail(result);
    comm_release(comm);
    return result;
}

API(ncclResult_t, ncclCommDestroy, (ncclComm_t handle)) {
    if (handle == NULL)
        return ncclSuccess;
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL || !first_end(comm))
        return group_fail(ncclInvalidArgument);
    return end_comm(comm);
}

API(ncclResult_t, ncclCommAbort, (ncclComm_t handle)) {
    if (handle == NULL)
        return ncclSuccess;
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return group_fail(ncclInvalidArgument);
    comm_stop_operations(comm); /* also ends a destroy that hangs on another thread */
    if (!first_end(comm))
        return group_fail(ncclInvalidArgument);
    return end_comm(comm);
}

#if SIMNCCL_VERSION >= 22807
static ncclResult_t revoke_run(struct job *job) {
    struct ncclComm *comm = job->comm;
    pthread_mutex_lock(&comm->lock);
    while (comm->running > 0)
        pthread_cond_wait(&comm->changed, &comm->lock);
    comm->async = comm->async == ncclRemoteError ? ncclSuccess : comm->async;
    pthread_mutex_unlock(&comm->lock);
    return ncclSuccess;
}

/* Local: other members' operations go on hanging until they revoke, too. */
API(ncclResult_t, ncclCommRevoke, (ncclComm_t handle, int flags)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    if (flags != NCCL_REVOKE_DEFAULT) {
        comm_release(comm);
        return group_fail(ncclInvalidArgument);
    }
    pthread_mutex_lock(&comm->lock);
    comm->revoked = true;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    ncclResult_t result = group_add_job(job_new(comm, revoke_run, NULL, 0));
    comm_release(comm);
    return result;
}
#endif
