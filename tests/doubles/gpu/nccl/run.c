/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What runs on the stream's thread. A collective: tell every member that one has come, with what
 * that member needs of one's data; wait until all have; combine in the order of ranks, so that
 * results are the same bits on every run. Waits end only by the members' coming or by abort and
 * revoke; a member that died is the proxy's to report, and its collective goes on hanging, as the
 * real kernel does.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static uint64_t signature(const struct operation *operation) {
    return (uint64_t)operation->kind << 56 | (uint64_t)operation->type << 48 |
           (uint64_t)(operation->reduction.op & 0xff) << 40 |
           (uint64_t)(operation->root & 0xff) << 32;
}

/* The part of this member's input that `peer` needs. */
static size_t contribution(const struct ncclComm *comm, const struct operation *operation, int peer,
                           size_t *offset) {
    size_t bytes = operation->count * type_size(operation->type);
    *offset = 0;
    switch (operation->kind) {
    case OPERATION_ALLREDUCE:
    case OPERATION_ALLGATHER:
        return bytes;
    case OPERATION_REDUCE:
    case OPERATION_GATHER:
        return peer == operation->root ? bytes : 0;
    case OPERATION_BROADCAST:
        return comm->rank == operation->root ? bytes : 0;
    case OPERATION_SCATTER:
        *offset = bytes * (size_t)peer;
        return comm->rank == operation->root ? bytes : 0;
    default: /* reduce-scatter, all to all */
        *offset = bytes * (size_t)peer;
        return bytes;
    }
}

static void combine_reduced(const struct ncclComm *comm, const struct operation *operation,
                            struct message **parts) {
    size_t bytes = operation->count * type_size(operation->type);
    void *sum = malloc(bytes + 1);
    if (sum == NULL)
        abort();
    memcpy(sum, parts[0]->payload, bytes);
    for (int rank = 1; rank < comm->count; rank++)
        reduction_add(&operation->reduction, operation->type, sum, parts[rank]->payload,
                      operation->count);
    reduction_end(&operation->reduction, operation->type, sum, operation->count, comm->count);
    memcpy(operation->recv, sum, bytes);
    free(sum);
}

static void combine(const struct ncclComm *comm, const struct operation *operation,
                    struct message **parts) {
    size_t bytes = operation->count * type_size(operation->type);
    bool root = comm->rank == operation->root;
    switch (operation->kind) {
    case OPERATION_REDUCE:
        if (!root)
            return;
        /* fall through */
    case OPERATION_ALLREDUCE:
    case OPERATION_REDUCESCATTER:
        combine_reduced(comm, operation, parts);
        return;
    case OPERATION_BROADCAST:
    case OPERATION_SCATTER:
        memcpy(operation->recv, parts[operation->root]->payload, bytes);
        return;
    case OPERATION_GATHER:
        if (!root)
            return;
        /* fall through */
    default:
        for (int rank = 0; rank < comm->count; rank++)
            memcpy((char *)operation->recv + bytes * (size_t)rank, parts[rank]->payload, bytes);
    }
}

/* Under the lock: all members' messages for this collective, or false when stopped. */
static bool await_all(struct ncclComm *comm, uint64_t key, struct message **parts) {
    for (int rank = 0; rank < comm->count; rank++)
        while ((parts[rank] = queue_take(&comm->peers[rank].collectives, &key)) == NULL) {
            if (interrupted(comm))
                return false;
            pthread_cond_wait(&comm->changed, &comm->lock);
        }
    return true;
}

/* The real one would hang or give wrong data; here the difference is named. */
static bool all_alike(struct ncclComm *comm, const struct header *own, struct message **parts) {
    for (int rank = 0; rank < comm->count; rank++) {
        const struct header *theirs = &parts[rank]->head;
        if (theirs->signature == own->signature && theirs->detail[0] == own->detail[0])
            continue;
        warn("collective %llu of communicator %llx: rank %d calls %llx of %llu elements, rank %d "
             "calls %llx of %llu",
             (unsigned long long)own->key, (unsigned long long)comm->hash, comm->rank,
             (unsigned long long)own->signature, (unsigned long long)own->detail[0], rank,
             (unsigned long long)theirs->signature, (unsigned long long)theirs->detail[0]);
        return false;
    }
    return true;
}

/* A copy of the input times this member's scalar, or NULL where the operator has none. */
static void *scaled(const struct ncclComm *comm, const struct operation *operation) {
    size_t count = operation->count;
    if (operation->reduction.op != ncclNumOps)
        return NULL;
    if (operation->kind == OPERATION_REDUCESCATTER)
        count *= (size_t)comm->count;
    void *values = malloc(count * type_size(operation->type));
    if (values == NULL)
        abort();
    memcpy(values, operation->send, count * type_size(operation->type));
    reduction_scale(&operation->reduction, operation->type, values, count);
    return values;
}

