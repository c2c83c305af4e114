/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a call passes the gate, alone or as a member of a group. A group passes it once, as a whole.
 *
 * If the gate is open when the group begins, its members are announced and made one by one. All are
 * announced before the real ncclGroupEnd, so the clocks are exact from there on. That call may wait
 * for peers when it connects to them; their part is then pending at the peers.
 *
 * If the gate is closed when the group begins, its members are only collected. The thread waits at
 * ncclGroupEnd, before it makes the calls. It never waits inside a real group, because there it
 * would hold up the pending operations that it owns.
 */

#include "hooks/exported.h"
#include "nccl_calls.h"

#include <stdlib.h>
#include <string.h>

/* This thread's group. It is freed at each outermost end, because threads come and go. */
struct group {
    bool collecting;
    struct nccl_call *calls;
    size_t count, capacity;
};

static __thread struct group group __attribute__((tls_model("initial-exec")));

static void *copy_of(const void *bytes, size_t size) {
    void *copy = bytes != NULL ? malloc(size) : NULL;
    return copy != NULL ? memcpy(copy, bytes, size) : NULL;
}

/* Copies the caller's structures, which are valid only during the call. */
static void copy_arguments(struct nccl_call *call) {
    call->collected = true;
    if (call->waits != NULL)
        call->waits = copy_of(call->waits, call->count * sizeof *call->waits);
    if (call->config != NULL) {
        size_t size = *(size_t *)call->config;
        struct nccl_call_config *config = copy_of(call->config, size);
        if (config != NULL &&
            size >= offsetof(struct nccl_call_config, algSelection) + sizeof config->algSelection &&
            config->algSelection != NULL)
            config->algSelection = strdup(config->algSelection);
        call->config = config;
    }
}

static void free_arguments(struct nccl_call *call) {
    if (!call->collected)
        return;
    free(call->waits);
    struct nccl_call_config *config = call->config;
    if (config != NULL && config->size >= offsetof(struct nccl_call_config, algSelection) +
                                              sizeof config->algSelection)
        free((char *)config->algSelection);
    free(config);
}

static ncclResult_t add_to_group(struct nccl_call *call) {
    if (group.count == group.capacity) {
        size_t capacity = group.capacity != 0 ? 2 * group.capacity : 16;
        struct nccl_call *more = realloc(group.calls, capacity * sizeof *more);
        if (more == NULL)
            return ncclSystemError;
        group.calls = more;
        group.capacity = capacity;
    }
    struct nccl_call *kept = &group.calls[group.count++];
    *kept = *call;
    if (group.collecting) {
        copy_arguments(kept);
        return ncclSuccess;
    }
    if (kept->clock != NULL)
        gate_announce(current_gate(), kept->clock, kept->kind, current_tid());
    ncclResult_t result = nccl_launch(kept);
    if (result == ncclInProgress)
        result = ncclSuccess; /* ncclGroupEnd reports it */
    return result;
}

void nccl_complete(struct nccl_call *call, ncclResult_t result) {
    struct liveshift_clock *clock = call->clock;
    if (clock != NULL)
        gate_end(clock);
    else
        unidentified_end(current_gate());
    if (call->made != NULL)
        creation_complete(call->made, result);
    else if (call->window_made != NULL)
        window_complete(call, result);
    else if (call->kind >= NCCL_CommFinalize)
        ending_complete(call, result);
}

static ncclResult_t pass_single(struct nccl_call *call) {
    struct gate *gate = current_gate();
    nccl_thread.tid = current_tid();
    if (__builtin_expect(call->clock != NULL, 1))
        gate_begin(gate, call->clock, call->kind, current_tid());
    else
        atomic_fetch_add_explicit(&gate->page->counters[call->kind].started, 1,
                                  memory_order_relaxed);
    ncclResult_t result = nccl_launch(call);
    nccl_complete(call, result);
    return result;
}

ncclResult_t nccl_call_announced(struct nccl_call *call) {
    struct gate *gate = current_gate();
    if (atomic_load(&gate->page->order.want) != LIVESHIFT_OPEN)
        gate_wait(gate, call->clock, call->kind, current_tid());
    ncclResult_t result = nccl_launch(call);
    nccl_complete(call, result);
    return result;
}

ncclResult_t nccl_pass(struct nccl_call *call) {
    call->v = vcomm_of(call->comm);
    if (call->v == NULL && call->made == NULL) {
        /* Either libnccl calls its own export, or the interposer missed how `comm` was made. */
        if (nccl_thread.inside == 0 && call->comm != NULL)
            atomic_store(&vcomms_unsafe,
                         "a communicator is in use that was made past the library's functions");
        return nccl_launch(call);
    }
    if (call->v != NULL && atomic_load(&call->v->state) == VCOMM_ENDED)
        return ncclInvalidArgument;
    call->clock = nccl_clock(call);
    return nccl_thread.groups > 0 ? add_to_group(call) : pass_single(call);
}

