/* SPDX-License-Identifier: Apache-2.0 */
/* What an application attaches to a communicator: registered buffers, windows, reduction
   operators. */

#include "hooks/exported.h"
#include "nccl_calls.h"

#include <stdlib.h>
#include <string.h>

static size_t size_of(ncclDataType_t type) {
    static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && (size_t)type < sizeof sizes ? sizes[type] : 0;
}

/* registration_place, window_place and reduction_place return the link in its list that points to
   what has this handle, or the last link, to which a new one is added. Called under v->records. */
static struct registration **registration_place(struct vcomm *v, const void *handle) {
    struct registration **at = &v->registrations;
    while (*at != NULL && *at != handle)
        at = &(*at)->next;
    return at;
}

EXPORTED ncclResult_t ncclCommRegister(ncclComm_t comm, void *buffer, size_t size, void **handle) {
    struct vcomm *v = vcomm_of(comm);
    if (v == NULL || handle == NULL)
        return NCCL_CALL(CommRegister, v != NULL ? v->real : comm, buffer, size, handle);
    struct registration *made = calloc(1, sizeof *made);
    if (made == NULL)
        return ncclSystemError;
    if (!vcomm_enter_waiting(v)) {
        free(made);
        return ncclInvalidArgument;
    }
    *made = (struct registration){.buffer = buffer, .size = size};
    ncclResult_t result = NCCL_CALL(CommRegister, v->real, buffer, size, &made->real);
    if (result == ncclSuccess && made->real != NULL) {
        pthread_mutex_lock(&v->records);
        *registration_place(v, made) = made;
        pthread_mutex_unlock(&v->records);
        *handle = made;
    } else { /* NCCL gives NULL where registration is switched off */
        *handle = NULL;
        free(made);
    }
    vcomm_leave(v);
    return result;
}

EXPORTED ncclResult_t ncclCommDeregister(ncclComm_t comm, void *handle) {
    struct vcomm *v = vcomm_of(comm);
    if (v == NULL)
        return NCCL_CALL(CommDeregister, comm, handle);
    if (!vcomm_enter_waiting(v))
        return ncclInvalidArgument;
    pthread_mutex_lock(&v->records);
    struct registration **at = registration_place(v, handle), *found = *at;
    if (found != NULL)
        *at = found->next;
    pthread_mutex_unlock(&v->records);
    ncclResult_t result = NCCL_CALL(CommDeregister, v->real, found != NULL ? found->real : handle);
    vcomm_leave(v);
    free(found);
    return result;
}

/* Windows. To register or deregister one is collective, so both pass the gate. */

EXPORTED ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t size,
                                             ncclWindow_t *window, int flags) {
    if (vcomm_of(comm) == NULL || window == NULL)
        return NCCL_CALL(CommWindowRegister, vcomm_of(comm) != NULL ? vcomm_of(comm)->real : comm,
                         buffer, size, window, flags);
    struct window *made = calloc(1, sizeof *made);
    if (made == NULL)
        return ncclSystemError;
    *made = (struct window){.out = window, .buffer = buffer, .size = size, .flags = flags};
    *window = NULL;
    struct nccl_call call = {.function = NCCL_DO_CommWindowRegister,
                             .kind = NCCL_CommWindowRegister,
                             .comm = comm,
                             .window_made = made};
    return nccl_pass(&call);
}

EXPORTED ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    if (vcomm_of(comm) == NULL) /* NCCL's threads call this for NCCL's own windows */
        return NCCL_CALL(CommWindowDeregister, comm, window);
    struct nccl_call call = {.function = NCCL_DO_CommWindowDeregister,
                             .kind = NCCL_CommWindowDeregister,
                             .comm = comm,
                             .window = window};
    return nccl_pass(&call);
}

static struct window **window_place(struct vcomm *v, ncclWindow_t handle) {
    struct window **at = &v->windows;
    while (*at != NULL && (*at)->handle != handle)
        at = &(*at)->next;
    return at;
}

ncclWindow_t window_real(struct vcomm *v, ncclWindow_t handle) {
    pthread_mutex_lock(&v->records);
    struct window *found = *window_place(v, handle);
    ncclWindow_t real = found != NULL ? found->real : handle;
    pthread_mutex_unlock(&v->records);
    return real;
}

/* Called after the end of the call's group, because only then NCCL writes the window. */
void window_complete(const struct nccl_call *call, ncclResult_t result) {
    struct window *made = call->window_made;
    struct vcomm *v = call->v;
    if (result != ncclSuccess || made->real == NULL) { /* NULL: NCCL has no windows here */
        free(made);
        return;
    }
    pthread_mutex_lock(&v->records);
    made->handle = made->real;
    if (*window_place(v, made->handle) != NULL) /* a window from before a rebuild has this handle */
        made->handle = (ncclWindow_t)made;
    *window_place(v, made->handle) = made;
    pthread_mutex_unlock(&v->records);
    *made->out = made->handle;
}

