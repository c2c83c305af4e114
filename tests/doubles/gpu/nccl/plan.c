/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plan: what one group does on one communicator. It is one piece of work on one stream, enqueued
 * when the group ends; where the group named several streams, they all wait for it. The plans of one
 * communicator run one after the other in the order of their enqueuing, whatever their streams.
 *
 * A plan captured into a graph runs at each launch and refers to its communicator until the graph
 * and its executables are destroyed.
 */
#include <stdlib.h>

#include "sim.h"

/* Where the further streams of a plan wait for the first. */
struct joint {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int references;
    int others, arrived;
    uint64_t runs;
};

static void joint_release(void *argument) {
    struct joint *joint = argument;
    pthread_mutex_lock(&joint->lock);
    bool last = --joint->references == 0;
    pthread_mutex_unlock(&joint->lock);
    if (!last)
        return;
    pthread_cond_destroy(&joint->changed);
    pthread_mutex_destroy(&joint->lock);
    free(joint);
}

static void joint_wait(void *argument) {
    struct joint *joint = argument;
    pthread_mutex_lock(&joint->lock);
    uint64_t run = joint->runs;
    joint->arrived++;
    pthread_cond_broadcast(&joint->changed);
    while (joint->runs == run)
        pthread_cond_wait(&joint->changed, &joint->lock);
    pthread_mutex_unlock(&joint->lock);
}

static void joint_gather(struct joint *joint) {
    pthread_mutex_lock(&joint->lock);
    while (joint->arrived < joint->others)
        pthread_cond_wait(&joint->changed, &joint->lock);
    pthread_mutex_unlock(&joint->lock);
}

static void joint_let_go(struct joint *joint) {
    pthread_mutex_lock(&joint->lock);
    joint->arrived = 0;
    joint->runs++;
    pthread_cond_broadcast(&joint->changed);
    pthread_mutex_unlock(&joint->lock);
}

void plan_free(struct plan *plan) {
    for (struct operation *one = plan->operations, *next; one != NULL; one = next) {
        next = one->next;
        free(one->waits);
        free(one);
    }
    if (plan->joint != NULL)
        joint_release(plan->joint);
    free(plan->streams);
    comm_release(plan->comm);
    free(plan);
}

bool interrupted(const struct ncclComm *comm) {
    return comm->aborted || comm->revoked || comm->stopping;
}

/* Waits for the plan's turn; false if the communicator was stopped. */
static bool take_turn(struct plan *plan) {
    struct ncclComm *comm = plan->comm;
    pthread_mutex_lock(&comm->lock);
    /* a replay takes whichever moment is free: events may have put it before plans enqueued earlier */
    while (!interrupted(comm) && (comm->busy || (!plan->captured && comm->turn != plan->ticket)))
        pthread_cond_wait(&comm->changed, &comm->lock);
    bool go = !interrupted(comm);
    if (go)
        comm->busy = true;
    comm->running += go;
    pthread_mutex_unlock(&comm->lock);
    return go;
}

static void pass_turn(struct plan *plan, bool went) {
    struct ncclComm *comm = plan->comm;
    pthread_mutex_lock(&comm->lock);
    if (went)
        comm->busy = false;
    comm->running -= went;
    if (!plan->captured) {
        comm->turn++;
        comm->pending--;
    }
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

static void plan_run(void *argument) {
    struct plan *plan = argument;
    if (plan->joint != NULL)
        joint_gather(plan->joint);
    bool go = take_turn(plan);
    if (go)
        run_operations(plan->comm, plan->operations);
    pass_turn(plan, go);
    if (plan->joint != NULL)
        joint_let_go(plan->joint);
}

static void plan_release(void *argument) {
    struct plan *plan = argument;
    struct ncclComm *comm = plan->comm;
    pthread_mutex_lock(&comm->lock);
    if (plan->captured) {
        comm->persistent--;
        pthread_cond_broadcast(&comm->changed);
    }
    pthread_mutex_unlock(&comm->lock);
    plan_free(plan);
}

static void count_plan(struct plan *plan, int change) {
    pthread_mutex_lock(&plan->comm->lock);
    if (plan->captured)
        plan->comm->persistent += change;
    else
        plan->comm->pending += change;
    pthread_mutex_unlock(&plan->comm->lock);
}

static ncclResult_t enqueue_joints(struct plan *plan) {
    struct joint *joint = calloc(1, sizeof *joint);
    if (joint == NULL)
        abort();
    pthread_mutex_init(&joint->lock, NULL);
    pthread_cond_init(&joint->changed, NULL);
    joint->references = plan->stream_count;
    joint->others = plan->stream_count - 1;
    plan->joint = joint;
    for (int other = 1; other < plan->stream_count; other++)
        if (cuda_enqueue(plan->streams[other], joint_wait, joint, joint_release) != 0)
            return ncclUnhandledCudaError;
    return ncclSuccess;
}

static void record_launch_events(const struct plan *plan) {
    for (const struct operation *one = plan->operations; one != NULL; one = one->next)
        if (one->launched != NULL)
            cuda_record_event(one->launched, plan->streams[0]);
}

/* A send to oneself needs its receive in the same group, as in the real one. */
static ncclResult_t check_selfsends(const struct plan *plan) {
    int unmatched = 0;
    for (const struct operation *one = plan->operations; one != NULL; one = one->next)
        if (one->root == plan->comm->rank && one->kind == OPERATION_SEND)
            unmatched++;
        else if (one->root == plan->comm->rank && one->kind == OPERATION_RECV)
            unmatched--;
    return unmatched == 0 ? ncclSuccess
                          : fail(ncclInvalidUsage,
                                 "Trying to send to self without a matching recv, or the reverse");
}

ncclResult_t plan_launch(struct plan *plan) {
    struct ncclComm *comm = plan->comm;
    ncclResult_t result = check_selfsends(plan);
    if (result != ncclSuccess) {
        plan_free(plan);
        return result;
    }
    plan->captured = cuda_capturing(plan->streams[0]);
    if (plan->stream_count > 1)
        result = enqueue_joints(plan);
    record_launch_events(plan);
    comm_keep(comm);
    pthread_mutex_lock(&comm->launching);
    plan->ticket = comm->tickets;
    count_plan(plan, 1);
    bool captured = plan->captured;
    if (result == ncclSuccess &&
        cuda_enqueue(plan->streams[0], plan_run, plan, plan_release) == 0) {
        comm->tickets += !captured;
    } else {
        result =
            fail(ncclUnhandledCudaError, "enqueuing on stream %p failed", (void *)plan->streams[0]);
        count_plan(plan, -1);
        plan_free(plan);
    }
    pthread_mutex_unlock(&comm->launching);
    comm_release(comm);
    return result;
}
