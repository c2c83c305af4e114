/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The service thread: one in each process that has NCCL communicators or device memory, begun with
 * the first of either. It does what the agent orders beyond closing the gate: drains the streams,
 * tears communicators down, makes fresh unique ids, has communicators rebuilt, serves a device
 * session. It sleeps on the order's futex.
 */
#ifndef LIVESHIFT_INTERPOSER_SERVICE_H
#define LIVESHIFT_INTERPOSER_SERVICE_H

#include "nccl/vcomm.h"

/* Begins the thread, if this process has none. */
void service_begin(void);

/* The same, because there is device memory: not where no agent could ever order anything. */
void service_for_memory(void);

/* A part of the work: under which order, until when, and what came of it. */
struct task {
    struct gate *gate;
    uint32_t want, attempt, version;
    int64_t deadline_ns; /* NCCL is given until then to come back, */
    int64_t last_ns;     /* and until then to abort what has not */
    int result;          /* 0 or an errno value */
    char trouble[160];
};

int64_t task_now_ns(void);
bool task_late(const struct task *task);
/* The agent has given another order. */
bool task_obsolete(const struct task *task);
void task_pause(void); /* a millisecond */

/* Says why; the first reason stays. Returns the result. */
int task_fails(struct task *task, int result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* A communicator for people: its name, or its number, in `text`. */
const char *task_name(const struct vcomm *v, char text[static 80]);

void drain(struct task *task);         /* drain.c */
void teardown(struct task *task);      /* teardown.c */
void fresh_ids(struct task *task);     /* rebuild.c */
void rebuild(struct task *task);       /* rebuild.c */
void serve_devices(struct task *task); /* device_session.c */

/* The communicators in the order they were made, `many` of them; to be freed. */
struct vcomm **vcomms_now(unsigned *many);

#endif
