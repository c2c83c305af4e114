/* SPDX-License-Identifier: Apache-2.0 */
/* The service thread's side of a device session; device_session.h has its messages. */
#ifndef LIVESHIFT_INTERPOSER_DEVICE_SERVE_H
#define LIVESHIFT_INTERPOSER_DEVICE_SERVE_H

#include "device_session.h"

#include <stdbool.h>
#include <stddef.h>

/* The devices that a session uses. It holds the primary context of each. */
struct device_contexts {
    uint64_t held; /* bits */
    void *of[64];
    void *before; /* the context that was current on this thread before */
};

void contexts_begin(struct device_contexts *contexts);
void contexts_end(struct device_contexts *contexts);
/* Makes a device's primary context current. If the process has not made one, it takes the context
   that `address` belongs to. Returns a CUresult. */
int contexts_enter(struct device_contexts *contexts, int32_t device, uint64_t address);

/* How far the operation NEXT has come. */
struct device_cursor {
    uint64_t next; /* the number of the next allocation */
    uint32_t row, block;
};

/* Fills in the allocation of that number. False: there is none; the one before was the last. */
bool device_list(struct device_cursor *cursor, uint64_t number,
                 struct liveshift_device_reply *reply);

#define DEVICE_BUFFER ((size_t)4 << 20)

struct device_session {
    struct task *task;
    int socket;
    int descriptor; /* came with the request, or goes with the reply; -1: none */
    char *buffer;   /* DEVICE_BUFFER bytes */
    uint32_t found; /* entry of the last block; requests come in the table's order */
    struct device_contexts contexts;
    struct device_cursor cursor;
};

/* Carries a request out. The caller has filled in the fields that the reply repeats. */
void device_handle_request(struct device_session *session,
                           const struct liveshift_device_request *request,
                           struct liveshift_device_reply *reply);
/* Sets the reply's result and, if it isn't 0, the text. */
void device_set_result(struct liveshift_device_reply *reply, int result, const char *message);

#endif
