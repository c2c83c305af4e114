/* SPDX-License-Identifier: Apache-2.0 */
/* Creation of communicators from unique ids. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

struct ncclComm *comm_create(ncclComm_t *handle, const ncclConfig_t *config,
                             const ncclConfig_t *inherited, ncclResult_t *result) {
    ncclConfig_t own;
    *result = config_read(&own, config, inherited);
    if (*result != ncclSuccess)
        return NULL;
    struct ncclComm *comm = comm_new();
    if (comm == NULL || !cuda_found() || pipe2(comm->wake, O_CLOEXEC) != 0) {
        *result = comm == NULL || cuda_found() ? ncclSystemError : ncclUnhandledCudaError;
        config_free(&own);
        if (comm != NULL)
            comm_retire(comm);
        return NULL;
    }
    comm->config = own;
    comm->device = cuda_current_device();
    /* An abort on another thread may be looking for it. */
    __atomic_store_n(handle, comm, __ATOMIC_RELEASE);
    return comm;
}

void describe_member(struct ncclComm *comm, struct member *own) {
    memset(own, 0, sizeof *own);
    own->host_hash = host_hash();
    comm->bus_id = own->bus_id = cuda_bus_id(comm->device);
    own->device = comm->device;
    own->version = SIMNCCL_VERSION;
    own->rank = comm->rank;
}

/*
 * Two members on one GPU: refused where host hash and bus id are both equal. So ranks on one machine
 * can share its GPU if each has a NCCL_HOSTID of its own; from 2.30 NCCL_MULTI_RANK_GPU_ENABLE=1
 * allows it as well.
 */
static bool may_share_gpu(void) {
    const char *value = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return SIMNCCL_VERSION >= 23000 && value != NULL && atoi(value) == 1;
}

static ncclResult_t check_members(const struct member *members, int count) {
    for (int rank = 0; rank < count; rank++) {
        if (members[rank].version != members[0].version)
            return fail(ncclInvalidUsage,
                        "Mismatched NCCL version detected : rank 0 version %d rank %d version %d",
                        members[0].version, rank, members[rank].version);
        for (int other = 0; other < rank && !may_share_gpu(); other++)
            if (members[other].host_hash == members[rank].host_hash &&
                members[other].bus_id == members[rank].bus_id)
                return fail(ncclInvalidUsage,
                            "Duplicate GPU detected : rank %d and rank %d both on CUDA device %llx",
                            other, rank, (unsigned long long)members[rank].bus_id);
    }
    return ncclSuccess;
}

/* From a table of all members (taken) to a working communicator; blocks until all are there. */
ncclResult_t comm_build(struct ncclComm *comm, struct member *members) {
    comm->members = members;
    RETURN_UNLESS_SUCCESS(check_members(members, comm->count));
    if (cuda_allocate(comm->device, &comm->device_memory, SCRATCH_BYTES) != 0)
        return fail(ncclUnhandledCudaError, "no device memory for a communicator's buffers");
    RETURN_UNLESS_SUCCESS(mesh_connect(comm, members));
    pthread_mutex_lock(&comm->lock);
    bool aborted = comm->aborted;
    comm->connected = !aborted;
    pthread_mutex_unlock(&comm->lock);
    if (aborted)
        return ncclInternalError;
    ras_start();
    return mesh_exchange(comm, EXCHANGE_KEY(EXCHANGE_BUILT, 0), NULL, 0, NULL, NULL);
}

/*
 * The rendezvous. With several ids each member checks in with every root and believes the first: the
 * real one spreads the members over the roots, to the same end.
 */
ncclResult_t comm_await(struct ncclComm *comm, int ids, const ncclUniqueId *id) {
    struct member own;
    struct member *all = calloc((size_t)comm->count, sizeof *all);
    ncclResult_t result = all == NULL ? ncclSystemError : ncclSuccess;
    describe_member(comm, &own);
    comm->hash = bootstrap_hash(&id[0]);
    if (result == ncclSuccess)
        result = mesh_listen(comm, &own);
    for (int one = ids - 1; result == ncclSuccess && one >= 0; one--)
        result = bootstrap_check_in(comm, &id[one], &own, all);
    if (result == ncclSuccess)
        return comm_build(comm, all);
    free(all);
    return result;
}

struct init_argument {
    int ids;
    ncclUniqueId id[];
};

static ncclResult_t init_run(struct job *job) {
    struct init_argument *argument = job->argument;
    return comm_await(job->comm, argument->ids, argument->id);
}

static ncclResult_t init(ncclComm_t *handle, int count, int rank, int ids, const ncclUniqueId *id,
                         const ncclConfig_t *config, int device) {
    ncclResult_t result;
    if (handle == NULL || id == NULL || count < 1 || rank < 0 || rank >= count || ids < 1 ||
        ids > count)
        return group_fail(fail(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, count));
    *handle = NULL;
    log_version();
    struct ncclComm *comm = comm_create(handle, config, NULL, &result);
    if (comm == NULL)
        return group_fail(result);
    comm->rank = rank;
    comm->count = count;
    if (device >= 0)
        comm->device = device;
    struct job *job =
        job_new(comm, init_run, NULL, sizeof(struct init_argument) + (size_t)ids * sizeof *id);
    struct init_argument *argument = job->argument;
    argument->ids = ids;
    memcpy(argument->id, id, (size_t)ids * sizeof *id);
    job->handle = handle;
    return group_add_job(job);
}

API(ncclResult_t, ncclCommInitRank, (ncclComm_t * comm, int count, ncclUniqueId id, int rank)) {
    return init(comm, count, rank, 1, &id, NULL, -1);
}

API(ncclResult_t, ncclCommInitRankConfig,
    (ncclComm_t * comm, int count, ncclUniqueId id, int rank, ncclConfig_t *config)) {
    return init(comm, count, rank, 1, &id, config, -1);
}

API(ncclResult_t, ncclCommInitRankScalable,
    (ncclComm_t * comm, int count, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config)) {
    return init(comm, count, rank, ids, id, config, -1);
}

/* Takes its id through the exported ncclGetUniqueId, as the real one does by its PLT. */
API(ncclResult_t, ncclCommInitAll, (ncclComm_t * comm, int count, const int *devices)) {
    ncclUniqueId id;
    if (comm == NULL || count < 1)
        return fail(ncclInvalidArgument, "Invalid device count requested : %d", count);
    RETURN_UNLESS_SUCCESS(ncclGetUniqueId(&id));
    RETURN_UNLESS_SUCCESS(group_start());
    for (int rank = 0; rank < count; rank++)
        init(&comm[rank], count, rank, 1, &id, NULL, devices == NULL ? rank : devices[rank]);
    return group_end();
}
