/* SPDX-License-Identifier: Apache-2.0 */
/* What belongs to one communicator: buffers, windows, reduction operators; and ncclMemAlloc. */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

API(ncclResult_t, ncclMemAlloc, (void **pointer, size_t size)) {
    if (pointer == NULL || size == 0)
        return ncclInvalidArgument;
    return cuda_allocate(cuda_current_device(), pointer, size) == 0 ? ncclSuccess
                                                                    : ncclUnhandledCudaError;
}

API(ncclResult_t, ncclMemFree, (void *pointer)) {
    if (pointer == NULL)
        return ncclInvalidArgument;
    return cuda_free(cuda_current_device(), pointer) == 0 ? ncclSuccess : ncclUnhandledCudaError;
}

/* The same buffer again gives the same handle, counted. */
API(ncclResult_t, ncclCommRegister,
    (const ncclComm_t handle, void *buffer, size_t size, void **registered)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL || buffer == NULL || registered == NULL || size == 0) {
        if (comm != NULL)
            comm_release(comm);
        return ncclInvalidArgument;
    }
    pthread_mutex_lock(&comm->lock);
    struct registration *one = comm->registrations;
    while (one != NULL && (one->buffer != buffer || one->size != size))
        one = one->next;
    if (one == NULL) {
        one = calloc(1, sizeof *one);
        if (one == NULL)
            abort();
        *one = (struct registration){comm->registrations, buffer, size, 0};
        comm->registrations = one;
    }
    one->references++;
    *registered = one;
    pthread_mutex_unlock(&comm->lock);
    comm_release(comm);
    return ncclSuccess;
}

API(ncclResult_t, ncclCommDeregister, (const ncclComm_t handle, void *registered)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    pthread_mutex_lock(&comm->lock);
    struct registration **place = &comm->registrations;
    while (*place != NULL && *place != registered)
        place = &(*place)->next;
    struct registration *one = *place;
    if (one != NULL && --one->references == 0) {
        *place = one->next;
        free(one);
    }
    pthread_mutex_unlock(&comm->lock);
    comm_release(comm);
    return one != NULL || registered == NULL
               ? ncclSuccess
               : fail(ncclInvalidUsage, "Deregister of a handle of no buffer");
}

/* ---- windows (2.27): collective ---- */

struct ncclWindow_vidmem *window_find(ncclWindow_t handle) {
    struct ncclWindow_vidmem *found = NULL;
    registry_lock();
    for (struct ncclComm *comm = registry_first(); comm != NULL && found == NULL;
         comm = comm->next) {
        pthread_mutex_lock(&comm->lock);
        for (struct ncclWindow_vidmem *one = comm->windows; one != NULL; one = one->next)
            if (one == handle)
                found = one;
        pthread_mutex_unlock(&comm->lock);
    }
    registry_unlock();
    return found;
}

#if SIMNCCL_VERSION >= 22703
struct window_argument {
    ncclWindow_t *window;
    void *buffer;
    size_t size;
    uint64_t ordinal;
    int flags;
};

/* Registers the buffer through the exported ncclCommRegister, as the real one does by its PLT. */
static ncclResult_t window_run(struct job *job) {
    struct ncclComm *comm = job->comm;
    struct window_argument *argument = job->argument;
    struct ncclWindow_vidmem *window = calloc(1, sizeof *window);
    if (window == NULL)
        abort();
    *window = (struct ncclWindow_vidmem){
        .comm = comm,
        .buffer = argument->buffer,
        .size = argument->size,
        .ordinal = argument->ordinal,
        .flags = argument->flags,
    };
    ncclResult_t result =
        ncclCommRegister(comm, argument->buffer, argument->size, &window->registration);
    if (result != ncclSuccess) {
        free(window);
        return result;
    }
    pthread_mutex_lock(&comm->lock);
    window->next = comm->windows;
    comm->windows = window;
    pthread_mutex_unlock(&comm->lock);
    /* nobody puts into a window before all have it */
    result =
        mesh_exchange(comm, EXCHANGE_KEY(EXCHANGE_WINDOW, argument->ordinal), NULL, 0, NULL, NULL);
    if (result == ncclSuccess)
        *argument->window = window;
    return result;
}

API(ncclResult_t, ncclCommWindowRegister,
    (ncclComm_t handle, void *buffer, size_t size, ncclWindow_t *window, int flags)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return group_fail(ncclInvalidArgument);
    ncclResult_t result = comm_ready(comm);
    if (result == ncclSuccess && (buffer == NULL || window == NULL || size == 0))
        result = ncclInvalidArgument;
    if (result == ncclSuccess) {
        struct window_argument argument = {window, buffer, size, 0, flags};
        *window = NULL;
        pthread_mutex_lock(&comm->lock);
        argument.ordinal = comm->window_count++;
        pthread_mutex_unlock(&comm->lock);
        result = group_add_job(job_new(comm, window_run, &argument, sizeof argument));
    } else {
        group_fail(result);
    }
    comm_release(comm);
    return result;
}

