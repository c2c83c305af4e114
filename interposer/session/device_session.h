/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device session: the GPU helper asks a process of a capsule about its device memory, takes
 * that memory away and gives it back. The process's service thread answers.
 *
 * How it begins: the helper binds a socket (AF_UNIX, SOCK_SEQPACKET) in the capsule at
 * $LIVESHIFT_PAGES/.device.<pid>, with the same <pid> as in the page's name, and listens. The agent
 * then writes the order LIVESHIFT_DEVICES. The service thread connects and sends HELLO (a reply to
 * no request). It sends one reply to each request, in order, until END, or until the peer closes.
 * Then it closes and answers the order in the page. Numbers are little-endian. A message is one
 * packet of exactly the structure's size.
 *
 * Meanwhile every other thread of the process may be stopped, anywhere. So the service thread takes
 * no lock that another thread could hold, and does not use malloc (the driver may). The list may
 * lack an allocation whose making or freeing a stopped thread has begun and not finished: the
 * application does not use its bytes yet, or no longer.
 *
 * tests/interposer/session/test_device_session_layout.py holds the Python mirror,
 * liveshift.interposer.device_session, equal to this header.
 */
#ifndef LIVESHIFT_INTERPOSER_DEVICE_SESSION_H
#define LIVESHIFT_INTERPOSER_DEVICE_SESSION_H

#include <stdint.h>

/* HELLO carries it in `kind`. Increase it when an operation changes its meaning. A new operation
   needs no increase: a process that doesn't know it answers -ENOSYS. */
#define LIVESHIFT_DEVICE_PROTOCOL 1

enum liveshift_device_op {
    /* The process sends it once, first. `value`: its pid in the capsule; `kind`: the protocol. With
       a `result` other than 0, `message` says why it can't serve, and it closes. */
    LIVESHIFT_DEVICE_HELLO = 0,
    /* Returns the allocation of device memory number `argument`, from 0: `address`, `size`,
       `device` (this process's ordinal), that GPU's `uuid` as the process's driver reports it,
       `kind` (enum liveshift_memory: DEVICE, POOL, MAPPED or ARENA), and `value` (1: the process
       has its memory, 0: it was released). -ENOENT after the last. Numbers are valid for one
       session; EXPORT, RELEASE and MAP don't change them. (NVIDIA does not document whether the
       driver reports the new or the old GPU's uuid after a restore to another GPU.) */
    LIVESHIFT_DEVICE_NEXT = 1,
    /* `value`: a 64-bit checksum of [address, address + size). With `argument` 0 it covers all
       bytes, otherwise that many pieces of LIVESHIFT_DEVICE_SAMPLE bytes, spread evenly. It depends
       on the bytes, their order, `size` and `argument`, not on the address, the GPU or the kind. */
    LIVESHIFT_DEVICE_CHECKSUM = 2,
    /* Returns a descriptor of the physical memory of the arena block at `address`, by SCM_RIGHTS
       with the reply, and its `size` and `device`. The block stays as it is. */
    LIVESHIFT_DEVICE_EXPORT = 3,
    /* Unmaps and releases the physical memory of the arena block at `address`; the addresses stay
       reserved. -EALREADY: that was done before. From before RELEASE until after MAP, every thread
       that may use the memory must be stopped, outside of CUDA's calls. */
    LIVESHIFT_DEVICE_RELEASE = 4,
    /* Gives physical memory back to the arena block at `address`, which was released: the memory
       behind the descriptor that comes with the request (SCM_RIGHTS). The block keeps its address,
       and the same devices may access it. `size` must be the block's. */
    LIVESHIFT_DEVICE_MAP = 5,
    /* Waits for all work in the primary contexts that the process uses. The caller has already made
       the driver lock the process, which waits for the work of all contexts. */
    LIVESHIFT_DEVICE_SYNC = 6,
    LIVESHIFT_DEVICE_END = 7,
    /* Makes the memory of the arena block at `address` this process's own. Memory that was
       exported, or came by MAP, is copied to new memory; for that moment the same amount is needed
       again. The driver's checkpoint takes no memory along that was imported. */
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
                       -EINVAL, the size is not the block's; -EALREADY, the block's memory is not
                       where the request needs it; -EBADF, no descriptor came; -ENODEV, no driver
                       is loaded; -ENOSYS, an unknown `op` */
    uint64_t address, size, value;
    int32_t device;
    uint32_t kind;
    uint8_t uuid[16];
    char message[96]; /* if `result` is not 0, in words, NUL-padded */
};

_Static_assert(sizeof(struct liveshift_device_request) == 32, "a request's size is the protocol's");
_Static_assert(sizeof(struct liveshift_device_reply) == 152, "a reply's size likewise");

#endif
