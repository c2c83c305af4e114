/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How gloo's contexts get an identity that all their members agree on.
 *
 * While a context connects, its members say through a store where they listen. Each member writes
 * one blob (hostname, address of its listener, and one number for every peer, from a counter of the
 * listener) and reads the blobs of all others. The interposer sees the blobs in the order of
 * ranks and hashes them. Every member hashes the same bytes. Two contexts that live at the same
 * time have different bytes: no two listeners have one address, and a listener uses no number
 * twice.
 *
 * The interposer sends nothing for this and adds no call. If it doesn't see a context's blobs
 * as expected, the context has no identity, and its operations pass as before. This is so for gloo
 * before torch 2.2, TORCH_GLOO_LAZY_INIT (members read blobs one by one, much later) and
 * GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER (blobs without the numbers, so two contexts may have the same
 * bytes).
 *
 * C++ structures as C sees them: std::shared_ptr and references are passed as pointers;
 * std::vector<char> is {begin, end, end of storage}, std::string {data, length, ...}. Compare with
 * gloo's sources: gloo/transport/tcp/context.cc, gloo/rendezvous/context.cc.
 */

#include "gloo_contexts.h"
#include "hooks/forward.h"

#include <string.h>

typedef void *context_make_hook(void *self, int rank, int size, int base);
typedef void *context_end_hook(void *self);
typedef void connect_full_mesh_hook(void *self, void *store, void *device);
typedef void connect_all_pairs_hook(void *self, void *store);

/* std::vector<char>. Functions return it in memory, like every C++ object with a destructor. */
struct blob {
    const char *begin, *end, *limit;
};
typedef struct blob own_address_hook(const void *self);
typedef void *peer_address_hook(void *self, const struct blob *blob);

struct text {
    const char *data;
    size_t length;
};
typedef void group_text(void *self, const struct text *text);
typedef group_text group_name_hook, group_description_hook;
LIVESHIFT_GLOO_CONTEXT_POINTS(DECLARE_HOOK)

/* The context that this thread made last; the same thread connects it next. */
static __thread struct {
    const void *object;
    int rank, size;
} made_last;

/* The context that this thread is connecting. */
struct connecting {
    struct gate *gate;
    const void *object, *transport;
    int rank, size;
    int members; /* how many members' blobs are in the hash */
    uint64_t hash, own;
    bool unexpected;
};
static __thread struct connecting *connecting;

/* Contexts that this thread has connected for a process group whose name comes next. */
static __thread struct {
    struct liveshift_communicator *rows[4];
    unsigned n;
    bool named;
} unnamed;

/* Whether the blob has the form that gloo writes: hostname and address, each after its length, then
   a number for each of `size` ranks. */
static bool is_expected(const struct blob *blob, int size) {
    size_t left = (size_t)(blob->end - blob->begin);
    const char *at = blob->begin;
    for (unsigned part = 0; part < 2; part++) {
        uint64_t length;
        if (left < sizeof length)
            return false;
        memcpy(&length, at, sizeof length);
        left -= sizeof length;
        if (length == 0 || length > left)
            return false;
        at += sizeof length + length;
        left -= length;
    }
    return left == (size_t)size * sizeof(int64_t);
}

static uint64_t hash_of(struct connecting *c, const struct blob *blob) {
    if (blob->begin == NULL || blob->end < blob->begin || !is_expected(blob, c->size)) {
        c->unexpected = true;
        return 1;
    }
    return hash64(0, blob->begin, (size_t)(blob->end - blob->begin));
}

static void add_member(struct connecting *c, uint64_t hash) {
    c->hash = hash64(c->hash, &hash, sizeof hash);
    c->members++;
}

static void add_own_if_next(struct connecting *c) {
    if (c->members == c->rank && c->own != 0)
        add_member(c, c->own);
}

struct blob hook_own_address(const void *self) {
    struct blob blob = REAL(own_address)(self);
    struct connecting *c = connecting;
    if (c != NULL) {
        c->unexpected |= c->own != 0 || c->members != 0;
        c->own = hash_of(c, &blob);
    }
    return blob;
}

void *hook_peer_address(void *self, const struct blob *blob) {
    struct connecting *c = connecting;
    if (c != NULL) {
        add_own_if_next(c);
        add_member(c, hash_of(c, blob));
    }
    return REAL(peer_address)(self, blob);
}

void hook_connect_all_pairs(void *self, void *store) {
    if (connecting != NULL)
        connecting->transport = self;
    REAL(connect_all_pairs)(self, store);
}

static void connected(struct connecting *c) {
    add_own_if_next(c);
    if (c->object == NULL || c->size < 1 || c->rank < 0 || c->rank >= c->size)
        return;
    bool agreed = !c->unexpected && c->own != 0 && c->members == c->size;
    struct communicator_info made = {.library = LIVESHIFT_GLOO,
                                     .id = agreed ? c->hash : 0,
                                     .size = c->size,
                                     .rank = c->rank,
                                     .device = -1,
                                     .made_by = 'G'};
    const void *keys[2] = {c->object, c->transport};
    struct gloo_context *context = gloo_context_add(c->gate, &made, keys);
    if (unnamed.named)
        unnamed.n = 0;
    unnamed.named = false;
    if (context != NULL && unnamed.n < sizeof unnamed.rows / sizeof unnamed.rows[0])
        unnamed.rows[unnamed.n++] = context->row;
}

static void end_connecting(struct connecting *c) {
    connecting = NULL;
    gate_untracked_end(c->gate);
}

void hook_connect_full_mesh(void *self, void *store, void *device) {
    __attribute__((cleanup(end_connecting))) struct connecting c = {.gate = current_gate()};
    gate_untracked_begin(c.gate);
    /* gloo::Context is a base of gloo::rendezvous::Context, at its beginning or after its vtable
       pointer. Collectives have the address of the base. */
    const char *object = made_last.object;
    if (object == self || object == (char *)self + sizeof(void *)) {
        c.object = object;
        c.rank = made_last.rank;
        c.size = made_last.size;
    }
    connecting = &c;
    REAL(connect_full_mesh)(self, store, device);
    connecting = NULL;
    connected(&c);
}

void *hook_context_make(void *self, int rank, int size, int base) {
    made_last.object = self;
    made_last.rank = rank;
    made_last.size = size;
    return REAL(context_make)(self, rank, size, base);
}

void *hook_context_end(void *self) {
    if (gloo_context_of(self) != NULL)
        gloo_context_end(current_gate(), self);
    return REAL(context_end)(self);
}

static void name(const struct text *text, bool description) {
    static const char none[] = "undefined"; /* torch's text for a group without description */
    size_t length = text->length < sizeof unnamed.rows[0]->name - 1
                        ? text->length
                        : sizeof unnamed.rows[0]->name - 1;
    if (description &&
        (length == 0 || (length == sizeof none - 1 && memcmp(text->data, none, length) == 0)))
        return;
    for (unsigned i = 0; i < unnamed.n; i++) {
        char *to = unnamed.rows[i]->name;
        memset(to, 0, sizeof unnamed.rows[i]->name);
        memcpy(to, text->data, length);
    }
}

void hook_group_name(void *self, const struct text *text) {
    if (!unnamed.named)
        name(text, false);
    unnamed.named = true;
    REAL(group_name)(self, text);
}

void hook_group_description(void *self, const struct text *text) {
    name(text, true);
    unnamed.n = 0;
    REAL(group_description)(self, text);
}
