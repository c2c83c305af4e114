/* SPDX-License-Identifier: Apache-2.0 */
/* The hooks in front of gloo's collectives: each passes the gate with the clock of its context. */

#include "exported.h"
#include "forward.h"
#include "gloo_contexts.h"

/* A collective: its C++ reference to an options object, as C sees it. */
typedef void collective(void *options);

/* Every options object begins with a std::shared_ptr<gloo::Context>, which begins with the pointer.
   Were it otherwise, what lies there would be no context that is known. */
static inline struct gloo_context *context_in(void *const *options) {
    return gloo_context_of(options != NULL ? *options : NULL);
}

static inline void identified_back(struct liveshift_clock **clock) {
    gloo_depth--;
    gate_end(*clock);
}

static inline void unidentified_back(struct gate **gate) {
    gloo_depth--;
    unidentified_end(*gate);
}

static __attribute__((noinline)) void pass_unidentified(enum kind kind, collective *real,
                                                        void *options) {
    __attribute__((cleanup(unidentified_back))) struct gate *gate = gate_here();
    gloo_depth++;
    atomic_fetch_add_explicit(&gate->page->counters[kind].started, 1, memory_order_relaxed);
    real(options);
}

/* Inlined into every hook, since this is what each collective costs. */
static inline __attribute__((always_inline)) void pass(enum kind kind, collective *real,
                                                       void *options) {
    if (__builtin_expect(gloo_depth != 0, 0)) {
        real(options);
        return;
    }
    struct gloo_context *context = context_in(options);
    if (__builtin_expect(context == NULL, 0)) {
        pass_unidentified(kind, real, options);
        return;
    }
    __attribute__((cleanup(identified_back))) struct liveshift_clock *clock = context->clock;
    /* Whoever has a context here has a gate: a forked child forgets both. */
    gate_begin(atomic_load_explicit(&process_gate, memory_order_relaxed), clock, kind, tid_here());
    gloo_depth++;
    real(options);
}

#define HOOK(kind, symbol, need)                                                                   \
    EXPORTED void symbol(void *options);                                                           \
    void symbol(void *options) { pass(GLOO_##kind, REAL(collective, #symbol), options); }

LIVESHIFT_GLOO_ENTRY_POINTS(HOOK)
