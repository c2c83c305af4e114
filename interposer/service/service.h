/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The service thread. Each process that has NCCL communicators or device memory has one; it starts
 * with the first of either. It carries out the agent's orders beyond closing the gate: it drains
 * the streams, tears communicators down, makes fresh unique ids, rebuilds communicators, and serves
 * a device session. It sleeps on the order's futex.
 */
#ifndef LIVESHIFT_INTERPOSER_SERVICE_H
#define LIVESHIFT_INTERPOSER_SERVICE_H

#include "nccl/vcomm.h"

/* Starts the thread, if this process has none; returns when it runs. */
void service_begin(void);

/* The same for a process with device memory; does nothing if no agent can ever give an order. To be
   called before the memory is recorded: an agent that sees the record relies on the thread. */
void service_for_memory(void);

/* One task of the service thread: its order, its time limits and its result. */
struct task {
    struct gate *gate;
    struct order order;
    int64_t deadline_ns;       /* until then the thread waits for NCCL and for streams */
    int64_t abort_deadline_ns; /* until then NCCL may abort what has not come back */
    int result;                /* 0 or an errno value */
    char message[160];
};

int64_t task_now_ns(void);
bool task_timed_out(const struct task *task);
/* Whether the agent has given another order. */
bool task_obsolete(const struct task *task);
void task_pause(void); /* sleeps 1 ms */

/* Records that the task failed, and why; the first reason stays. Returns the result. */
int task_fail(struct task *task, int result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Writes a communicator's name, or its number, into `text`, for messages. */
const char *task_name(const struct vcomm *v, char text[static 80]);

void drain(struct task *task);         /* drain.c */
void teardown(struct task *task);      /* teardown.c */
void fresh_ids(struct task *task);     /* rebuild.c */
void rebuild(struct task *task);       /* rebuild.c */
void serve_devices(struct task *task); /* device_session.c */

/* An array of the `many` communicators in the order they were made; the caller frees it. */
struct vcomm **vcomms_snapshot(unsigned *many);

#endif
