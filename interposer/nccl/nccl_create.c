/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes communicators. This file records how a communicator was made, and gives it an identity on
 * which all members agree without a message: a hash of the unique ids, or of the parent's identity
 * and the number of children of this kind that the parent has had. That number is the same on all
 * members, because making a child is collective.
 */

#include "hooks/exported.h"
#include "nccl_calls.h"
#include "service/service.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static void *copy_of(const void *bytes, size_t size) {
    void *copy = bytes != NULL && size > 0 ? malloc(size) : NULL;
    return copy != NULL ? memcpy(copy, bytes, size) : NULL;
}

static struct nccl_config *parents_config(struct vcomm *parent) {
    return parent != NULL ? config_copy(parent->config) : NULL;
}

/* Makes the vcomm, and records what all kinds of creation have in common. */
static struct vcomm *new_vcomm(enum nccl_function function, char made_by, ncclComm_t *out,
                               struct vcomm *parent, void *config) {
    struct vcomm *v = vcomm_new();
    if (v == NULL)
        return NULL;
    v->made_by = made_by;
    v->creation.function = function;
    v->creation.parent = parent;
    v->parent = parent != NULL ? parent->id : 0;
    v->creation.given = config_copy(config);
    if (v->creation.given == NULL)
        v->creation.raw = config;
    v->config = config != NULL ? config_copy(config) : parents_config(parent);
    v->blocking = config_blocks(v->config);
    v->creation.out = out;
    return v;
}

static ncclResult_t pass_creation(struct vcomm *v, enum kind kind, ncclComm_t parent) {
    struct nccl_call call = {
        .function = v->creation.function, .kind = kind, .comm = parent, .made = v};
    if (v->creation.out != NULL)
        *v->creation.out = vcomm_handle(v);
    return nccl_pass(&call);
}

static ncclResult_t init(struct vcomm *v, int size, int rank, const ncclUniqueId *ids, int count) {
    if (v == NULL)
        return ncclSystemError;
    v->size = v->creation.size = size;
    v->rank = v->creation.rank = rank;
    v->creation.ids = copy_of(ids, (size_t)count * sizeof *ids);
    v->creation.id_count = count;
    v->id = hash64(0, ids, (size_t)count * sizeof *ids);
    vcomm_list(v, true); /* now, because the creation counts on the new communicator's own clock */
    return pass_creation(v, NCCL_CommInit, NULL);
}

ncclResult_t creation_launch(struct vcomm *v) {
    struct creation *creation = &v->creation;
    void *config = creation->given != NULL ? creation->given : creation->raw;
    ncclComm_t parent = creation->parent != NULL ? vcomm_real(creation->parent) : NULL;
    if (!creation->untracked) {
        creation->untracked = true;
        gate_untracked_begin(current_gate());
    }
    switch (creation->function) {
    case NCCL_DO_CommInitRank:
        return NCCL_CALL(CommInitRank, &v->real, creation->size, creation->ids[0], creation->rank);
    case NCCL_DO_CommInitRankConfig:
        return NCCL_CALL(CommInitRankConfig, &v->real, creation->size, creation->ids[0],
                         creation->rank, config);
    case NCCL_DO_CommInitRankScalable:
        return NCCL_CALL(CommInitRankScalable, &v->real, creation->size, creation->rank,
                         creation->id_count, creation->ids, config);
    case NCCL_DO_CommSplit:
        return NCCL_CALL(CommSplit, parent, creation->color, creation->key, &v->real, config);
    case NCCL_DO_CommShrink:
        return NCCL_CALL(CommShrink, parent, creation->excluded, creation->excluded_count, &v->real,
                         config, creation->flags);
    default:
        return NCCL_CALL(CommGrow, parent, creation->size, creation->ids, creation->rank, &v->real,
                         config);
    }
}

static void end_untracked(struct vcomm *v) {
    if (v->creation.untracked)
        gate_untracked_end(current_gate());
    v->creation.untracked = false;
}

