/* SPDX-License-Identifier: Apache-2.0 */
/* Three members that tell each other where they listen, one of which is this process. */
#ifndef LIVESHIFT_DOUBLES_MEMBERS_H
#define LIVESHIFT_DOUBLES_MEMBERS_H

#include "gloo.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMBERS 3

/* Hostname and address after their lengths, then a number for each member, as gloo packs them; or
   without the numbers. */
static inline struct blob member_written(long seed, int rank, bool odd) {
    char *bytes = malloc(256), *at = bytes;
    char host[] = "hostA", address[16] = "";
    snprintf(address, sizeof address, "%ld.%d", seed, rank);
    uint64_t length = strlen(host);
    memcpy(at, &length, sizeof length);
    memcpy(at + sizeof length, host, length);
    at += sizeof length + length;
    length = sizeof address;
    memcpy(at, &length, sizeof length);
    memcpy(at + sizeof length, address, length);
    at += sizeof length + length;
    for (int64_t peer = 0; peer < MEMBERS && !odd; peer++, at += sizeof peer)
        memcpy(at, &peer, sizeof peer);
    return (struct blob){bytes, at, bytes + 256};
}

/* Makes the context of that rank, with listeners numbered from `seed`. */
static inline void connect_members(struct context *context, int rank, long seed, bool odd) {
    struct store store = {.size = MEMBERS}, *pointer = &store;
    for (int member = 0; member < MEMBERS; member++)
        store.blobs[member] = member_written(seed, member, odd);
    context_make(&context->base, rank, MEMBERS, 2);
    connect_full_mesh(context, &pointer, NULL);
    for (int member = 0; member < MEMBERS; member++)
        free((char *)store.blobs[member].begin);
}

#endif
