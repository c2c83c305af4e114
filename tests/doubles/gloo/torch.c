/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A double of libtorch_cpu.so as far as the interposer sees gloo: collectives that do nothing or
 * call back, and contexts that connect as gloo's do, by calling each other through the PLT.
 */
#include "hooks/entry_points.h"

#include "gloo.h"

#include <string.h>

#define X(kind, symbol, need)                                                                      \
    void symbol(struct options *options) {                                                         \
        if (options != NULL && options->inside != NULL)                                            \
            options->inside();                                                                     \
    }
LIVESHIFT_GLOO_ENTRY_POINTS(X)
#undef X

struct blob own_address(const void *self) { return *(const struct blob *)self; }

void *peer_address(void *self, const struct blob *blob) {
    *(struct blob *)self = *blob;
    return self;
}

void connect_all_pairs(void *self, void *store) {
    const struct store *s = *(struct store **)store;
    struct blob sink;
    struct transport *transport = self;
    (void)own_address(&s->blobs[transport->rank]);
    for (int peer = 0; peer < s->size; peer++)
        if (peer != transport->rank)
            peer_address(&sink, &s->blobs[peer]);
}

void connect_full_mesh(void *self, void *store, void *device) {
    struct context *context = self;
    (void)device;
    context->transport.rank = context->base.rank;
    connect_all_pairs(&context->transport, store);
}

void *context_make(void *self, int rank, int size, int base) {
    struct base *b = self;
    *b = (struct base){.rank = rank, .size = size, .base = base};
    return self;
}

void *context_end(void *self) {
    memset(self, 0, sizeof(struct base));
    return self;
}

/* Posting does nothing; the driver says when it is complete. */
void buffer_send(struct buffer *buffer, int peer, size_t slot, size_t offset, size_t length) {
    (void)buffer, (void)peer, (void)slot, (void)offset, (void)length;
}

void buffer_recv(struct buffer *buffer, int peer, size_t slot, size_t offset, size_t length) {
    (void)buffer, (void)peer, (void)slot, (void)offset, (void)length;
}

void buffer_recv_any(struct buffer *buffer, struct ranks *peers, size_t slot, size_t offset,
                     size_t length) {
    (void)buffer, (void)peers, (void)slot, (void)offset, (void)length;
}

void buffer_sent(struct buffer *buffer, int peer) { (void)buffer, (void)peer; }

void buffer_received(struct buffer *buffer, int peer) { (void)buffer, (void)peer; }

void *buffer_end(struct buffer *buffer) { return buffer; }

void group_name(void *group, const struct text *name) { (void)group, (void)name; }
