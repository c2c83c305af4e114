/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Communicators from communicators: split, shrink, grow. The members agree over the parent's
 * connections, then connect anew; nothing of the parent is needed afterwards.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

struct derive_argument {
    uint64_t key;
    int color, order;
    int excluded_count;
    int excluded[];
};

static int by_key(const void *left, const void *right) {
    const struct member *a = left, *b = right;
    if (a->key != b->key)
        return a->key < b->key ? -1 : 1;
    return a->rank < b->rank ? -1 : 1;
}

static uint64_t mixed(uint64_t hash, uint64_t value) {
    return (hash ^ value) * 0x9e3779b97f4a7c15u ^ hash >> 29;
}

/* Of all the parent's members those with the child's color, in the child's order. */
static ncclResult_t build_child(struct ncclComm *parent, struct ncclComm *child,
                                const struct derive_argument *argument, struct member *all,
                                const bool *taking_part) {
    int count = 0;
    struct member *members = calloc((size_t)parent->count, sizeof *members);
    if (members == NULL)
        abort();
    for (int rank = 0; rank < parent->count; rank++)
        if (taking_part[rank] && all[rank].color == argument->color)
            members[count++] = all[rank];
    qsort(members, (size_t)count, sizeof *members, by_key);
    for (int rank = 0; rank < count; rank++)
        if (members[rank].rank == parent->rank)
            child->rank = rank;
    child->count = count;
    child->hash = mixed(mixed(parent->hash, argument->key), (uint64_t)argument->color);
    return comm_build(child, members);
}

static ncclResult_t derive_run(struct job *job) {
    struct derive_argument *argument = job->argument;
    struct ncclComm *child = job->other == NULL ? NULL : job->comm;
    struct ncclComm *parent = child == NULL ? job->comm : job->other;
    struct member own = {.rank = parent->rank};
    struct member *all = calloc((size_t)parent->count, sizeof *all);
    bool *taking_part = calloc((size_t)parent->count, sizeof *taking_part);
    ncclResult_t result = ncclSuccess;
    if (all == NULL || taking_part == NULL)
        abort();
    for (int rank = 0; rank < parent->count; rank++)
        taking_part[rank] = true;
    for (int one = 0; one < argument->excluded_count; one++)
        taking_part[argument->excluded[one]] = false;
    if (child != NULL) {
        describe_member(child, &own);
        own.rank = parent->rank;
        result = mesh_listen(child, &own);
    }
    own.color = argument->color;
    own.key = argument->order;
    if (result == ncclSuccess)
        result = mesh_exchange(parent, argument->key, &own, sizeof own, all, taking_part);
    if (result == ncclSuccess && child != NULL)
        result = build_child(parent, child, argument, all, taking_part);
    free(all);
    free(taking_part);
    return result;
}

static void mark_shared(struct ncclComm *parent, struct ncclComm *child, int share) {
    if (share != 1)
        return;
    pthread_mutex_lock(&parent->lock);
    parent->shares = true;
    pthread_mutex_unlock(&parent->lock);
    child->shares = true;
}

static ncclResult_t split(struct ncclComm *parent, int color, int key, ncclComm_t *handle,
                          const ncclConfig_t *config) {
    ncclResult_t result = comm_ready(parent);
    struct ncclComm *child = NULL;
    if (result == ncclSuccess && (handle == NULL || (color < 0 && color != NCCL_SPLIT_NOCOLOR)))
        result = fail(ncclInvalidArgument,
                      "color is a negative value %d, that is not "
                      "NCCL_SPLIT_NOCOLOR",
                      color);
    if (result != ncclSuccess)
        return group_fail(result);
    *handle = NULL;
    if (color != NCCL_SPLIT_NOCOLOR) {
        child = comm_create(handle, config, &parent->config, &result);
        if (child == NULL)
            return group_fail(result);
        child->device = parent->device;
        mark_shared(parent, child, child->config.splitShare);
    }
    struct derive_argument argument = {.color = color, .order = key};
    pthread_mutex_lock(&parent->lock);
    argument.key = EXCHANGE_KEY(EXCHANGE_SPLIT, parent->splits++);
    pthread_mutex_unlock(&parent->lock);
    struct job *job = job_new(child ? child : parent, derive_run, &argument, sizeof argument);
    if (child != NULL) {
        comm_keep(parent);
        job->other = parent;
        job->handle = handle;
    }
    job->blocking = parent->config.blocking != 0;
    /* As NCCL does it, and then says success: that it goes on is to be asked of the parent. */
    job->late = child != NULL && !job->blocking;
    if (job->late)
        *handle = NULL;
    ncclResult_t said = group_add_job(job);
    return said == ncclInProgress ? ncclSuccess : said;
}

