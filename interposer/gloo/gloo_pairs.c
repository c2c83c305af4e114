/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hooks of gloo's point-to-point operations. The sends of one rank to another, and the receives
 * of that rank from the first, share one clock: the n-th send is in the same cut as the n-th
 * receive. The clock ignores tags; where tags change the order, gate.c's rule for blocking clocks
 * helps.
 *
 * An operation has come back when gloo has completed it, which gloo reports on its own thread. We
 * do not wait until the program waits for it: that may be after the next collective.
 *
 * The sender of a receive from any rank is known only when the message arrives. Until then it
 * counts nowhere. The gate doesn't hold it up, and no boundary waits for it: the sender's clock
 * does both.
 */

#include "gloo_operations.h"
#include "hooks/forward.h"

typedef void post(void *buffer, int peer, uint64_t slot, size_t offset, size_t length);
/* std::vector<int> passed by value: the function gets a pointer to the caller's copy. */
struct ranks {
    const int *begin, *end, *limit;
};
typedef post send_hook, recv_hook;
typedef void recv_any_hook(void *buffer, struct ranks *peers, uint64_t slot, size_t offset,
                           size_t length);
typedef void sent_hook(void *buffer, int peer), received_hook(void *buffer, int peer);
typedef void *buffer_end_hook(void *buffer);
LIVESHIFT_GLOO_PAIR_POINTS(DECLARE_HOOK)

/* gloo::transport::UnboundBuffer is {vtable, address, size}. Its subclass for TCP adds first a
   std::shared_ptr to its context. If that changed, the value there would be no known context. */
static struct gloo_context *context_of(void *const *buffer) { return gloo_context_of(buffer[3]); }

/* `posting` is an operation on its way from the program to gloo. If it still is one here, gloo threw
   an exception instead of taking it. (It may have completed just before.) */
static void remove_unless_posted(const struct gloo_operation **posting) {
    const struct gloo_operation *operation = *posting;
    if (operation != NULL)
        gloo_operations_complete(operation->buffer, operation->sending, operation->peer);
}
#define REMOVED_UNLESS_POSTED __attribute__((cleanup(remove_unless_posted)))

static void end_unidentified(struct gate **gate) { unidentified_end(*gate); }

static void pass_unidentified(enum kind kind, post *real, void *buffer, int peer, uint64_t slot,
                              size_t offset, size_t length) {
    __attribute__((cleanup(end_unidentified))) struct gate *gate = current_gate();
    atomic_fetch_add_explicit(&gate->page->counters[kind].started, 1, memory_order_relaxed);
    real(buffer, peer, slot, offset, length);
}

static void pass(bool sending, post *real, void *buffer, int peer, uint64_t slot, size_t offset,
                 size_t length) {
    enum kind kind = sending ? GLOO_send : GLOO_recv;
    struct gate *gate = current_gate();
    struct gloo_context *context = context_of(buffer);
    struct liveshift_clock *clock = NULL;
    if (context != NULL)
        clock = sending ? gloo_pair_clock(gate, context, context->rank, peer)
                        : gloo_pair_clock(gate, context, peer, context->rank);
    if (clock == NULL) {
        pass_unidentified(kind, real, buffer, peer, slot, offset, length);
        return;
    }
    int32_t tid = current_tid();
    atomic_fetch_add_explicit(&context->row->operations, 1, memory_order_relaxed);
    gate_begin(gate, clock, kind, tid);
    struct gloo_operation operation = {.buffer = buffer,
                                       .context = context,
                                       .clock = clock,
                                       .peer = peer,
                                       .tid = tid,
                                       .sending = sending};
    if (!gloo_operations_add(&operation)) /* no room: count it as come back */
        gate_end(clock);
    REMOVED_UNLESS_POSTED const struct gloo_operation *posting = &operation;
    real(buffer, peer, slot, offset, length);
    posting = NULL;
}

void hook_send(void *buffer, int peer, uint64_t slot, size_t offset, size_t length) {
    post *real = REAL(send);
    if (gloo_depth != 0)
        real(buffer, peer, slot, offset, length);
    else
        pass(true, real, buffer, peer, slot, offset, length);
}

void hook_recv(void *buffer, int peer, uint64_t slot, size_t offset, size_t length) {
    post *real = REAL(recv);
    if (gloo_depth != 0)
        real(buffer, peer, slot, offset, length);
    else
        pass(false, real, buffer, peer, slot, offset, length);
}

void hook_recv_any(void *buffer, struct ranks *peers, uint64_t slot, size_t offset, size_t length) {
    recv_any_hook *real = REAL(recv_any);
    struct gloo_context *context = gloo_depth == 0 ? context_of(buffer) : NULL;
    if (context == NULL) {
        real(buffer, peers, slot, offset, length);
        return;
    }
    for (const int *peer = peers->begin; peer < peers->end; peer++)
        if (*peer != context->rank)
            gloo_pair_clock(current_gate(), context, *peer, context->rank);
    struct gloo_operation operation = {
        .buffer = buffer, .context = context, .peer = GLOO_ANY_PEER, .tid = current_tid()};
    REMOVED_UNLESS_POSTED const struct gloo_operation *posting = &operation;
    gloo_operations_add(&operation);
    real(buffer, peers, slot, offset, length);
    posting = NULL;
}

/* Ends the operation before the real function: when that returns, another buffer may have this
   address. */
void hook_sent(void *buffer, int peer) {
    gloo_operations_complete(buffer, true, peer);
    REAL(sent)(buffer, peer);
}

void hook_received(void *buffer, int peer) {
    gloo_operations_complete(buffer, false, peer);
    REAL(received)(buffer, peer);
}

/* Ends the operations after the real function, which waits until gloo's threads no longer use the
   buffer. */
void *hook_buffer_end(void *buffer) {
    void *result = REAL(buffer_end)(buffer);
    gloo_operations_end_buffer(buffer);
    return result;
}