/* The real communicator is complete: fills in the vcomm and its row. */
static void creation_finished(struct vcomm *v) {
    NCCL_CALL(CommUserRank, v->real, &v->rank);
    NCCL_CALL(CommCount, v->real, &v->size);
    NCCL_CALL(CommCuDevice, v->real, &v->device);
    service_begin();
    vcomm_list(v, false);
    if (v->row != NULL) {
        v->row->size = v->size;
        v->row->rank = v->rank;
        v->row->device = v->device;
        atomic_store(&v->row->state, LIVESHIFT_COMM_LIVE);
    }
    atomic_store(&v->state, VCOMM_LIVE);
    end_untracked(v);
}

/* Reads v->real, which a thread of NCCL's may be writing. */
static ncclComm_t real_so_far(struct vcomm *v) {
    return __atomic_load_n(&v->real, __ATOMIC_ACQUIRE);
}

/* What NCCL says about a creation that goes on. A child of a non-blocking communicator has no
   handle before it is complete. Until then NCCL answers for it when the parent is asked. */
static ncclResult_t progress(struct vcomm *v) {
    ncclResult_t state = ncclInternalError;
    ncclComm_t real = real_so_far(v);
    struct vcomm *parent = v->creation.parent;
    if (real != NULL)
        return NCCL_CALL(CommGetAsyncError, real, &state) == ncclSuccess ? state : ncclSystemError;
    if (parent == NULL || !vcomm_enter(parent))
        return ncclInternalError;
    if (NCCL_CALL(CommGetAsyncError, parent->real, &state) != ncclSuccess)
        state = ncclSystemError;
    vcomm_leave(parent);
    return state;
}

/* Whether the call came back before the communicator was complete. A split of a non-blocking
   communicator returns ncclSuccess even then. */
static bool is_in_progress(struct vcomm *v, ncclResult_t result) {
    bool child = v->creation.parent != NULL && !(v->creation.function == NCCL_DO_CommSplit &&
                                                 v->creation.color == NCCL_SPLIT_NOCOLOR);
    if (real_so_far(v) != NULL)
        return result == ncclInProgress;
    return child && (result == ncclSuccess || result == ncclInProgress) &&
           progress(v) == ncclInProgress;
}

void creation_complete(struct vcomm *v, ncclResult_t result) {
    ncclComm_t *out = v->creation.out;
    v->creation.out = NULL;
    if (is_in_progress(v, result)) {
        vcomm_list(v, false);
        atomic_store(&v->state, VCOMM_MAKING);
        service_begin(); /* its thread notices the end if the application doesn't ask */
        return;
    }
    if (result == ncclSuccess && v->real != NULL) {
        creation_finished(v);
        return;
    }
    if (v->real == NULL) { /* this rank has no part in the split, or the creation failed */
        if (out != NULL)
            *out = NULL;
        vcomm_end(v);
    } else { /* the creation failed; the real one can only be aborted */
        vcomm_list(v, false);
        atomic_store(&v->state, VCOMM_BROKEN);
    }
    end_untracked(v);
}

void creation_poll(struct vcomm *v) {
    static pthread_mutex_t polling = PTHREAD_MUTEX_INITIALIZER;
    if (atomic_load(&v->state) != VCOMM_MAKING)
        return;
    pthread_mutex_lock(&polling); /* the application and the service thread may both ask */
    ncclResult_t state;
    if (atomic_load(&v->state) == VCOMM_MAKING && (state = progress(v)) != ncclInProgress)
        creation_complete(v, state);
    pthread_mutex_unlock(&polling);
}

EXPORTED ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    if (nccl_thread.inside > 0 || comm == NULL)
        return NCCL_CALL(CommInitRank, comm, size, id, rank);
    return init(new_vcomm(NCCL_DO_CommInitRank, 'I', comm, NULL, NULL), size, rank, &id, 1);
}

EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                                             void *config) {
    if (nccl_thread.inside > 0 || comm == NULL)
        return NCCL_CALL(CommInitRankConfig, comm, size, id, rank, config);
    return init(new_vcomm(NCCL_DO_CommInitRankConfig, 'I', comm, NULL, config), size, rank, &id, 1);
}

EXPORTED ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int count,
                                               ncclUniqueId *ids, void *config) {
    if (nccl_thread.inside > 0 || comm == NULL || ids == NULL || count <= 0)
        return NCCL_CALL(CommInitRankScalable, comm, size, rank, count, ids, config);
    return init(new_vcomm(NCCL_DO_CommInitRankScalable, 'S', comm, NULL, config), size, rank, ids,
                count);
}

/* All members are in this process, so their identity is a random number that is drawn here. */
EXPORTED ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
    if (nccl_thread.inside > 0 || comms == NULL || count <= 0)
        return NCCL_CALL(CommInitAll, comms, count, devices);
    struct gate *gate = current_gate();
    struct vcomm **made_here = calloc((size_t)count, sizeof *made_here);
    struct gate_want *wants = calloc((size_t)count, sizeof *wants);
    ncclComm_t *reals = calloc((size_t)count, sizeof *reals);
    ncclResult_t result = ncclSystemError;
    uint64_t id = 0;
    unsigned n = 0;
    int begun = 0;
    if (made_here == NULL || wants == NULL || reals == NULL ||
        getrandom(&id, sizeof id, 0) != sizeof id)
        goto out;
    for (; begun < count; begun++) {
        struct vcomm *v = new_vcomm(NCCL_DO_CommInitAll, 'A', NULL, NULL, NULL);
        if (v == NULL)
            goto undo;
        made_here[begun] = v;
        v->id = id | 1;
        v->size = count;
        v->rank = begun;
        vcomm_list(v, true);
        if (v->clock != NULL)
            wants[n++] =
                (struct gate_want){.clock = (uint32_t)(v->clock - liveshift_clocks(gate->page)),
                                   .kind = NCCL_CommInit,
                                   .count = 1};
    }
    if (n > 0)
        gate_pass(gate, wants, n, current_tid());
    gate_untracked_begin(gate);
    result = NCCL_CALL(CommInitAll, reals, count, devices);
    for (int i = 0; i < count; i++) {
        struct vcomm *v = made_here[i];
        v->real = reals[i];
        comms[i] = result == ncclSuccess ? vcomm_handle(v) : NULL;
        if (v->clock != NULL)
            gate_end(v->clock);
        if (result == ncclSuccess)
            creation_finished(v);
    }
    gate_untracked_end(gate);
undo:
    for (int i = 0; i < begun && result != ncclSuccess; i++)
        vcomm_end(made_here[i]);
out:
    free(made_here);
    free(wants);
    free(reals);
    return result;
}

static ncclResult_t child(struct vcomm *v, enum kind kind, uint64_t seed, ncclComm_t parent) {
    v->id = v->parent != 0 ? seed : 0;
    return pass_creation(v, kind, parent);
}

EXPORTED ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out,
                                    void *config) {
    struct vcomm *parent = vcomm_of(comm);
    if (nccl_thread.inside > 0 || out == NULL || parent == NULL)
        return NCCL_CALL(CommSplit, comm, color, key, out, config);
    struct vcomm *v = new_vcomm(NCCL_DO_CommSplit, 's', out, parent, config);
    if (v == NULL)
        return ncclSystemError;
    uint32_t identity[] = {'s', atomic_fetch_add(&parent->children, 1), (uint32_t)color};
    v->creation.color = color;
    v->creation.key = key;
    return child(v, NCCL_CommSplit, hash64(parent->id, identity, sizeof identity), comm);
}

static int by_number(const void *a, const void *b) {
    int one = *(const int *)a, other = *(const int *)b;
    return (one > other) - (one < other);
}