API(ncclResult_t, ncclCommWindowDeregister, (ncclComm_t handle, ncclWindow_t window)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    pthread_mutex_lock(&comm->lock);
    struct ncclWindow_vidmem **place = &comm->windows;
    while (*place != NULL && *place != window)
        place = &(*place)->next;
    struct ncclWindow_vidmem *found = *place;
    if (found != NULL)
        *place = found->next;
    pthread_mutex_unlock(&comm->lock);
    ncclResult_t result = window == NULL ? ncclSuccess : ncclInvalidArgument;
    if (found != NULL) {
        result = ncclCommDeregister(comm, found->registration);
        free(found);
    }
    comm_release(comm);
    return result;
}
#endif

#if SIMNCCL_VERSION >= 22902
API(ncclResult_t, ncclWinGetUserPtr, (ncclComm_t comm, ncclWindow_t window, void **pointer)) {
    struct ncclWindow_vidmem *found = window_find(window);
    if (found == NULL || found->comm != comm || pointer == NULL)
        return ncclInvalidArgument;
    *pointer = found->buffer;
    return ncclSuccess;
}
#endif

/* ---- reduction operators ---- */

/* The values differ from communicator to communicator, as the real ones: mangled with its address. */
static ncclRedOp_t op_value(const struct ncclComm *comm) {
    uint64_t value = comm->serial * 0x9e3779b9u + comm->user_op_count;
    return (ncclRedOp_t)(ncclNumOps + value % (0x7fffffff - ncclNumOps));
}

API(ncclResult_t, ncclRedOpCreatePreMulSum,
    (ncclRedOp_t * op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,
     ncclComm_t handle)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    ncclResult_t result = comm_ready(comm);
    if (result == ncclSuccess && (op == NULL || scalar == NULL || type_size(type) == 0))
        result = ncclInvalidArgument;
    if (result == ncclSuccess) {
        struct user_op *one = calloc(1, sizeof *one);
        if (one == NULL)
            abort();
        one->type = type;
        one->residence = residence;
        one->device_scalar = scalar;
        if (residence == ncclScalarHostImmediate)
            memcpy(one->scalar, scalar, type_size(type));
        pthread_mutex_lock(&comm->lock);
        one->op = op_value(comm);
        comm->user_op_count++;
        one->next = comm->user_ops;
        comm->user_ops = one;
        *op = one->op;
        pthread_mutex_unlock(&comm->lock);
    }
    comm_release(comm);
    return result;
}

API(ncclResult_t, ncclRedOpDestroy, (ncclRedOp_t op, ncclComm_t handle)) {
    struct ncclComm *comm = comm_hold(handle);
    if (comm == NULL)
        return ncclInvalidArgument;
    pthread_mutex_lock(&comm->lock);
    struct user_op **place = &comm->user_ops;
    while (*place != NULL && (*place)->op != op)
        place = &(*place)->next;
    struct user_op *one = *place;
    if (one != NULL)
        *place = one->next;
    pthread_mutex_unlock(&comm->lock);
    comm_release(comm);
    if (one == NULL)
        return fail(ncclInvalidArgument, "ncclRedOpDestroy : operator %d of no communicator",
                    (int)op);
    free(one);
    return ncclSuccess;
}

ncclResult_t user_op_resolve(struct ncclComm *comm, ncclRedOp_t op, ncclDataType_t type,
                             struct reduction *reduction) {
    memset(reduction, 0, sizeof *reduction);
    reduction->op = op;
    if ((int)op < 0)
        return fail(ncclInvalidArgument, "invalid reduction operation %d", (int)op);
    if (op < ncclNumOps)
        return ncclSuccess;
    ncclResult_t result = ncclInvalidArgument;
    pthread_mutex_lock(&comm->lock);
    for (struct user_op *one = comm->user_ops; one != NULL; one = one->next)
        if (one->op == op && one->type == type) {
            *reduction = (struct reduction){ncclNumOps, one->residence, one->device_scalar, {0}};
            memcpy(reduction->scalar, one->scalar, sizeof one->scalar);
            result = ncclSuccess;
        }
    pthread_mutex_unlock(&comm->lock);
    return result == ncclSuccess
               ? result
               : fail(result, "reduction operation %d is not one of this communicator", (int)op);
}

void registrations_free(struct ncclComm *comm) {
    while (comm->windows != NULL) {
        struct ncclWindow_vidmem *window = comm->windows;
        comm->windows = window->next;
        free(window);
    }
    while (comm->registrations != NULL) {
        struct registration *one = comm->registrations;
        comm->registrations = one->next;
        free(one);
    }
    while (comm->user_ops != NULL) {
        struct user_op *one = comm->user_ops;
        comm->user_ops = one->next;
        free(one);
    }
}
