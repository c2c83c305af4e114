/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device session: root's helper on a host asks a process of a capsule about its device memory,
 * and takes that memory away and gives it back. It is served by the process's service thread.
 *
 * How it begins: the helper binds a socket (AF_UNIX, SOCK_SEQPACKET) at $LIVESHIFT_PAGES/.device.<pid>
 * in the capsule, <pid> as the page's name has it, and listens; the agent then writes the order
 * LIVESHIFT_DEVICES. The service thread connects, says HELLO (a reply to no request), and answers one
 * reply to each request, in order, until END, or until the peer closes. Then it closes and answers
 * the order in the page. Numbers are little-endian; a message is one packet, of exactly the
 * structure's size.
 *
 * While it serves, every other thread of the process may be stopped, wherever it is: no lock is taken
 * on this path that another thread could hold, and nothing is allocated by malloc (the driver may).
 * So an allocation that a stopped thread has begun and not yet returned from, or whose freeing it has
 * begun, may be missing from the list: its bytes are nobody's yet, or no more.
 *
 * tests/test_device_session_layout.py holds liveshift.interposer.device_session, the Python mirror,
 * equal to this header.
 */
#ifndef LIVESHIFT_INTERPOSER_DEVICE_SESSION_H
#define LIVESHIFT_INTERPOSER_DEVICE_SESSION_H

#include <stdint.h>

/* Said in HELLO's `kind`. Increase when an operation changes its meaning; a new one needs no
   increase: who doesn't know it answers -ENOSYS. */
#define LIVESHIFT_DEVICE_PROTOCOL 1

enum liveshift_device_op {
    /* By the process, once, first. `value`: its pid in the capsule; `kind`: the protocol. With a
       `result` other than 0, `trouble` says why it can't serve, and it closes. */
    LIVESHIFT_DEVICE_HELLO = 0,
    /* The allocation of device memory number `argument`, from 0: `address`, `size`, `device` (this
       process's ordinal), that GPU's `uuid` as the process's driver tells it, `kind` (enum
       liveshift_memory: DEVICE, POOL, MAPPED or ARENA), `value` 1: its memory is here, 0: it was
       given up. -ENOENT after the last. Numbers are good for one session; EXPORT, RELEASE and MAP
       don't change them. (Whether a driver tells the new GPU's uuid or the old one's after a restore
       to another GPU is documented nowhere.) */
    LIVESHIFT_DEVICE_NEXT = 1,
    /* `value`: a 64-bit checksum of [address, address + size), of all bytes with `argument` 0, else
       of that many pieces of LIVESHIFT_DEVICE_SAMPLE bytes, spread evenly. Depends on the bytes,
       their order, `size` and `argument`, not on the address, the GPU or the kind. */
    LIVESHIFT_DEVICE_CHECKSUM = 2,
    /* A descriptor of the physical memory of the arena block at `address`, by SCM_RIGHTS with the
       reply; `size` and `device` are told. The block stays as it is. */
    LIVESHIFT_DEVICE_EXPORT = 3,
    /* Unmaps and releases the physical memory of the arena block at `address`; the addresses stay
       reserved. -EALREADY: that was done before. This and MAP only while every thread that may use
       the memory is stopped, or waits inside CUDA, from before the one until after the other. */
    LIVESHIFT_DEVICE_RELEASE = 4,
    /* The arena block at `address`, which was given up, gets the physical memory behind the
       descriptor that comes with the request (SCM_RIGHTS), at its old address, accessible as it
       was. `size` must be the block's. */
    LIVESHIFT_DEVICE_MAP = 5,
    /* Waits for all work of every device that the process uses. */
    LIVESHIFT_DEVICE_SYNC = 6,
    LIVESHIFT_DEVICE_END = 7,
    /* Sees to it that the memory of the arena block at `address` is this process's alone: what was
       exported, or came by MAP, is copied to fresh memory, which needs as much again for that
       moment. The driver's checkpoint takes no memory along that was imported. */
    LIVESHIFT_DEVICE_OWN = 8,
};

#define LIVESHIFT_DEVICE_SAMPLE 4096

struct liveshift_device_request {
    uint32_t op;    /* enum liveshift_device_op */
    int32_t device; /* unused so far: 0 */
    uint64_t address, size, argument;
};

struct liveshift_device_reply {
    uint32_t op; /* the request's */
    int32_t
        result; /* 0; a CUresult; or -errno: -ENOENT, there is no such allocation or arena block;
                       -EINVAL, what was asked doesn't fit it; -ENOSYS, an unknown `op` */
    uint64_t address, size, value;
    int32_t device;
    uint32_t kind;
    uint8_t uuid[16];
    char trouble[96]; /* if `result` is not 0, in words, NUL-padded */
};

_Static_assert(sizeof(struct liveshift_device_request) == 32, "a request's size is the protocol's");
_Static_assert(sizeof(struct liveshift_device_reply) == 152, "a reply's size likewise");

#endif
