/* SPDX-License-Identifier: Apache-2.0 */
/* The public operations: check, resolve the reduction, hand to the group. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static bool is_reduction(enum operation_kind kind) {
    return kind == OPERATION_ALLREDUCE || kind == OPERATION_REDUCE ||
           kind == OPERATION_REDUCESCATTER;
}

static ncclResult_t usable(struct ncclComm *comm) {
    RETURN_UNLESS_SUCCESS(comm_ready(comm));
    pthread_mutex_lock(&comm->lock);
    bool usable = !comm->revoked && !comm->suspended && !comm->finalize_called && comm->connected;
    pthread_mutex_unlock(&comm->lock);
    return usable ? ncclSuccess
                  : fail(ncclInvalidUsage, "communicator is finalized, revoked or suspended");
}

static ncclResult_t checked(struct ncclComm *comm, struct operation *operation, ncclRedOp_t op) {
    RETURN_UNLESS_SUCCESS(usable(comm));
    if (type_size(operation->type) == 0)
        return fail(ncclInvalidArgument, "invalid type %d", (int)operation->type);
    if (operation->root < 0 || operation->root >= comm->count)
        return fail(ncclInvalidArgument, "invalid root or peer %d (of %d ranks)", operation->root,
                    comm->count);
    if (!is_reduction(operation->kind))
        return ncclSuccess;
    RETURN_UNLESS_SUCCESS(user_op_resolve(comm, op, operation->type, &operation->reduction));
    if (!reduction_supported(operation->type, &operation->reduction))
        return fail(ncclInvalidArgument, "reductions of type %d are not simulated",
                    (int)operation->type);
    return ncclSuccess;
}

static ncclResult_t submit(ncclComm_t handle, const struct operation *operation, ncclRedOp_t op,
                           nccl_stream stream) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return group_fail(ncclInvalidArgument);
    struct operation *own = malloc(sizeof *own);
    if (own == NULL)
        abort();
    *own = *operation;
    ncclResult_t result = checked(comm, own, op);
    bool point_to_point = own->kind >= OPERATION_SEND;
    if (result != ncclSuccess || (own->count == 0 && !point_to_point)) {
        free(own->waits);
        free(own);
        group_fail(result); /* an empty collective is dropped, as in the real one */
    } else {
        result = group_add_operation(comm, own, stream);
    }
    comm_release(comm);
    return result;
}

/* Fills an operation from the arguments of a public function of the same names. */
#define OPERATION(kind_, ...)                                                                      \
    (&(struct operation){.kind = OPERATION_##kind_,                                                \
                         .send = send,                                                             \
                         .recv = recv,                                                             \
                         .count = count,                                                           \
                         .type = type,                                                             \
                         __VA_ARGS__})

API(ncclResult_t, ncclAllReduce,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
     ncclComm_t comm, nccl_stream stream)) {
    return submit(comm, OPERATION(ALLREDUCE, .root = 0), op, stream);
}

API(ncclResult_t, ncclBroadcast,
    (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
     nccl_stream stream)) {
    return submit(comm, OPERATION(BROADCAST, .root = root), ncclSum, stream);
}

API(ncclResult_t, ncclReduce,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
     ncclComm_t comm, nccl_stream stream)) {
    return submit(comm, OPERATION(REDUCE, .root = root), op, stream);
}

API(ncclResult_t, ncclAllGather,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
     nccl_stream stream)) {
    return submit(comm, OPERATION(ALLGATHER, .root = 0), ncclSum, stream);
}

API(ncclResult_t, ncclReduceScatter,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
     ncclComm_t comm, nccl_stream stream)) {
    return submit(comm, OPERATION(REDUCESCATTER, .root = 0), op, stream);
}

/* Through the exported ncclBroadcast, as the real one: an interposer is entered with a real handle. */
API(ncclResult_t, ncclBcast,
    (void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
     nccl_stream stream)) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

API(ncclResult_t, ncclSend,
    (const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
     nccl_stream stream)) {
    void *recv = NULL;
    return submit(comm, OPERATION(SEND, .root = peer), ncclSum, stream);
}

API(ncclResult_t, ncclRecv,
    (void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
     nccl_stream stream)) {
    const void *send = NULL;
    return submit(comm, OPERATION(RECV, .root = peer), ncclSum, stream);
}

#if SIMNCCL_VERSION >= 22803
API(ncclResult_t, ncclAlltoAll,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
     nccl_stream stream)) {
    return submit(comm, OPERATION(ALLTOALL, .root = 0), ncclSum, stream);
}

API(ncclResult_t, ncclGather,
    (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
     nccl_stream stream)) {
    return submit(comm, OPERATION(GATHER, .root = root), ncclSum, stream);
}

API(ncclResult_t, ncclScatter,
    (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
     nccl_stream stream)) {
    return submit(comm, OPERATION(SCATTER, .root = root), ncclSum, stream);
}

#endif