ncclResult_t window_launch(const struct nccl_call *call) {
    struct vcomm *v = call->v;
    struct window *made = call->window_made;
    ncclComm_t real = vcomm_real(v);
    if (made != NULL)
        return NCCL_CALL(CommWindowRegister, real, made->buffer, made->size, &made->real,
                         made->flags);
    pthread_mutex_lock(&v->records);
    struct window **at = window_place(v, call->window), *found = *at;
    if (found != NULL)
        *at = found->next;
    pthread_mutex_unlock(&v->records);
    ncclResult_t result =
        NCCL_CALL(CommWindowDeregister, real, found != NULL ? found->real : call->window);
    free(found);
    return result;
}

ncclWindow_t window_exported(ncclWindow_t handle) {
    ncclWindow_t real = handle;
    pthread_mutex_lock(&vcomms_lock);
    for (struct vcomm *v = vcomms; v != NULL; v = v->next) {
        pthread_mutex_lock(&v->records);
        struct window *found = *window_place(v, handle);
        pthread_mutex_unlock(&v->records);
        if (found == NULL)
            continue;
        real = found->real;
        vcomm_unsafe(v, "the address of a window was given away (symmetric memory)");
    }
    pthread_mutex_unlock(&vcomms_lock);
    return real;
}

/* Operators. Their numbers are ours, and stay the same over a rebuild. */

static struct reduction **reduction_place(struct vcomm *v, ncclRedOp_t handle) {
    struct reduction **at = &v->reductions;
    while (*at != NULL && (*at)->handle != handle)
        at = &(*at)->next;
    return at;
}

EXPORTED ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type,
                                               ncclScalarResidence_t residence, ncclComm_t comm) {
    struct vcomm *v = vcomm_of(comm);
    if (v == NULL || op == NULL || scalar == NULL)
        return NCCL_CALL(RedOpCreatePreMulSum, op, scalar, type, residence,
                         v != NULL ? v->real : comm);
    struct reduction *made = calloc(1, sizeof *made);
    if (made == NULL)
        return ncclSystemError;
    if (!vcomm_enter_waiting(v)) {
        free(made);
        return ncclInvalidArgument;
    }
    *made = (struct reduction){.type = type, .residence = residence, .device_scalar = scalar};
    if (residence == NCCL_SCALAR_HOST)
        memcpy(made->scalar, scalar, size_of(type));
    ncclResult_t result =
        NCCL_CALL(RedOpCreatePreMulSum, &made->real, scalar, type, residence, v->real);
    if (result == ncclSuccess) {
        pthread_mutex_lock(&v->records);
        made->handle = NCCL_NUM_OPS + v->reduction_count++;
        *reduction_place(v, made->handle) = made;
        pthread_mutex_unlock(&v->records);
        *op = made->handle;
    } else
        free(made);
    vcomm_leave(v);
    return result;
}

ncclRedOp_t reduction_real(struct vcomm *v, ncclRedOp_t handle) {
    pthread_mutex_lock(&v->records);
    struct reduction *found = *reduction_place(v, handle);
    ncclRedOp_t real = found != NULL ? found->real : handle;
    pthread_mutex_unlock(&v->records);
    return real;
}

EXPORTED ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    struct vcomm *v = vcomm_of(comm);
    if (v == NULL)
        return NCCL_CALL(RedOpDestroy, op, comm);
    if (!vcomm_enter_waiting(v))
        return ncclInvalidArgument;
    pthread_mutex_lock(&v->records);
    struct reduction **at = reduction_place(v, op), *found = *at;
    if (found != NULL)
        *at = found->next;
    pthread_mutex_unlock(&v->records);
    ncclResult_t result = NCCL_CALL(RedOpDestroy, found != NULL ? found->real : op, v->real);
    vcomm_leave(v);
    free(found);
    return result;
}

/* Needs no lock: the communicator is DOWN, so no other thread changes the lists. */
ncclResult_t records_replay(struct vcomm *v, const char **what) {
    ncclResult_t result = ncclSuccess;
    *what = "registering a buffer";
    for (struct registration *at = v->registrations; at != NULL && result == ncclSuccess;
         at = at->next)
        result = NCCL_CALL(CommRegister, v->real, at->buffer, at->size, &at->real);
    if (result != ncclSuccess)
        return result;
    *what = "registering a window";
    for (struct window *at = v->windows; at != NULL && result == ncclSuccess; at = at->next)
        result = NCCL_CALL(CommWindowRegister, v->real, at->buffer, at->size, &at->real, at->flags);
    if (result != ncclSuccess)
        return result;
    *what = "making a reduction operator";
    for (struct reduction *at = v->reductions; at != NULL && result == ncclSuccess; at = at->next)
        result = NCCL_CALL(RedOpCreatePreMulSum, &at->real,
                           at->residence == NCCL_SCALAR_HOST ? at->scalar : at->device_scalar,
                           at->type, at->residence, v->real);
    return result;
}
