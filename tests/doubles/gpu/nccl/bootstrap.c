/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Unique ids and the rendezvous. The creator of an id listens on a thread of its own until all
 * members have checked in, however long that takes: an id that nobody uses leaves its thread and
 * its socket behind for the life of the process.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

#include "sim.h"

struct unique_id {
    uint64_t hash;
    union address root;
};
_Static_assert(sizeof(struct unique_id) <= sizeof(ncclUniqueId), "fits in NCCL's 128 bytes");

struct check_in {
    uint64_t hash;
    int32_t count, rank;
    struct member member;
};

struct root {
    int listener;
    uint64_t hash;
};

static void answer_all(int count, const int *sockets, const struct member *members) {
    for (int rank = 0; rank < count; rank++)
        write_all(sockets[rank], members, (size_t)count * sizeof *members);
}

static void serve(const struct root *root) {
    int count = 0, here = 0;
    int *sockets = NULL;
    struct member *members = NULL;
    while (count == 0 || here < count) {
        struct check_in request;
        int fd = accept_from(NULL, root->listener);
        if (fd < 0)
            break;
        if (!read_all(NULL, fd, &request, sizeof request) || request.hash != root->hash ||
            request.count <= 0 || (count != 0 && request.count != count) || request.rank < 0 ||
            request.rank >= request.count) {
            warn("bootstrap root: a check-in that doesn't belong here (rank %d of %d)",
                 (int)request.rank, (int)request.count);
            close(fd);
            continue;
        }
        if (count == 0) {
            count = request.count;
            sockets = malloc((size_t)count * sizeof *sockets);
            members = calloc((size_t)count, sizeof *members);
            for (int rank = 0; rank < count; rank++)
                sockets[rank] = -1;
        }
        if (sockets[request.rank] >= 0) {
            warn("Bootstrap Root : rank %d of %d ranks has already checked in", (int)request.rank,
                 count);
            close(fd);
            continue;
        }
        sockets[request.rank] = fd;
        members[request.rank] = request.member;
        here++;
    }
    if (count > 0 && here == count)
        answer_all(count, sockets, members);
    for (int rank = 0; rank < count; rank++)
        if (sockets[rank] >= 0)
            close(sockets[rank]);
    free(sockets);
    free(members);
}

static void *root_thread(void *argument) {
    struct root *root = argument;
    prctl(PR_SET_NAME, "NCCL BootstrapR");
    serve(root);
    close(root->listener);
    free(root);
    return NULL;
}

ncclResult_t bootstrap_new_id(ncclUniqueId *id) {
    struct unique_id fresh = {0};
    pthread_t thread;
    struct root *root = malloc(sizeof *root);
    if (root == NULL || getrandom(&fresh.hash, sizeof fresh.hash, 0) != sizeof fresh.hash) {
        free(root);
        return ncclSystemError;
    }
    root->hash = fresh.hash;
    root->listener = listen_here(&fresh.root);
    if (root->listener < 0) {
        free(root);
        return ncclSystemError;
    }
    if (pthread_create(&thread, NULL, root_thread, root) != 0) {
        close(root->listener);
        free(root);
        return ncclSystemError;
    }
    pthread_detach(thread);
    memset(id, 0, sizeof *id);
    memcpy(id, &fresh, sizeof fresh);
    return ncclSuccess;
}

uint64_t bootstrap_hash(const ncclUniqueId *id) {
    struct unique_id given;
    memcpy(&given, id, sizeof given);
    return given.hash;
}

/* Tells the id's root of this member and waits until it tells of all. */
ncclResult_t bootstrap_check_in(struct ncclComm *comm, const ncclUniqueId *id,
                                const struct member *own, struct member *all) {
    struct unique_id given;
    struct check_in request;
    memcpy(&given, id, sizeof given);
    if (given.root.any.sa_family != AF_INET && given.root.any.sa_family != AF_INET6)
        return fail(ncclInvalidArgument, "the unique id is not one of this library's");
    memset(&request, 0, sizeof request);
    request.hash = given.hash;
    request.count = comm->count;
    request.rank = comm->rank;
    request.member = *own;
    int fd = connect_to(comm, &given.root);
    if (fd < 0)
        return ncclSystemError;
    bool told = write_all(fd, &request, sizeof request) &&
                read_all(comm, fd, all, (size_t)comm->count * sizeof *all);
    close(fd);
    return told ? ncclSuccess : fail(ncclRemoteError, "bootstrap: the root has gone");
}

API(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id)) {
    if (id == NULL)
        return ncclInvalidArgument;
    log_version();
    return bootstrap_new_id(id);
}
