/* SPDX-License-Identifier: Apache-2.0 */
/* The hooks of gloo's collectives: each passes the gate with the clock of its context. */

#include "gloo_contexts.h"
#include "hooks/exported.h"
#include "hooks/forward.h"

/* A collective: its C++ reference to an options object, as C sees it. */
typedef void collective(void *options);

static inline void end_call(struct liveshift_clock **clock) {
    gloo_depth--;
    gate_end(*clock);
}

static inline void end_unidentified(struct gate **gate) {
    gloo_depth--;
    unidentified_end(*gate);
}

static inline __attribute__((always_inline)) void call_real(struct liveshift_clock *of,
                                                            collective *real, void *options) {
    __attribute__((cleanup(end_call))) struct liveshift_clock *clock = of;
    gloo_depth++;
    real(options);
}

/* The collective's number is announced and the gate isn't open: waits, then makes the call. */
static __attribute__((noinline)) void call_after_wait(struct gate *gate,
                                                      struct liveshift_clock *clock, enum kind kind,
                                                      collective *real, void *options) {
    gate_wait(gate, clock, kind, current_tid());
    call_real(clock, real, options);
}

static void call_unidentified(enum kind kind, collective *real, void *options) {
    __attribute__((cleanup(end_unidentified))) struct gate *gate = current_gate();
    gloo_depth++;
    atomic_fetch_add_explicit(&gate->page->counters[kind].started, 1, memory_order_relaxed);
    real(options);
}

static inline __attribute__((always_inline)) void
call_identified(struct gloo_context *context, enum kind kind, collective *real, void *options) {
    struct liveshift_clock *clock = context->clock;
    struct gate *gate = context->gate;
    atomic_fetch_add_explicit(&context->row->operations, 1, memory_order_relaxed);
    gate_announce(gate, clock, kind, process_own_tid);
    if (__builtin_expect(atomic_load(&gate->page->order.want) != LIVESHIFT_OPEN, 0))
        call_after_wait(gate, clock, kind, real, options);
    else
        call_real(clock, real, options);
}

/* Every options object begins with a std::shared_ptr<gloo::Context>, which begins with the pointer.
   If that changed, the value there would be the address of no known context. */
static const void *key_in(void *const *options) { return *options; }

/* Handles every case that the usual path does not; looks at everything again. */
static __attribute__((noinline)) void pass_slow(enum kind kind, collective *real, void *options) {
    struct gloo_context *context = options != NULL ? gloo_context_of(key_in(options)) : NULL;
    current_tid();
    if (gloo_depth != 0)
        real(options);
    else if (context == NULL || context->clock == NULL)
        call_unidentified(kind, real, options);
    else
        call_identified(context, kind, real, options);
}

static __attribute__((noinline)) void pass_first_call(enum kind kind, const char *symbol,
                                                      _Atomic(collective *) *known, void *options) {
    collective *real = real_function(symbol);
    atomic_store_explicit(known, real, memory_order_relaxed);
    pass_slow(kind, real, options);
}

/* The usual path: the gate is open and the context is found at once. It calls other functions only
   as its last step, so the compiler has almost no registers to save. */
static inline __attribute__((always_inline)) void pass_fast(enum kind kind, collective *real,
                                                            void *options) {
    const struct gloo_slot *slot = options != NULL ? gloo_slot_at(key_in(options)) : NULL;
    if (__builtin_expect(slot == NULL || gloo_depth != 0 || process_own_tid == 0 ||
                             atomic_load_explicit(&slot->key, memory_order_acquire) !=
                                 key_in(options) ||
                             slot->context == NULL || slot->context->clock == NULL,
                         0))
        pass_slow(kind, real, options);
    else
        call_identified(slot->context, kind, real, options);
}

#define HOOK(kind, symbol, need)                                                                   \
    EXPORTED void symbol(void *options);                                                           \
    void symbol(void *options) {                                                                   \
        static _Atomic(collective *) known;                                                        \
        collective *real = atomic_load_explicit(&known, memory_order_relaxed);                     \
        if (__builtin_expect(real == NULL, 0))                                                     \
            pass_first_call(GLOO_##kind, #symbol, &known, options);                                \
        else                                                                                       \
            pass_fast(GLOO_##kind, real, options);                                                 \
    }

LIVESHIFT_GLOO_ENTRY_POINTS(HOOK)
