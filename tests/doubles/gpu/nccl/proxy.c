/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The proxy thread of a communicator: takes in what the other members send, so that a sender never
 * waits for more than this process to be scheduled, and sees a member that died. NCCL has no timeout
 * on a silent peer; only a closed connection becomes ncclRemoteError.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "sim.h"

static void queue_add(struct message_queue *queue, struct message *message) {
    message->next = NULL;
    if (queue->last != NULL)
        queue->last->next = message;
    else
        queue->first = message;
    queue->last = message;
}

/* The first message (with this key; NULL: any), or NULL. Under the communicator's lock. */
struct message *queue_take(struct message_queue *queue, const uint64_t *key) {
    struct message *before = NULL;
    for (struct message *one = queue->first; one != NULL; before = one, one = one->next) {
        if (key != NULL && one->head.key != *key)
            continue;
        if (before != NULL)
            before->next = one->next;
        else
            queue->first = one->next;
        if (queue->last == one)
            queue->last = before;
        return one;
    }
    return NULL;
}

static void count_signal(struct peer *peer, const struct header *head) {
    int index = (int)head->detail[1], context = (int)head->detail[2];
    struct signal_count *signal = peer->signals;
    while (signal != NULL && (signal->index != index || signal->context != context))
        signal = signal->next;
    if (signal == NULL) {
        signal = calloc(1, sizeof *signal);
        if (signal == NULL)
            abort();
        *signal = (struct signal_count){peer->signals, index, context, 0};
        peer->signals = signal;
    }
    signal->received++;
}

static void put(struct ncclComm *comm, const struct message *message) {
    struct ncclWindow_vidmem *window = comm->windows;
    while (window != NULL && window->ordinal != message->head.key)
        window = window->next;
    uint64_t offset = message->head.detail[0];
    if (window == NULL || offset > window->size || message->head.bytes > window->size - offset) {
        warn("a put outside of every window");
        return;
    }
    if (message->head.bytes > 0)
        memcpy((char *)window->buffer + offset, message->payload, message->head.bytes);
}

/* Takes the message. */
void proxy_deliver(struct ncclComm *comm, int from, struct message *message) {
    struct peer *peer = &comm->peers[from];
    pthread_mutex_lock(&comm->lock);
    switch ((enum message_kind)message->head.kind) {
    case MESSAGE_COLLECTIVE:
        queue_add(&peer->collectives, message);
        message = NULL;
        break;
    case MESSAGE_P2P:
        queue_add(&peer->p2p, message);
        message = NULL;
        break;
    case MESSAGE_CONTROL:
        queue_add(&peer->controls, message);
        message = NULL;
        break;
    case MESSAGE_ACK:
        peer->acks++;
        break;
    case MESSAGE_GOODBYE:
        peer->said_goodbye = true;
        break;
    case MESSAGE_PUT:
        put(comm, message);
        count_signal(peer, &message->head);
        break;
    case MESSAGE_SIGNAL:
        count_signal(peer, &message->head);
        break;
    }
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    free(message);
}

static void peer_gone(struct ncclComm *comm, int rank) {
    struct peer *peer = &comm->peers[rank];
    pthread_mutex_lock(&comm->lock);
    bool expected = peer->said_goodbye || comm->aborted || comm->stopping;
    peer->gone = true;
    if (!expected && comm->async == ncclSuccess)
        comm->async = ncclRemoteError;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
    if (!expected)
        warn("Connection closed by remote peer: rank %d of communicator %llx", rank,
             (unsigned long long)comm->hash);
}

/* Reads on without waiting; false at the end of the connection. */
static bool take_in(struct ncclComm *comm, int rank) {
    struct peer *peer = &comm->peers[rank];
    for (;;) {
        bool in_head = peer->incoming == NULL;
        char *into = in_head ? (char *)&peer->head + peer->received
                             : (char *)peer->incoming->payload + peer->received;
        size_t wanted = (in_head ? sizeof peer->head : peer->head.bytes) - peer->received;
        ssize_t got = recv(peer->fd, into, wanted, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return true;
        if (got <= 0)
            return false;
        peer->received += (size_t)got;
        if ((size_t)got < wanted)
            continue;
        peer->received = 0;
        if (in_head) {
            peer->incoming = calloc(1, sizeof *peer->incoming + peer->head.bytes);
            if (peer->incoming == NULL)
                return false;
            peer->incoming->head = peer->head;
            if (peer->head.bytes > 0)
                continue;
        }
        struct message *whole = peer->incoming;
        peer->incoming = NULL;
        proxy_deliver(comm, rank, whole);
    }
}

static void *proxy_thread(void *argument) {
    struct ncclComm *comm = argument;
    int count = comm->count;
    struct pollfd *all = calloc((size_t)count + 1, sizeof *all);
    prctl(PR_SET_NAME, "NCCL Proxy");
    for (int rank = 0; rank < count; rank++)
        all[rank] = (struct pollfd){.fd = comm->peers[rank].fd, .events = POLLIN};
    all[count] = (struct pollfd){.fd = comm->wake[0], .events = POLLIN};
    while (all[count].revents == 0) {
        if (poll(all, (nfds_t)count + 1, -1) < 0)
            continue;
        for (int rank = 0; rank < count; rank++)
            if (all[rank].revents != 0 && !take_in(comm, rank)) {
                all[rank].fd = -1;
                all[rank].revents = 0;
                peer_gone(comm, rank);
            }
    }
    free(all);
    return NULL;
}

ncclResult_t proxy_start(struct ncclComm *comm) {
    if (pthread_create(&comm->proxy, NULL, proxy_thread, comm) != 0)
        return ncclSystemError;
    comm->proxy_running = true;
    return ncclSuccess;
}

/* After mesh_shut, which wakes it. */
void proxy_stop(struct ncclComm *comm) {
    if (comm->proxy_running)
        pthread_join(comm->proxy, NULL);
    comm->proxy_running = false;
}
