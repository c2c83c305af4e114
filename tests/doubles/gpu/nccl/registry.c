/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The live communicators. Every call looks its handle up here, so that a handle of somebody else's
 * making, or one already destroyed, is refused with words instead of being followed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "sim.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ncclComm *live;
static uint64_t serials;

void registry_lock(void) { pthread_mutex_lock(&lock); }
void registry_unlock(void) { pthread_mutex_unlock(&lock); }
struct ncclComm *registry_first(void) { return live; }

struct ncclComm *comm_new(void) {
    struct ncclComm *comm = calloc(1, sizeof *comm);
    if (comm == NULL)
        return NULL;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_mutex_init(&comm->launching, NULL);
    pthread_cond_init(&comm->changed, NULL);
    comm->listener = comm->unix_socket = comm->wake[0] = comm->wake[1] = -1;
    comm->references = 1;
    pthread_mutex_lock(&lock);
    comm->serial = ++serials;
    comm->next = live;
    live = comm;
    pthread_mutex_unlock(&lock);
    return comm;
}

struct ncclComm *comm_hold(ncclComm_t handle) {
    struct ncclComm *comm;
    pthread_mutex_lock(&lock);
    for (comm = live; comm != NULL && comm != handle; comm = comm->next)
        ;
    if (comm != NULL)
        comm->references++;
    pthread_mutex_unlock(&lock);
    if (comm == NULL)
        warn("Error: corrupted comm object detected: %p is no live communicator", (void *)handle);
    return comm;
}

void comm_keep(struct ncclComm *comm) {
    pthread_mutex_lock(&lock);
    comm->references++;
    pthread_mutex_unlock(&lock);
}

void comm_release(struct ncclComm *comm) {
    pthread_mutex_lock(&lock);
    bool last = --comm->references == 0;
    pthread_mutex_unlock(&lock);
    if (!last)
        return;
    config_free(&comm->config);
    free(comm->members);
    pthread_cond_destroy(&comm->changed);
    pthread_mutex_destroy(&comm->launching);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}

void comm_retire(struct ncclComm *comm) {
    pthread_mutex_lock(&lock);
    for (struct ncclComm **place = &live; *place != NULL; place = &(*place)->next)
        if (*place == comm) {
            *place = comm->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    comm_release(comm);
}

/* Errors stick: the first one is what ncclCommGetAsyncError tells from then on. */
void comm_set_error(struct ncclComm *comm, ncclResult_t result) {
    pthread_mutex_lock(&comm->lock);
    if (comm->async == ncclSuccess || comm->async == ncclInProgress)
        comm->async = result;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

/*
 * Whether the communicator can be used now. Asks through its own exported function, as the real
 * library does (it has a PLT slot for ncclCommGetAsyncError): an interposer sees a real handle here.
 */
ncclResult_t comm_ready(struct ncclComm *comm) {
    ncclResult_t state = ncclSuccess;
    RETURN_UNLESS_SUCCESS(ncclCommGetAsyncError(comm, &state));
    if (state == ncclInProgress)
        return fail(
            ncclInvalidArgument,
            "Attempt to use communicator before the previous operation returned ncclSuccess");
    return state;
}

API(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t handle, ncclResult_t *error)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL || error == NULL) {
        if (comm != NULL)
            comm_release(comm);
        return ncclInvalidArgument;
    }
    pthread_mutex_lock(&comm->lock);
    *error = comm->async;
    pthread_mutex_unlock(&comm->lock);
    comm_release(comm);
    return ncclSuccess;
}

static ncclResult_t tell(ncclComm_t handle, int *value, size_t field) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    ncclResult_t result = value == NULL ? ncclInvalidArgument : comm_ready(comm);
    if (result == ncclSuccess)
        *value = *(const int *)((const char *)comm + field);
    comm_release(comm);
    return result;
}

API(ncclResult_t, ncclCommCount, (const ncclComm_t comm, int *count)) {
    return tell(comm, count, offsetof(struct ncclComm, count));
}

API(ncclResult_t, ncclCommCuDevice, (const ncclComm_t comm, int *device)) {
    return tell(comm, device, offsetof(struct ncclComm, device));
}

API(ncclResult_t, ncclCommUserRank, (const ncclComm_t comm, int *rank)) {
    return tell(comm, rank, offsetof(struct ncclComm, rank));
}
