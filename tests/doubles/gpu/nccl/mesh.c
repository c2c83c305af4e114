/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connections between the members of one communicator: one TCP connection per pair, made when
 * the communicator is, a listener and an abstract UNIX socket beside them, as the real one has.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "sim.h"

#define MESSAGE_MAGIC 0x5135c1u

struct greeting {
    uint64_t hash;
    int64_t rank;
};

ncclResult_t mesh_listen(struct ncclComm *comm, struct member *own) {
    comm->listener = listen_here(&own->listener);
    return comm->listener < 0 ? ncclSystemError : ncclSuccess;
}

static void open_unix_socket(struct ncclComm *comm) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "tmp/nccl-socket-%d-%llx",
                          comm->rank, (unsigned long long)comm->hash);
    comm->unix_socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (comm->unix_socket >= 0 &&
        bind(comm->unix_socket, (struct sockaddr *)&name,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length)) != 0)
        warn("binding the UNIX socket of a communicator failed: %s", strerror(errno));
}

static ncclResult_t greet_lower(struct ncclComm *comm, const struct member *members) {
    struct greeting own = {comm->hash, comm->rank};
    for (int rank = 0; rank < comm->rank; rank++) {
        int fd = connect_to(comm, &members[rank].listener);
        comm->peers[rank].fd = fd;
        if (fd < 0 || !write_all(fd, &own, sizeof own))
            return fail(ncclRemoteError, "rank %d doesn't answer", rank);
    }
    return ncclSuccess;
}

static ncclResult_t await_higher(struct ncclComm *comm) {
    for (int missing = comm->count - 1 - comm->rank; missing > 0;) {
        struct greeting theirs;
        int fd = accept_from(comm, comm->listener);
        if (fd < 0)
            return ncclSystemError;
        if (!read_all(comm, fd, &theirs, sizeof theirs) || theirs.hash != comm->hash ||
            theirs.rank <= comm->rank || theirs.rank >= comm->count ||
            comm->peers[theirs.rank].fd >= 0) {
            close(fd);
            continue;
        }
        comm->peers[theirs.rank].fd = fd;
        missing--;
    }
    return ncclSuccess;
}

ncclResult_t mesh_connect(struct ncclComm *comm, struct member *members) {
    struct peer *peers = calloc((size_t)comm->count, sizeof *peers);
    if (peers == NULL)
        return ncclSystemError;
    for (int rank = 0; rank < comm->count; rank++) {
        peers[rank].fd = -1;
        pthread_mutex_init(&peers[rank].writing, NULL);
    }
    comm->peers = peers;
    open_unix_socket(comm);
    RETURN_UNLESS_SUCCESS(greet_lower(comm, members));
    RETURN_UNLESS_SUCCESS(await_higher(comm));
    return proxy_start(comm);
}

/* Ends all traffic at once: waiting readers and writers of these sockets wake up. */
void mesh_shut(struct ncclComm *comm) {
    pthread_mutex_lock(&comm->lock);
    if (comm->wake[1] >= 0 && write(comm->wake[1], "", 1) < 0)
        warn("waking a communicator failed: %s", strerror(errno));
    for (int rank = 0; comm->connected && rank < comm->count; rank++)
        if (comm->peers[rank].fd >= 0)
            shutdown(comm->peers[rank].fd, SHUT_RDWR);
    pthread_mutex_unlock(&comm->lock);
}

static void close_one(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void drop_queue(struct message_queue *queue) {
    while (queue->first != NULL)
        free(queue_take(queue, NULL));
}

static void close_peer(struct peer *peer) {
    close_one(&peer->fd);
    drop_queue(&peer->collectives);
    drop_queue(&peer->p2p);
    drop_queue(&peer->controls);
    while (peer->signals != NULL) {
        struct signal_count *signal = peer->signals;
        peer->signals = signal->next;
        free(signal);
    }
    free(peer->incoming);
    pthread_mutex_destroy(&peer->writing);
}

/* Once nobody but an ncclCommAbort that comes too late can use it. */
void mesh_close(struct ncclComm *comm) {
    pthread_mutex_lock(&comm->lock);
    for (int rank = 0; comm->peers != NULL && rank < comm->count; rank++)
        close_peer(&comm->peers[rank]);
    free(comm->peers);
    comm->peers = NULL;
    comm->connected = false;
    close_one(&comm->listener);
    close_one(&comm->unix_socket);
    close_one(&comm->wake[0]);
    close_one(&comm->wake[1]);
    pthread_mutex_unlock(&comm->lock);
}

/* false: the peer has gone; its proxy thread says so in the communicator's state */
bool mesh_send(struct ncclComm *comm, int rank, enum message_kind kind, const struct header *head,
               const void *payload) {
    struct header full = *head;
    full.magic = MESSAGE_MAGIC;
    full.kind = kind;
    if (rank == comm->rank) {
        struct message *message = calloc(1, sizeof *message + full.bytes);
        if (message == NULL)
            abort();
        message->head = full;
        if (full.bytes > 0)
            memcpy(message->payload, payload, full.bytes);
        proxy_deliver(comm, rank, message);
        return true;
    }
    struct peer *peer = &comm->peers[rank];
    pthread_mutex_lock(&peer->writing);
    bool sent = write_all(peer->fd, &full, sizeof full) && write_all(peer->fd, payload, full.bytes);
    pthread_mutex_unlock(&peer->writing);
    return sent;
}

/*
 * All members that take part (NULL: all) tell each other `bytes` bytes, on the caller's thread:
 * creations of communicators and windows agree this way. Goes on after ncclCommRevoke, not after an
 * abort.
 */
ncclResult_t mesh_exchange(struct ncclComm *comm, uint64_t key, const void *own, size_t bytes,
                           void *all, const bool *taking_part) {
    struct header head = {.key = key, .bytes = bytes};
    ncclResult_t result = ncclSuccess;
    for (int rank = 0; rank < comm->count; rank++)
        if (rank != comm->rank && (taking_part == NULL || taking_part[rank]))
            mesh_send(comm, rank, MESSAGE_CONTROL, &head, own);
    if (bytes > 0)
        memcpy((char *)all + (size_t)comm->rank * bytes, own, bytes);
    pthread_mutex_lock(&comm->lock);
    for (int rank = 0; result == ncclSuccess && rank < comm->count; rank++) {
        struct message *message = NULL;
        if (rank == comm->rank || (taking_part != NULL && !taking_part[rank]))
            continue;
        while ((message = queue_take(&comm->peers[rank].controls, &key)) == NULL &&
               !comm->peers[rank].gone && !comm->aborted)
            pthread_cond_wait(&comm->changed, &comm->lock);
        if (message == NULL)
            result = comm->aborted ? ncclInternalError : ncclRemoteError;
        else if (message->head.bytes != bytes)
            result = ncclInternalError;
        else if (bytes > 0)
            memcpy((char *)all + (size_t)rank * bytes, message->payload, bytes);
        free(message);
    }
    pthread_mutex_unlock(&comm->lock);
    return result;
}
