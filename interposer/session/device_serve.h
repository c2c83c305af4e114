/* SPDX-License-Identifier: Apache-2.0 */
/* A device session, as the service thread serves it; device_session.h has its messages. */
#ifndef LIVESHIFT_INTERPOSER_DEVICE_SERVE_H
#define LIVESHIFT_INTERPOSER_DEVICE_SERVE_H

#include "device_session.h"

#include <stdbool.h>
#include <stddef.h>

/* The devices that are used in a session, each with its primary context held. */
struct device_contexts {
    uint64_t held; /* bits */
    void *of[64];
    void *before; /* this thread's */
};

void contexts_begin(struct device_contexts *contexts);
void contexts_end(struct device_contexts *contexts);
/* Makes a device's primary context current, which the process has made; or, where it has none, the
   one that `address` belongs to. Returns a CUresult. */
int contexts_enter(struct device_contexts *contexts, int32_t device, uint64_t address);

/* Where NEXT has come to. */
struct device_cursor {
    uint64_t next; /* the number of the one to come */
    uint32_t row, block;
};

/* Fills in the allocation of that number; false: it was the last before. */
bool device_list(struct device_cursor *cursor, uint64_t number,
                 struct liveshift_device_reply *reply);

#define DEVICE_BUFFER ((size_t)4 << 20)

struct device_session {
    struct task *task;
    int socket;
    int descriptor; /* came with the request, or goes with the reply; -1: none */
    char *buffer;   /* of DEVICE_BUFFER bytes */
    uint32_t found; /* where the last block was: requests come in the table's order */
    struct device_contexts contexts;
    struct device_cursor cursor;
};

/* Carries a request out; what its reply repeats of it is filled in. */
void device_answer(struct device_session *session, const struct liveshift_device_request *request,
                   struct liveshift_device_reply *reply);
/* The result, and if it isn't 0, the words. */
void device_says(struct liveshift_device_reply *reply, int result, const char *trouble);

#endif