EXPORTED ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *out,
                                     void *config, int flags) {
    struct vcomm *parent = vcomm_of(comm);
    if (nccl_thread.inside > 0 || out == NULL || parent == NULL || excluded == NULL || count <= 0)
        return NCCL_CALL(CommShrink, comm, excluded, count, out, config, flags);
    struct vcomm *v = new_vcomm(NCCL_DO_CommShrink, 'k', out, parent, config);
    if (v == NULL)
        return ncclSystemError;
    v->creation.excluded = copy_of(excluded, (size_t)count * sizeof *excluded);
    if (v->creation.excluded == NULL)
        return ncclSystemError;
    v->creation.excluded_count = count;
    v->creation.flags = flags;
    qsort(v->creation.excluded, (size_t)count, sizeof *excluded, by_number);
    /* The excluded ranks don't call this. So a shrink counts neither on the parent's clock nor in
       its `children`. Like an init, it counts on the new communicator's own clock. */
    uint64_t seed = hash64(parent->id, v->creation.excluded, (size_t)count * sizeof *excluded);
    uint32_t identity[] = {'k', atomic_fetch_add(&parent->shrinks, 1)};
    v->id = hash64(seed, identity, sizeof identity);
    v->size = parent->size - count;
    vcomm_list(v, true);
    return pass_creation(v, NCCL_CommShrink, comm);
}

/*
 * The ranks that join know only the unique id. Only one of the ranks that are in the parent makes
 * this id. A real id begins with magic, address and count, and the rest of its 128 bytes is zero.
 * There that rank writes the new communicator's identity, for the ranks that join.
 */
#define GROW_MARK "LIVESHFT"
#define GROW_AT (sizeof(ncclUniqueId) - 16)

static uint64_t grow_identity(const struct vcomm *parent, uint32_t ordinal) {
    uint32_t identity[] = {'g', ordinal};
    return hash64(parent->id, identity, sizeof identity);
}

EXPORTED ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id) {
    static const char nothing[16];
    struct vcomm *parent = vcomm_of(comm);
    if (parent == NULL)
        return NCCL_CALL(CommGetUniqueId, comm, id);
    if (!vcomm_enter_waiting(parent))
        return ncclInvalidArgument;
    ncclResult_t result = NCCL_CALL(CommGetUniqueId, parent->real, id);
    if (result == ncclSuccess && memcmp(id->internal + GROW_AT, nothing, sizeof nothing) == 0) {
        uint64_t identity = grow_identity(parent, atomic_load(&parent->grows));
        memcpy(id->internal + GROW_AT, GROW_MARK, 8);
        memcpy(id->internal + GROW_AT + 8, &identity, sizeof identity);
    }
    vcomm_leave(parent);
    return result;
}

EXPORTED ncclResult_t ncclCommGrow(ncclComm_t comm, int size, const ncclUniqueId *id, int rank,
                                   ncclComm_t *out, void *config) {
    struct vcomm *parent = vcomm_of(comm);
    if (nccl_thread.inside > 0 || out == NULL || (comm != NULL && parent == NULL))
        return NCCL_CALL(CommGrow, comm, size, id, rank, out, config);
    struct vcomm *v = new_vcomm(NCCL_DO_CommGrow, 'g', out, parent, config);
    if (v == NULL)
        return ncclSystemError;
    v->creation.size = size;
    v->creation.rank = rank;
    v->creation.ids = copy_of(id, sizeof *id);
    uint64_t identity = 0;
    if (v->creation.ids != NULL && memcmp(v->creation.ids->internal + GROW_AT, GROW_MARK, 8) == 0) {
        memcpy(&identity, v->creation.ids->internal + GROW_AT + 8, sizeof identity);
        memset(v->creation.ids->internal + GROW_AT, 0, 16);
    }
    if (parent != NULL)
        return child(v, NCCL_CommGrow, grow_identity(parent, atomic_fetch_add(&parent->grows, 1)),
                     comm);
    v->id = identity;
    return pass_creation(v, NCCL_CommGrow, NULL);
}
