/* SPDX-License-Identifier: Apache-2.0 */
/*
 * liveshift's SIMULATED NCCL: a double of libnccl.so.2, used only by tests. Not NVIDIA's NCCL, shares
 * no code with it, and moves bytes between host buffers that the simulated CUDA calls device memory.
 *
 * What it keeps of the real one, because liveshift depends on it:
 * - a call enqueues on the stream and returns; the work completes when all members have come, and
 *   hangs until then (a send, too: stricter than the real one, which lets small ones go ahead);
 * - communicators live on TCP sockets and threads made at their creation and gone after it;
 * - the library calls some of its own exported functions through the PLT with real handles;
 * - statics that a restored process keeps: interface, host hash, RAS thread.
 * Facts: issue text and facts files name each trap at the place where it is built in.
 *
 * Not simulated: NVLS, IB, P2P and SHM transports, channels, topology, net plugins, device kernels.
 */
#ifndef LIVESHIFT_SIMNCCL_SIM_H
#define LIVESHIFT_SIMNCCL_SIM_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "nccl_abi.h"

#ifndef SIMNCCL_VERSION
#define SIMNCCL_VERSION 22907
#endif

/* Opens the definition of a public function: pncclX is strong, ncclX its weak alias. */
#define API(result, name, parameters)                                                              \
    result name parameters __attribute__((weak, alias("p" #name)));                                \
    result p##name parameters

#define RETURN_UNLESS_SUCCESS(call)                                                                \
    do {                                                                                           \
        ncclResult_t result_ = (call);                                                             \
        if (result_ != ncclSuccess)                                                                \
            return result_;                                                                        \
    } while (0)

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* What every member tells the others when a communicator is made. */
struct member {
    union address listener;
    uint64_t host_hash;
    int64_t bus_id;
    int32_t device;
    int32_t version;
    int32_t rank;
    int32_t color; /* of a split */
    int32_t key;
    int32_t unused;
};

enum message_kind {
    MESSAGE_COLLECTIVE = 1, /* a member has come; with its contribution */
    MESSAGE_P2P,
    MESSAGE_ACK, /* a P2P has been received */
    MESSAGE_CONTROL,
    MESSAGE_GOODBYE,
    MESSAGE_PUT,
    MESSAGE_SIGNAL,
};

struct header {
    uint32_t magic;
    uint32_t kind;
    uint64_t key;       /* which of this kind */
    uint64_t bytes;     /* of payload */
    uint64_t signature; /* what the operation is, to tell a mismatch */
    uint64_t detail[3];
};

struct message {
    struct message *next;
    struct header head;
    unsigned char payload[];
};

struct message_queue {
    struct message *first, *last;
};

struct signal_count {
    struct signal_count *next;
    int index, context;
    uint64_t received;
};

/* One member as seen by this one. Fields under the communicator's lock, but for `writing`'s. */
struct peer {
    int fd; /* -1 for oneself */
    pthread_mutex_t writing;
    struct message_queue collectives, p2p, controls;
    struct signal_count *signals;
    uint64_t acks;
    bool said_goodbye;
    bool gone;
    /* the message that is coming in; only the proxy thread's */
    size_t received;
    struct header head;
    struct message *incoming;
};

struct registration {
    struct registration *next;
    void *buffer;
    size_t size;
    int references;
};

struct ncclWindow_vidmem {
    struct ncclWindow_vidmem *next;
    struct ncclComm *comm;
    void *buffer;
    size_t size;
    uint64_t ordinal;
    void *registration;
    int flags;
};

struct user_op {
    struct user_op *next;
    ncclRedOp_t op;
    ncclDataType_t type;
    ncclScalarResidence_t residence;
    const void *device_scalar;
    unsigned char scalar[8];
};

struct ncclComm {
    struct ncclComm *next; /* in the registry of live handles */
    int references;        /* under the registry's lock */
    int rank, count, device;
    int64_t bus_id;
    uint64_t hash;
    uint64_t serial;
    ncclConfig_t config; /* own copy, names included */
    bool shares;         /* resources with a parent or a child (splitShare) */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct peer *peers;
    struct member *members;
    bool connected; /* the mesh stands and the proxy runs */
    int listener, unix_socket;
    int wake[2]; /* a pipe, written once: abort or end */
    pthread_t proxy;
    bool proxy_running;
    bool stopping;

    ncclResult_t async;
    bool aborted, revoked, suspended, finalized, finalize_called, destroy_called;
    int jobs;       /* creations and the like under way on it */
    int running;    /* operations now on a stream's thread */
    int pending;    /* enqueued, not captured, not yet over */
    int persistent; /* captured in graphs that still exist */
    int device_comms;

    pthread_mutex_t launching;
    uint64_t tickets, turn; /* plain operations run in the order of their enqueuing */
    bool busy;
    uint64_t collectives, splits, shrinks, grows, exchanges;

    struct registration *registrations;
    struct ncclWindow_vidmem *windows;
    uint64_t window_count;
    struct user_op *user_ops;
    uint64_t user_op_count;
    void *device_memory;
    bool grow_id_pending;
};

/* ---- registry.c: handles ---- */
struct ncclComm *comm_new(void);
/* A reference to the live communicator behind a handle; NULL (and a warning) for any other value. */
struct ncclComm *comm_hold(ncclComm_t handle);
void comm_keep(struct ncclComm *comm);
void comm_release(struct ncclComm *comm);
void comm_retire(struct ncclComm *comm); /* the handle is no longer valid */
void comm_set_error(struct ncclComm *comm, ncclResult_t result);
ncclResult_t comm_ready(struct ncclComm *comm);
struct ncclWindow_vidmem *window_find(ncclWindow_t handle);
void registry_lock(void);
void registry_unlock(void);
struct ncclComm *registry_first(void);

/* ---- log.c ---- */
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void log_version(void);
ncclResult_t fail(ncclResult_t result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- cuda_calls.c: what it needs of libcuda.so.1 ---- */
bool cuda_found(void);
int cuda_current_device(void);
int64_t cuda_bus_id(int device);
int cuda_allocate(int device, void **pointer, size_t size);
int cuda_free(int device, void *pointer);
int cuda_record_event(nccl_event event, nccl_stream stream);
bool cuda_capturing(nccl_stream stream);
int cuda_enqueue(nccl_stream stream, void (*work)(void *), void *argument, void (*release)(void *));

/* ---- config.c ---- */
ncclResult_t config_read(ncclConfig_t *own, const ncclConfig_t *given, const ncclConfig_t *parent);
void config_free(ncclConfig_t *own);

/* ---- sockets.c ---- */
uint64_t host_hash(void);
bool interface_address(union address *address);
int listen_here(union address *address);
int connect_to(struct ncclComm *comm, const union address *address);
int accept_from(struct ncclComm *comm, int listener);
bool write_all(int fd, const void *bytes, size_t count);
bool read_all(struct ncclComm *comm, int fd, void *bytes, size_t count);

/* ---- bootstrap.c ---- */
ncclResult_t bootstrap_new_id(ncclUniqueId *id);
uint64_t bootstrap_hash(const ncclUniqueId *id);
ncclResult_t bootstrap_check_in(struct ncclComm *comm, const ncclUniqueId *id,
                                const struct member *own, struct member *all);

/* ---- mesh.c, proxy.c ---- */
ncclResult_t mesh_listen(struct ncclComm *comm, struct member *own);
ncclResult_t mesh_connect(struct ncclComm *comm, struct member *members);
void mesh_close(struct ncclComm *comm);
void mesh_shut(struct ncclComm *comm);
bool mesh_send(struct ncclComm *comm, int rank, enum message_kind kind, const struct header *head,
               const void *payload);
ncclResult_t mesh_exchange(struct ncclComm *comm, uint64_t key, const void *own, size_t bytes,
                           void *all, const bool *taking_part);
ncclResult_t proxy_start(struct ncclComm *comm);
void proxy_stop(struct ncclComm *comm);
void proxy_deliver(struct ncclComm *comm, int from, struct message *message);
struct message *queue_take(struct message_queue *queue, const uint64_t *key);

/* ---- ras.c ---- */
void ras_start(void);

/* ---- group.c ---- */
/* A creation, or what else takes the members to agree; off the caller's thread where not blocking. */
struct job {
    struct job *next;
    struct ncclComm *comm;  /* held until the job is over, and InProgress */
    struct ncclComm *other; /* the parent of a new one, or NULL; likewise */
    ncclComm_t *handle;     /* of a creation: NULL again where a blocking one fails */
    bool late;              /* the handle is given when the communicator is complete */
    ncclResult_t (*run)(struct job *job);
    ncclResult_t result;
    bool blocking;
    bool ending;    /* destroys the communicator: nobody asks it for its state */
    void *argument; /* freed with the job */
    pthread_t thread;
    bool threaded;
};
struct job *job_new(struct ncclComm *comm, ncclResult_t (*run)(struct job *), const void *argument,
                    size_t size);
ncclResult_t group_add_job(struct job *job);
struct operation;
ncclResult_t group_add_operation(struct ncclComm *comm, struct operation *operation,
                                 nccl_stream stream);
ncclResult_t group_start(void);
ncclResult_t group_end(void);
ncclResult_t group_fail(ncclResult_t result); /* remembers the first error of the open group */

/* ---- plan.c, run.c: operations ---- */
enum operation_kind {
    OPERATION_ALLREDUCE = 1,
    OPERATION_BROADCAST,
    OPERATION_REDUCE,
    OPERATION_ALLGATHER,
    OPERATION_REDUCESCATTER,
    OPERATION_ALLTOALL,
    OPERATION_GATHER,
    OPERATION_SCATTER,
    OPERATION_SEND,
    OPERATION_RECV,
    OPERATION_PUT,
    OPERATION_NOTIFY,
    OPERATION_WAIT,
};

struct reduction {
    ncclRedOp_t op; /* ncclSum…ncclAvg; ncclNumOps: a sum of inputs times a scalar */
    ncclScalarResidence_t residence;
    const void *device_scalar;
    unsigned char scalar[8];
};

struct operation {
    struct operation *next;
    enum operation_kind kind;
    const void *send;
    void *recv;
    size_t count;
    ncclDataType_t type;
    struct reduction reduction;
    int root; /* or the peer */
    uint64_t window, offset;
    int signal, context;
    int wait_count;
    ncclWaitSignalDesc_t *waits;
    nccl_event launched;
    bool done; /* of a send or receive, while its group runs */
};

struct plan {
    struct plan *next;
    struct ncclComm *comm;
    struct operation *operations, **tail;
    nccl_stream *streams;
    int stream_count;
    bool captured;
    uint64_t ticket;
    struct joint *joint;
};
ncclResult_t plan_launch(struct plan *plan); /* takes the plan, whatever comes of it */
void plan_free(struct plan *plan);
void run_operations(struct ncclComm *comm, struct operation *operations);
bool interrupted(const struct ncclComm *comm); /* under the lock */

/* ---- reduction.c ---- */
size_t type_size(ncclDataType_t type);
bool reduction_supported(ncclDataType_t type, const struct reduction *reduction);
/* one member's own contribution, where the operator multiplies it by a scalar of that member */
void reduction_scale(const struct reduction *reduction, ncclDataType_t type, void *values,
                     size_t count);
void reduction_add(const struct reduction *reduction, ncclDataType_t type, void *result,
                   const void *next, size_t count);
void reduction_end(const struct reduction *reduction, ncclDataType_t type, void *result,
                   size_t count, int members);

/* ---- registration.c ---- */
ncclResult_t user_op_resolve(struct ncclComm *comm, ncclRedOp_t op, ncclDataType_t type,
                             struct reduction *reduction);
void registrations_free(struct ncclComm *comm);

/* ---- init.c ---- */
struct ncclComm *comm_create(ncclComm_t *handle, const ncclConfig_t *config,
                             const ncclConfig_t *inherited, ncclResult_t *result);
void describe_member(struct ncclComm *comm, struct member *own);
ncclResult_t comm_await(struct ncclComm *comm, int ids, const ncclUniqueId *id);
ncclResult_t comm_build(struct ncclComm *comm, struct member *members);
#define SCRATCH_BYTES ((size_t)1 << 20)
/* the kinds of agreement on a communicator, the top byte of a control message's key */
#define EXCHANGE_KEY(kind, ordinal) ((uint64_t)(kind) << 56 | (ordinal))
enum {
    EXCHANGE_SPLIT = 1,
    EXCHANGE_SHRINK,
    EXCHANGE_GROW,
    EXCHANGE_BUILT,
    EXCHANGE_WINDOW,
    EXCHANGE_OTHER
};

/* ---- teardown.c ---- */
void comm_tear_down(struct ncclComm *comm);
void comm_stop_operations(struct ncclComm *comm);

#endif
