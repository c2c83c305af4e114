/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups, one per thread. Every call that does something is a group of its own or joins the open
 * one: creations and the like become jobs, operations join the plan of their communicator. At the
 * outermost ncclGroupEnd jobs run together and plans are enqueued together.
 *
 * Creations and operations may not be mixed in one group (nccl.h); here that is an error.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "sim.h"

static _Thread_local struct {
    int depth;
    ncclResult_t error;
    struct job *jobs, **last_job;
    struct plan *plans, **last_plan;
} group;

struct job *job_new(struct ncclComm *comm, ncclResult_t (*run)(struct job *), const void *argument,
                    size_t size) {
    struct job *job = calloc(1, sizeof *job);
    if (job == NULL || (job->argument = calloc(1, size + 1)) == NULL)
        abort();
    if (argument != NULL)
        memcpy(job->argument, argument, size);
    comm_keep(comm);
    job->comm = comm;
    job->run = run;
    job->blocking = comm->config.blocking != 0;
    return job;
}

static void job_free(struct job *job) {
    if (job->other != NULL)
        comm_release(job->other);
    comm_release(job->comm);
    free(job->argument);
    free(job);
}

static void count_job(struct ncclComm *comm, int change, ncclResult_t state) {
    if (comm == NULL)
        return;
    pthread_mutex_lock(&comm->lock);
    comm->jobs += change;
    if (state == ncclInProgress ? comm->async == ncclSuccess : comm->async == ncclInProgress)
        comm->async = state;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->lock);
}

static void job_begin(struct job *job) {
    ncclResult_t state = job->blocking ? ncclSuccess : ncclInProgress;
    if (job->ending)
        return;
    count_job(job->comm, 1, state);
    count_job(job->other, 1, state);
}

/* A blocking creation that failed leaves no communicator. */
static void job_end(struct job *job) {
    if (!job->ending) {
        if (job->late && job->result == ncclSuccess)
            __atomic_store_n(job->handle, job->comm, __ATOMIC_RELEASE);
        bool failed = job->handle != NULL && job->blocking && job->result != ncclSuccess;
        if (failed) {
            __atomic_store_n(job->handle, NULL, __ATOMIC_RELEASE);
            pthread_mutex_lock(&job->comm->lock);
            failed = !job->comm->destroy_called; /* else whoever aborts it ends it */
            job->comm->destroy_called = true;
            pthread_mutex_unlock(&job->comm->lock);
        }
        count_job(job->other, -1, ncclSuccess);
        count_job(job->comm, -1, job->result);
        if (failed) {
            comm_stop_operations(job->comm);
            comm_tear_down(job->comm);
            comm_retire(job->comm);
        }
    }
    job_free(job);
}

static void *job_thread(void *argument) {
    struct job *job = argument;
    prctl(PR_SET_NAME, "NCCL Job");
    job->result = job->run(job);
    return NULL;
}

static ncclResult_t run_jobs(struct job *jobs) {
    ncclResult_t result = ncclSuccess;
    if (jobs->next == NULL)
        jobs->result = jobs->run(jobs);
    for (struct job *job = jobs; jobs->next != NULL && job != NULL; job = job->next) {
        job->threaded = pthread_create(&job->thread, NULL, job_thread, job) == 0;
        if (!job->threaded)
            job->result = ncclSystemError;
    }
    for (struct job *job = jobs; job != NULL; job = job->next) {
        if (job->threaded)
            pthread_join(job->thread, NULL);
        if (result == ncclSuccess)
            result = job->result;
    }
    for (struct job *job = jobs, *next; job != NULL; job = next) {
        next = job->next;
        job_end(job);
    }
    return result;
}

static void *launcher_thread(void *argument) {
    prctl(PR_SET_NAME, "NCCL Launch");
    run_jobs(argument);
    return NULL;
}

/* A group with a non-blocking communicator in it is carried out by a thread of its own. */
static ncclResult_t launch_jobs(struct job *jobs) {
    bool blocking = true;
    pthread_t launcher;
    for (struct job *job = jobs; job != NULL; job = job->next)
        blocking &= job->blocking;
    for (struct job *job = jobs; job != NULL; job = job->next) {
        job->blocking = blocking;
        job_begin(job);
    }
    if (blocking)
        return run_jobs(jobs);
    if (pthread_create(&launcher, NULL, launcher_thread, jobs) != 0)
        return run_jobs(jobs);
    pthread_detach(launcher);
    return ncclInProgress;
}

