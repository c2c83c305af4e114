/* SPDX-License-Identifier: Apache-2.0 */
/* gloo's objects, as far as the double and its driver need them, and its functions by short names. */
#ifndef LIVESHIFT_DOUBLES_GLOO_H
#define LIVESHIFT_DOUBLES_GLOO_H

#include <stddef.h>

#define own_address _ZNK4gloo9transport3tcp4Rank5bytesEv
#define peer_address _ZN4gloo9transport3tcp4RankC1ERKSt6vectorIcSaIcEE
#define connect_all_pairs                                                                          \
    _ZN4gloo9transport3tcp7Context24createAndConnectAllPairsESt10shared_ptrINS_6IStoreEE
#define connect_full_mesh                                                                          \
    _ZN4gloo10rendezvous7Context15connectFullMeshESt10shared_ptrINS0_5StoreEERS2_INS_9transport6DeviceEE
#define context_make _ZN4gloo7ContextC2Eiii
#define context_end _ZN4gloo7ContextD2Ev
#define allreduce _ZN4gloo9allreduceERKNS_16AllreduceOptionsE
#define barrier _ZN4gloo7barrierERNS_14BarrierOptionsE
#define buffer_send _ZN4gloo9transport3tcp13UnboundBuffer4sendEimmm
#define buffer_recv _ZN4gloo9transport3tcp13UnboundBuffer4recvEimmm
#define buffer_recv_any _ZN4gloo9transport3tcp13UnboundBuffer4recvESt6vectorIiSaIiEEmmm
#define buffer_sent _ZN4gloo9transport3tcp13UnboundBuffer20handleSendCompletionEi
#define buffer_received _ZN4gloo9transport3tcp13UnboundBuffer20handleRecvCompletionEi
#define buffer_end _ZN4gloo9transport3tcp13UnboundBufferD1Ev
#define group_name                                                                                 \
    _ZN4c10d12ProcessGroup12setGroupNameERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE

/* std::vector<char> */
struct blob {
    const char *begin, *end, *limit;
};

/* std::string */
struct text {
    const char *data;
    size_t length;
};

/* What the members wrote, by rank. */
struct store {
    int size;
    struct blob blobs[8];
};

struct base {
    int rank, size, base;
};

struct transport {
    int rank;
};

/* gloo::rendezvous::Context, whose base comes after the vtable. */
struct context {
    void *vtable;
    struct base base;
    struct transport transport;
};

/* gloo::transport::tcp::UnboundBuffer, which ends in a shared pointer to its context. */
struct buffer {
    void *vtable;
    void *address;
    size_t size;
    struct transport *context;
};

/* std::vector<int> */
struct ranks {
    const int *begin, *end, *limit;
};

/* Every options object begins with a shared pointer to gloo::Context. */
struct options {
    struct base *context;
    void *count;
    void (*inside)(void);
};

struct blob own_address(const void *self);
void *peer_address(void *self, const struct blob *blob);
void connect_all_pairs(void *self, void *store);
void connect_full_mesh(void *self, void *store, void *device);
void *context_make(void *self, int rank, int size, int base);
void *context_end(void *self);
void allreduce(struct options *options);
void barrier(struct options *options);
void buffer_send(struct buffer *buffer, int peer, size_t slot, size_t offset, size_t length);
void buffer_recv(struct buffer *buffer, int peer, size_t slot, size_t offset, size_t length);
void buffer_recv_any(struct buffer *buffer, struct ranks *peers, size_t slot, size_t offset,
                     size_t length);
void buffer_sent(struct buffer *buffer, int peer);
void buffer_received(struct buffer *buffer, int peer);
void *buffer_end(struct buffer *buffer);
void group_name(void *group, const struct text *name);

#endif