#if SIMNCCL_VERSION >= 22902
API(ncclResult_t, ncclPutSignal,
    (const void *local, size_t count, ncclDataType_t type, int peer, ncclWindow_t window,
     size_t offset, int signal, int context, unsigned int flags, ncclComm_t comm,
     nccl_stream stream)) {
    const void *send = local;
    void *recv = NULL;
    struct ncclWindow_vidmem *known = window_find(window);
    if (known == NULL || known->comm != comm || flags != 0)
        return group_fail(fail(ncclInvalidArgument, "no such window, or flags %u", flags));
    return submit(comm,
                  OPERATION(PUT, .root = peer, .window = known->ordinal, .offset = offset,
                            .signal = signal, .context = context),
                  ncclSum, stream);
}

API(ncclResult_t, ncclSignal,
    (int peer, int signal, int context, unsigned int flags, ncclComm_t comm, nccl_stream stream)) {
    if (flags != 0)
        return group_fail(ncclInvalidArgument);
    return submit(comm,
                  &(struct operation){
                      .kind = OPERATION_NOTIFY, .root = peer, .signal = signal, .context = context},
                  ncclSum, stream);
}

API(ncclResult_t, ncclWaitSignal,
    (int count, ncclWaitSignalDesc_t *signals, ncclComm_t comm, nccl_stream stream)) {
    int members = 0;
    RETURN_UNLESS_SUCCESS(pncclCommCount(comm, &members));
    for (int one = 0; one < count; one++)
        if (signals[one].peer < 0 || signals[one].peer >= members)
            return group_fail(fail(ncclInvalidArgument, "no rank %d", signals[one].peer));
    struct operation operation = {.kind = OPERATION_WAIT, .wait_count = count};
    operation.waits = calloc((size_t)count + 1, sizeof *signals);
    if (operation.waits == NULL)
        abort();
    if (count > 0)
        memcpy(operation.waits, signals, (size_t)count * sizeof *signals);
    return submit(comm, &operation, ncclSum, stream);
}
#endif

#if SIMNCCL_VERSION >= 23203
static bool config_valid(const ncclCollConfig_t *config) {
    if (config == NULL ||
        (config->size >= offsetof(ncclCollConfig_t, ext) && config->magic == NCCL_API_MAGIC))
        return true;
    warn("ncclCollConfig_t argument not initialized via NCCL_COLLCONFIG_INITIALIZER");
    return false;
}

static nccl_event launch_event(const ncclCollConfig_t *config) {
    return config != NULL && config->size >= sizeof *config ? config->launchCompletionEvent : NULL;
}

API(ncclResult_t, ncclAllReduceConfig,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
     ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config)) {
    if (!config_valid(config))
        return group_fail(ncclInvalidArgument);
    return submit(comm, OPERATION(ALLREDUCE, .root = 0, .launched = launch_event(config)), op,
                  stream);
}

API(ncclResult_t, ncclBroadcastConfig,
    (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
     nccl_stream stream, const ncclCollConfig_t *config)) {
    if (!config_valid(config))
        return group_fail(ncclInvalidArgument);
    return submit(comm, OPERATION(BROADCAST, .root = root, .launched = launch_event(config)),
                  ncclSum, stream);
}

API(ncclResult_t, ncclReduceConfig,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
     ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config)) {
    if (!config_valid(config))
        return group_fail(ncclInvalidArgument);
    return submit(comm, OPERATION(REDUCE, .root = root, .launched = launch_event(config)), op,
                  stream);
}

API(ncclResult_t, ncclAllGatherConfig,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
     nccl_stream stream, const ncclCollConfig_t *config)) {
    if (!config_valid(config))
        return group_fail(ncclInvalidArgument);
    return submit(comm, OPERATION(ALLGATHER, .root = 0, .launched = launch_event(config)), ncclSum,
                  stream);
}

API(ncclResult_t, ncclReduceScatterConfig,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
     ncclComm_t comm, nccl_stream stream, const ncclCollConfig_t *config)) {
    if (!config_valid(config))
        return group_fail(ncclInvalidArgument);
    return submit(comm, OPERATION(REDUCESCATTER, .root = 0, .launched = launch_event(config)), op,
                  stream);
}

API(ncclResult_t, ncclAlltoAllConfig,
    (const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
     nccl_stream stream, const ncclCollConfig_t *config)) {
    if (!config_valid(config))
        return group_fail(ncclInvalidArgument);
    return submit(comm, OPERATION(ALLTOALL, .root = 0, .launched = launch_event(config)), ncclSum,
                  stream);
}

API(ncclResult_t, ncclGatherConfig,
    (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
     nccl_stream stream, const ncclCollConfig_t *config)) {
    if (!config_valid(config))
        return group_fail(ncclInvalidArgument);
    return submit(comm, OPERATION(GATHER, .root = root, .launched = launch_event(config)), ncclSum,
                  stream);
}

API(ncclResult_t, ncclScatterConfig,
    (const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
     nccl_stream stream, const ncclCollConfig_t *config)) {
    if (!config_valid(config))
        return group_fail(ncclInvalidArgument);
    return submit(comm, OPERATION(SCATTER, .root = root, .launched = launch_event(config)), ncclSum,
                  stream);
}
#endif