API(ncclResult_t, ncclCommSplit,
    (ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config)) {
    struct ncclComm *parent = comm_hold(comm);
    if (parent == NULL)
        return group_fail(ncclInvalidArgument);
    ncclResult_t result = split(parent, color, key, child, config);
    comm_release(parent);
    return result;
}

#if SIMNCCL_VERSION >= 22703
static bool excluded_valid(const struct ncclComm *parent, const int *excluded, int count) {
    if (excluded == NULL || count <= 0 || count >= parent->count)
        return false;
    for (int one = 0; one < count; one++)
        if (excluded[one] < 0 || excluded[one] >= parent->count || excluded[one] == parent->rank)
            return false;
    return true;
}

/* NCCL_SHRINK_ABORT: the parent's operations end first, and its errors don't matter. */
static ncclResult_t shrink(struct ncclComm *parent, const int *excluded, int count,
                           ncclComm_t *handle, const ncclConfig_t *config, int flags) {
    ncclResult_t result = ncclSuccess;
    if (handle == NULL || !excluded_valid(parent, excluded, count))
        return group_fail(fail(ncclInvalidArgument, "ncclCommShrink: a list of %d ranks", count));
    if (flags & NCCL_SHRINK_ABORT) {
        pthread_mutex_lock(&parent->lock);
        parent->revoked = true;
        pthread_cond_broadcast(&parent->changed);
        while (parent->running > 0)
            pthread_cond_wait(&parent->changed, &parent->lock);
        pthread_mutex_unlock(&parent->lock);
    } else {
        result = comm_ready(parent);
    }
    if (result != ncclSuccess)
        return group_fail(result);
    struct ncclComm *child = comm_create(handle, config, &parent->config, &result);
    if (child == NULL)
        return group_fail(result);
    child->device = parent->device;
    mark_shared(parent, child, child->config.shrinkShare);
    size_t size = sizeof(struct derive_argument) + (size_t)count * sizeof *excluded;
    struct job *job = job_new(child, derive_run, NULL, size);
    struct derive_argument *argument = job->argument;
    pthread_mutex_lock(&parent->lock);
    argument->key = EXCHANGE_KEY(EXCHANGE_SHRINK, parent->shrinks++);
    pthread_mutex_unlock(&parent->lock);
    argument->order = parent->rank;
    argument->excluded_count = count;
    memcpy(argument->excluded, excluded, (size_t)count * sizeof *excluded);
    comm_keep(parent);
    job->other = parent;
    job->handle = handle;
    job->blocking = parent->config.blocking != 0;
    return group_add_job(job);
}

API(ncclResult_t, ncclCommShrink,
    (ncclComm_t comm, int *excluded, int excluded_count, ncclComm_t *child, ncclConfig_t *config,
     int flags)) {
    struct ncclComm *parent = comm_hold(comm);
    if (parent == NULL)
        return group_fail(ncclInvalidArgument);
    ncclResult_t result = shrink(parent, excluded, excluded_count, child, config, flags);
    comm_release(parent);
    return result;
}
#endif

