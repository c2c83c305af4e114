/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Code that the hooks of CUDA's two APIs (runtime and driver) share: declarations of the few types
 * that are passed by value (all handles are pointers), and the records for the ledger.
 *
 * The rule for a hook: it calls the real function exactly once, with the caller's arguments, and
 * returns its result, even if the ledger fails. It holds no lock during that call. Only the code
 * that makes or frees memory of the arena (arena.h) replaces the real function.
 */
#ifndef LIVESHIFT_INTERPOSER_CUDA_HOOKS_H
#define LIVESHIFT_INTERPOSER_CUDA_HOOKS_H

#include "arena.h"
#include "arena_devices.h"
#include "cuda_real.h"
#include "gate/process.h"
#include "hooks/exported.h"
#include "ledger/graphs.h"
#include "ledger/ledger.h"
#include "ledger/streams.h"
#include "service/service.h"

#include <stddef.h>

/* cudaIpcMemHandle_t, cudaIpcEventHandle_t, CUipcMemHandle, CUipcEventHandle. */
struct ipc_handle {
    char reserved[64];
};

/* Inside a hook: declares `real`, the function of libcudart behind the hook. */
#define RUNTIME(name)                                                                              \
    static _Atomic(void *) known;                                                                  \
    __typeof__(&name) real = (__typeof__(&name))runtime_function(&known, #name);                   \
    if (real == NULL)                                                                              \
    return cuda_missing(#name)

/* A hook that returns the value of one of the macros below. */
#define RUNTIME_HOOK(name, parameters, ...)                                                        \
    EXPORTED int name parameters {                                                                 \
        RUNTIME(name);                                                                             \
        return __VA_ARGS__;                                                                        \
    }

/* Whether the application made this call, and the call succeeded. */
#define RECORDED(result) ((result) == 0 && cuda_depth == 0)

/* Makes `call`, and then `record` if the application made the call and it succeeded. The value is
   the result of `call`. */
#define RECORDS(call, record)                                                                      \
    ({                                                                                             \
        int result_ = CUDA_CALL(call);                                                             \
        if (RECORDED(result_))                                                                     \
            record;                                                                                \
        result_;                                                                                   \
    })

/* cudaErrorPeerAccessAlreadyEnabled, the same number in both APIs: the access is enabled. */
#define CUDA_PEER_ALREADY 704

static inline uint64_t number(const void *handle) { return (uint64_t)(uintptr_t)handle; }

/* Records new memory in the ledger. */
static inline void record_allocation(enum ledger_key key, enum liveshift_memory kind,
                                     int32_t device, uint64_t address, uint64_t size,
                                     uint64_t stream, uint64_t flags) {
    struct ledger_record it = {kind, device, address, size, 0, stream, flags};
    if (kind == LIVESHIFT_MEMORY_DEVICE || kind == LIVESHIFT_MEMORY_POOL ||
        kind == LIVESHIFT_MEMORY_ARENA)
        service_for_memory();
    ledger_add(key, &it);
}

/* Memory that cuMemFree, cudaFree or one of their kind frees. The runtime gives address 0 for size
   0, and no memory. */
static inline void record_memory(enum liveshift_memory kind, int32_t device, uint64_t address,
                                 uint64_t size, uint64_t flags) {
    if (address != 0)
        record_allocation(LEDGER_POINTER, kind, device, address, size, 0, flags);
}

static inline void record_pool_memory(int32_t device, uint64_t address, uint64_t size,
                                      const void *stream) {
    if (address != 0)
        record_allocation(LEDGER_POINTER, LIVESHIFT_MEMORY_POOL,
                          stream_device(number(stream), device), address, size, number(stream), 0);
}

static inline void record_registered(int32_t device, const void *pointer, uint64_t size,
                                     uint64_t flags) {
    record_allocation(LEDGER_REGISTERED, LIVESHIFT_MEMORY_REGISTERED, device, number(pointer), size,
                      0, flags);
}

/* A memory pool with a shareable handle of the type, exported or imported. */
static inline void record_shared_pool(enum liveshift_memory kind, const void *pool, int type) {
    record_allocation(LEDGER_POOL, kind, -1, number(pool), 0, 0, (unsigned)type);
}

static inline void record_handle(enum liveshift_memory kind, int32_t device, uint64_t handle,
                                 uint64_t size, uint64_t flags) {
    struct ledger_record it = {kind, device, handle, size, handle, 0, flags};
    ledger_add(LEDGER_HANDLE, &it);
}

/* Makes `call`, which frees the memory of that key and address, and keeps the ledger right. The
   value is the result of `call`. */
#define FREES(key, address, call)                                                                  \
    ({                                                                                             \
        struct ledger_free leaving_ = {0};                                                         \
        if (cuda_depth == 0)                                                                       \
            leaving_ = ledger_free_begin(key, address);                                            \
        int result_ = CUDA_CALL(call);                                                             \
        ledger_free_end(leaving_, result_ == 0);                                                   \
        result_;                                                                                   \
    })

/* The same for memory that may be of the arena. */
#define FREES_MEMORY(address, call)                                                                \
    FREES(LEDGER_POINTER, address, arena_has(address) ? arena_free(address) : (call))

#define DESTROYS_STREAM(stream, call)                                                              \
    ({                                                                                             \
        struct liveshift_stream *row_ =                                                            \
            cuda_depth == 0 ? stream_destroy_begin(number(stream)) : NULL;                         \
        int result_ = CUDA_CALL(call);                                                             \
        stream_destroy_end(row_, number(stream), result_ == 0);                                    \
        result_;                                                                                   \
    })

#define DESTROYS_GRAPH(graph, executable, call)                                                    \
    ({                                                                                             \
        bool ours_ = cuda_depth == 0;                                                              \
        bool nccl_ = ours_ && graph_destroy_begin(number(graph), executable);                      \
        int result_ = CUDA_CALL(call);                                                             \
        if (ours_ && result_ != 0)                                                                 \
            graph_destroy_failed(number(graph), executable, nccl_);                                \
        result_;                                                                                   \
    })

/* Makes `call`, which ends a stream's capture and leaves a graph in *graph. */
#define ENDS_CAPTURE(stream, device, graph, call)                                                  \
    ({                                                                                             \
        bool ours_ = cuda_depth == 0;                                                              \
        uint64_t capture_ = ours_ ? capture_number(number(stream)) : 0;                            \
        int result_ = CUDA_CALL(call);                                                             \
        if (ours_)                                                                                 \
            capture_ended(number(stream), device, capture_, result_ == 0 ? number(*(graph)) : 0);  \
        result_;                                                                                   \
    })

static inline void count_events(int by) {
    _Atomic uint64_t *events = &current_gate()->page->ledger.events;
    if (by > 0 || atomic_load(events) > 0)
        atomic_fetch_add(events, (uint64_t)(int64_t)by);
}

/* An event got an IPC handle, or (`opened`) was made from that of another process. */
static inline void record_shared_event(int32_t device, const void *event, bool opened) {
    record_allocation(LEDGER_EVENT, LIVESHIFT_MEMORY_EVENT, device, number(event), 0, 0, opened);
    if (opened)
        count_events(+1);
}

static inline void device_was_reset(int32_t device) {
    if (atomic_load(&process_gate) == NULL)
        return;
    arena_reset(device);
    ledger_reset(device);
}

static inline void exported_memory(uint64_t address) {
    uint64_t base = address, size;
    if (!ledger_find(LEDGER_POINTER, address, NULL))
        allocation_containing(address, &base, &size);
    ledger_exported(LEDGER_POINTER, base, 0);
}

static inline void opened_memory(uint64_t address, int32_t device, uint64_t flags) {
    uint64_t base = address, size = 0;
    allocation_containing(address, &base, &size);
    record_allocation(LEDGER_OPENED, LIVESHIFT_MEMORY_IMPORTED, device, address, size, 0, flags);
}

#endif