static void run_collective(struct ncclComm *comm, const struct operation *operation) {
    void *own = scaled(comm, operation);
    const char *input = own ? own : operation->send;
    struct header head = {.signature = signature(operation), .detail = {operation->count}};
    struct message **parts = calloc((size_t)comm->count, sizeof(struct message *));
    if (parts == NULL)
        abort();
    pthread_mutex_lock(&comm->lock);
    head.key = comm->collectives++;
    pthread_mutex_unlock(&comm->lock);
    for (int rank = 0; rank < comm->count; rank++) {
        size_t offset;
        head.bytes = contribution(comm, operation, rank, &offset);
        mesh_send(comm, rank, MESSAGE_COLLECTIVE, &head, input + offset);
    }
    free(own);
    pthread_mutex_lock(&comm->lock);
    bool all_here = await_all(comm, head.key, parts);
    pthread_mutex_unlock(&comm->lock);
    if (all_here && all_alike(comm, &head, parts))
        combine(comm, operation, parts);
    else if (all_here)
        comm_set_error(comm, ncclInvalidUsage);
    for (int rank = 0; rank < comm->count; rank++)
        free(parts[rank]);
    free(parts);
}

/* ---- sends and receives of one group, all at once ---- */

static void receive(struct ncclComm *comm, struct operation *operation, struct message *message) {
    struct header ack = {0};
    size_t bytes = operation->count * type_size(operation->type);
    size_t got = message->head.bytes;
    if (got != bytes)
        warn("receive of %zu bytes from rank %d met a send of %zu", bytes, operation->root, got);
    memcpy(operation->recv, message->payload, got < bytes ? got : bytes);
    free(message);
    mesh_send(comm, operation->root, MESSAGE_ACK, &ack, NULL);
    if (got != bytes)
        comm_set_error(comm, ncclInvalidUsage);
}

static bool is_p2p(const struct operation *operation) {
    return operation->kind == OPERATION_SEND || operation->kind == OPERATION_RECV;
}

/* The earliest receive not yet served for whose peer a message is there. */
static struct operation *next_receive(struct ncclComm *comm, struct operation *operations,
                                      struct message **message) {
    for (struct operation *one = operations; one != NULL; one = one->next)
        if (one->kind == OPERATION_RECV && !one->done &&
            (*message = queue_take(&comm->peers[one->root].p2p, NULL)) != NULL)
            return one;
    return NULL;
}

static bool all_done(struct ncclComm *comm, struct operation *operations) {
    bool done = true;
    for (struct operation *one = operations; one != NULL; one = one->next) {
        if (one->kind == OPERATION_SEND && !one->done && comm->peers[one->root].acks > 0) {
            comm->peers[one->root].acks--;
            one->done = true;
        }
        done &= one->done || !is_p2p(one);
    }
    return done;
}

static void run_p2p(struct ncclComm *comm, struct operation *operations) {
    for (struct operation *one = operations; one != NULL; one = one->next) {
        struct header head = {.bytes = one->count * type_size(one->type)};
        one->done = false;
        if (one->kind == OPERATION_SEND)
            mesh_send(comm, one->root, MESSAGE_P2P, &head, one->send);
    }
    pthread_mutex_lock(&comm->lock);
    while (!interrupted(comm)) {
        struct message *message;
        struct operation *one = next_receive(comm, operations, &message);
        if (one != NULL) {
            pthread_mutex_unlock(&comm->lock);
            receive(comm, one, message);
            pthread_mutex_lock(&comm->lock);
            one->done = true;
        } else if (all_done(comm, operations)) {
            break;
        } else {
            pthread_cond_wait(&comm->changed, &comm->lock);
        }
    }
    pthread_mutex_unlock(&comm->lock);
}

/* ---- one-sided ---- */

static void run_put(struct ncclComm *comm, const struct operation *operation, bool with_data) {
    struct header head = {
        .key = operation->window,
        .bytes = with_data ? operation->count * type_size(operation->type) : 0,
        .detail = {operation->offset, (uint64_t)operation->signal, (uint64_t)operation->context},
    };
    mesh_send(comm, operation->root, with_data ? MESSAGE_PUT : MESSAGE_SIGNAL, &head,
              operation->send);
}

static bool take_signals(struct peer *peer, const ncclWaitSignalDesc_t *wait) {
    for (struct signal_count *one = peer->signals; one != NULL; one = one->next)
        if (one->index == wait->sigIdx && one->context == wait->ctx &&
            one->received >= (uint64_t)wait->opCnt) {
            one->received -= (uint64_t)wait->opCnt;
            return true;
        }
    return wait->opCnt <= 0;
}

static void run_wait(struct ncclComm *comm, const struct operation *operation) {
    pthread_mutex_lock(&comm->lock);
    for (int one = 0; one < operation->wait_count; one++)
        while (!interrupted(comm) &&
               !take_signals(&comm->peers[operation->waits[one].peer], &operation->waits[one]))
            pthread_cond_wait(&comm->changed, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

/* Collectives first, in their order; then all sends and receives together. */
void run_operations(struct ncclComm *comm, struct operation *operations) {
    bool any_p2p = false;
    for (struct operation *one = operations; one != NULL; one = one->next) {
        if (is_p2p(one))
            any_p2p = true;
        else if (one->kind == OPERATION_PUT || one->kind == OPERATION_NOTIFY)
            run_put(comm, one, one->kind == OPERATION_PUT);
        else if (one->kind == OPERATION_WAIT)
            run_wait(comm, one);
        else
            run_collective(comm, one);
    }
    if (any_p2p)
        run_p2p(comm, operations);
}