#if SIMNCCL_VERSION >= 22902
/* One id at a time, used up by one grow. */
API(ncclResult_t, ncclCommGetUniqueId, (ncclComm_t comm, ncclUniqueId *id)) {
    struct ncclComm *parent = comm_hold(comm);
    if (parent == NULL)
        return ncclInvalidArgument;
    ncclResult_t result = id == NULL ? ncclInvalidArgument : comm_ready(parent);
    pthread_mutex_lock(&parent->lock);
    if (result == ncclSuccess && parent->grow_id_pending)
        result = ncclInvalidUsage;
    if (result == ncclSuccess)
        parent->grow_id_pending = true;
    pthread_mutex_unlock(&parent->lock);
    if (result == ncclSuccess)
        result = bootstrap_new_id(id);
    comm_release(parent);
    return result;
}

struct grow_argument {
    uint64_t key;
    int given;
    ncclUniqueId id;
};

/* Old members learn the id from the one that was given it; ranks stay, joiners come behind. */
static ncclResult_t grow_run(struct job *job) {
    struct grow_argument *own = job->argument;
    struct ncclComm *parent = job->other;
    if (parent == NULL)
        return comm_await(job->comm, 1, &own->id);
    struct grow_argument *all = calloc((size_t)parent->count, sizeof *all);
    if (all == NULL)
        abort();
    ncclResult_t result = mesh_exchange(parent, own->key, own, sizeof *own, all, NULL);
    int from = 0;
    while (result == ncclSuccess && from < parent->count && !all[from].given)
        from++;
    if (result == ncclSuccess && from == parent->count)
        result = fail(ncclInvalidUsage, "ncclCommGrow: no old member was given the unique id");
    if (result == ncclSuccess)
        result = comm_await(job->comm, 1, &all[from].id);
    pthread_mutex_lock(&parent->lock);
    parent->grow_id_pending = false;
    pthread_mutex_unlock(&parent->lock);
    free(all);
    return result;
}

static ncclResult_t grow(struct ncclComm *parent, int count, const ncclUniqueId *id, int rank,
                         ncclComm_t *handle, const ncclConfig_t *config) {
    ncclResult_t result = parent ? comm_ready(parent) : ncclSuccess;
    bool valid =
        parent ? rank == -1 && count > parent->count : id != NULL && rank > 0 && rank < count;
    if (result == ncclSuccess && (handle == NULL || !valid))
        result = fail(ncclInvalidArgument, "ncclCommGrow: rank %d of %d", rank, count);
    if (result != ncclSuccess)
        return group_fail(result);
    struct ncclComm *child = comm_create(handle, config, parent ? &parent->config : NULL, &result);
    if (child == NULL)
        return group_fail(result);
    child->rank = parent ? parent->rank : rank;
    child->count = count;
    struct grow_argument argument = {.given = id != NULL};
    if (id != NULL)
        argument.id = *id;
    struct job *job = job_new(child, grow_run, NULL, sizeof argument);
    if (parent != NULL) {
        child->device = parent->device;
        pthread_mutex_lock(&parent->lock);
        argument.key = EXCHANGE_KEY(EXCHANGE_GROW, parent->grows++);
        pthread_mutex_unlock(&parent->lock);
        comm_keep(parent);
        job->other = parent;
        job->blocking = parent->config.blocking != 0;
    }
    memcpy(job->argument, &argument, sizeof argument);
    job->handle = handle;
    return group_add_job(job);
}

API(ncclResult_t, ncclCommGrow,
    (ncclComm_t comm, int count, const ncclUniqueId *id, int rank, ncclComm_t *child,
     ncclConfig_t *config)) {
    struct ncclComm *parent = comm == NULL ? NULL : comm_hold(comm);
    if (comm != NULL && parent == NULL)
        return group_fail(ncclInvalidArgument);
    ncclResult_t result = grow(parent, count, id, rank, child, config);
    if (parent != NULL)
        comm_release(parent);
    return result;
}
#endif