EXPORTED ncclResult_t ncclGroupStart(void) {
    if (nccl_thread.inside > 0)
        return NCCL_CALL(GroupStart);
    if (nccl_thread.groups++ > 0)
        return ncclSuccess;
    nccl_thread.tid = 0;
    group.collecting = !gate_group_begin(current_gate());
    return group.collecting ? ncclSuccess : NCCL_CALL(GroupStart);
}

/* Takes the numbers of all collected calls at once. */
static void pass_collected(struct gate *gate) {
    struct gate_want *wants = calloc(group.count, sizeof *wants);
    unsigned n = 0;
    for (size_t i = 0; i < group.count && wants != NULL; i++) {
        struct nccl_call *call = &group.calls[i];
        if (call->clock == NULL) {
            atomic_fetch_add_explicit(&gate->page->counters[call->kind].started, 1,
                                      memory_order_relaxed);
            continue;
        }
        uint32_t row = (uint32_t)(call->clock - liveshift_clocks(gate->page));
        unsigned at = 0;
        while (at < n && (wants[at].clock != row || wants[at].kind != call->kind))
            at++;
        if (at == n)
            wants[n++] = (struct gate_want){.clock = row, .kind = call->kind};
        wants[at].count++;
    }
    if (n > 0)
        gate_pass(gate, wants, n, current_tid());
    free(wants);
}

/* Asks NCCL what the group would take. NCCL enqueues nothing, and one rank may ask alone. So the
   calls take no numbers, or give them back before gate_group_end: until then the agent does not
   rely on the clocks. */
static ncclResult_t simulate(void *info) {
    struct group ended_group = group;
    ncclResult_t result = ncclSuccess;
    size_t entered = 0;
    if (ended_group.collecting) {
        for (; entered < ended_group.count && result == ncclSuccess; entered++)
            if (ended_group.calls[entered].v != NULL &&
                !vcomm_enter_waiting(ended_group.calls[entered].v))
                result = ncclInvalidArgument;
        entered -= result != ncclSuccess;
        if (result == ncclSuccess)
            result = NCCL_CALL(GroupStart);
        for (size_t i = 0; i < ended_group.count && result == ncclSuccess; i++)
            result = nccl_launch(&ended_group.calls[i]);
    }
    group = (struct group){0};
    if (!ended_group.collecting || entered == ended_group.count) {
        ncclResult_t simulated = NCCL_CALL(GroupSimulateEnd, info);
        result = result == ncclSuccess ? simulated : result;
    }
    for (size_t i = 0; i < ended_group.count; i++) {
        struct nccl_call *call = &ended_group.calls[i];
        if (ended_group.collecting && i < entered && call->v != NULL)
            vcomm_leave(call->v);
        else if (!ended_group.collecting && call->clock != NULL)
            atomic_fetch_sub(&call->clock->announced, 1);
        if (call->made != NULL)
            creation_complete(call->made, ncclInvalidUsage);
        else if (call->window_made != NULL)
            window_complete(call, ncclInvalidUsage);
        free_arguments(call);
    }
    if (!ended_group.collecting)
        gate_group_end(current_gate());
    free(ended_group.calls);
    return result;
}

EXPORTED ncclResult_t ncclGroupEnd(void) {
    if (nccl_thread.inside > 0 || nccl_thread.groups == 0)
        return NCCL_CALL(GroupEnd);
    if (--nccl_thread.groups > 0)
        return ncclSuccess;
    nccl_thread.tid = current_tid();
    struct group ended_group = group;
    ncclResult_t first = ncclSuccess;
    if (ended_group.collecting) {
        if (ended_group.count > 0)
            pass_collected(current_gate());
        first = NCCL_CALL(GroupStart);
        for (size_t i = 0; i < ended_group.count && first == ncclSuccess; i++) {
            ncclResult_t result = nccl_launch(&ended_group.calls[i]);
            if (result != ncclInProgress)
                first = result;
        }
    } else
        gate_group_end(current_gate());
    group = (struct group){0};
    ncclResult_t result = NCCL_CALL(GroupEnd);
    if (first == ncclSuccess)
        first = result;
    for (size_t i = 0; i < ended_group.count; i++) {
        nccl_complete(&ended_group.calls[i], first);
        free_arguments(&ended_group.calls[i]);
    }
    free(ended_group.calls);
    return first;
}

EXPORTED ncclResult_t ncclGroupSimulateEnd(void *info) {
    if (nccl_thread.inside > 0 || nccl_thread.groups == 0)
        return NCCL_CALL(GroupSimulateEnd, info);
    if (--nccl_thread.groups > 0)
        return ncclSuccess;
    nccl_thread.tid = current_tid();
    return simulate(info);
}