ncclResult_t group_start(void) {
    if (group.depth++ == 0) {
        group.error = ncclSuccess;
        group.jobs = NULL;
        group.last_job = &group.jobs;
        group.plans = NULL;
        group.last_plan = &group.plans;
    }
    return ncclSuccess;
}

ncclResult_t group_fail(ncclResult_t result) {
    if (group.depth > 0 && group.error == ncclSuccess)
        group.error = result;
    return result;
}

static void drop_all(struct job *jobs, struct plan *plans) {
    for (struct job *next; jobs != NULL; jobs = next) {
        next = jobs->next;
        if (jobs->handle != NULL) {
            *jobs->handle = NULL;
            comm_tear_down(jobs->comm);
            comm_retire(jobs->comm);
        }
        job_free(jobs);
    }
    for (struct plan *next; plans != NULL; plans = next) {
        next = plans->next;
        plan_free(plans);
    }
}

static ncclResult_t end(bool launch) {
    if (group.depth == 0)
        return fail(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--group.depth > 0)
        return ncclSuccess;
    struct job *jobs = group.jobs;
    struct plan *plans = group.plans;
    group.jobs = NULL;
    group.plans = NULL;
    if (group.error == ncclSuccess && jobs != NULL && plans != NULL)
        group.error =
            fail(ncclInvalidUsage, "communicator creation and operations mixed in one group");
    if (group.error != ncclSuccess || !launch) {
        drop_all(jobs, plans);
        return group.error;
    }
    ncclResult_t result = jobs != NULL ? launch_jobs(jobs) : ncclSuccess;
    for (struct plan *next; plans != NULL; plans = next) {
        next = plans->next;
        ncclResult_t launched = plan_launch(plans);
        if (result == ncclSuccess)
            result = launched;
    }
    return result;
}

ncclResult_t group_end(void) { return end(true); }

/* Takes the job. */
ncclResult_t group_add_job(struct job *job) {
    group_start();
    *group.last_job = job;
    group.last_job = &job->next;
    return group_end();
}

static struct plan *plan_of(struct ncclComm *comm) {
    struct plan *plan = group.plans;
    while (plan != NULL && plan->comm != comm)
        plan = plan->next;
    if (plan != NULL)
        return plan;
    plan = calloc(1, sizeof *plan);
    if (plan == NULL)
        abort();
    comm_keep(comm);
    plan->comm = comm;
    plan->tail = &plan->operations;
    *group.last_plan = plan;
    group.last_plan = &plan->next;
    return plan;
}

/* Takes the operation. */
ncclResult_t group_add_operation(struct ncclComm *comm, struct operation *operation,
                                 nccl_stream stream) {
    group_start();
    struct plan *plan = plan_of(comm);
    int known = 0;
    while (known < plan->stream_count && plan->streams[known] != stream)
        known++;
    if (known == plan->stream_count) {
        plan->streams = realloc(plan->streams, (size_t)(known + 1) * sizeof *plan->streams);
        if (plan->streams == NULL)
            abort();
        plan->streams[plan->stream_count++] = stream;
    }
    *plan->tail = operation;
    plan->tail = &operation->next;
    return group_end();
}

API(ncclResult_t, ncclGroupStart, (void)) { return group_start(); }

API(ncclResult_t, ncclGroupEnd, (void)) { return group_end(); }

API(ncclResult_t, ncclGroupSimulateEnd, (ncclSimInfo_t * info)) {
    size_t size = 0;
    ncclSimInfo_t told;
    memset(&told, 0, sizeof told);
    if (info != NULL) {
        memcpy(&size, info, sizeof size);
        size = size < sizeof told ? size : sizeof told;
        memcpy(&told, info, size);
        if (told.magic != NCCL_SIM_INFO_MAGIC)
            group_fail(fail(ncclInvalidArgument, "ncclSimInfo_t argument not initialized via "
                                                 "NCCL_SIM_INFO_INITIALIZER"));
    }
    ncclResult_t result = end(false);
    if (result == ncclSuccess && info != NULL) {
        told.estimatedTime = 1.0f; /* µs: nothing is simulated about time */
        memcpy(info, &told, size);
    }
    return result;
}
