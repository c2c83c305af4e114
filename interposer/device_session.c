/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serving a device session. All other threads of the process may be stopped meanwhile, wherever they
 * are: no malloc, no lock, nothing of stdio but snprintf, and no function that is looked up now.
 */
#include "arena.h"
#include "arena_blocks.h"
#include "checksum.h"
#include "device_calls.h"
#include "device_memory.h"
#include "device_serve.h"
#include "process.h"
#include "service.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define BUFFER ((size_t)4 << 20)
#define LOOK_MS 100          /* whether the agent has given another order meanwhile */
#define ORDINAL_OF_POINTER 9 /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */

struct session {
    struct task *task;
    int socket;
    int descriptor; /* came with the request, or goes with the reply; -1: none */
    char *buffer;
    uint32_t found; /* where the last block was: requests come in the table's order */
    struct device_contexts contexts;
    struct device_cursor cursor;
};

static void says(struct liveshift_device_reply *reply, int result, const char *trouble) {
    reply->result = result;
    if (result != 0)
        snprintf(reply->trouble, sizeof reply->trouble, "%s", trouble);
}

static struct arena_block *find_block(struct session *session, uint64_t address) {
    uint32_t used = blocks_used();
    for (uint32_t i = 0; i < used; i++) {
        uint32_t at = (session->found + i) % used;
        struct arena_block *block = block_number(at);
        if (atomic_load(&block->state) != BLOCK_NONE && atomic_load(&block->address) == address) {
            session->found = at;
            return block;
        }
    }
    return NULL;
}

static int sum_all(struct session *session, struct checksum *sum, uint64_t from, uint64_t length) {
    int result = CUDA_OK;
    for (uint64_t done = 0; done < length && result == CUDA_OK;) {
        size_t piece = length - done < BUFFER ? (size_t)(length - done) : BUFFER;
        result = DEVICE_CALL(cuMemcpyDtoH_v2, session->buffer, from + done, piece);
        if (result == CUDA_OK)
            checksum_add(sum, session->buffer, piece);
        done += piece;
    }
    return result;
}

static void checksum(struct session *session, const struct liveshift_device_request *request,
                     struct liveshift_device_reply *reply) {
    uint64_t pieces = checksum_pieces(request->size, request->argument);
    struct checksum sum = checksum_begin(request->size, request->argument);
    int device = -1;
    int result = DEVICE_CALL(cuPointerGetAttribute, &device, ORDINAL_OF_POINTER, request->address);
    if (result == CUDA_OK)
        result = contexts_enter(&session->contexts, device, request->address);
    if (result != CUDA_OK) {
        says(reply, result, "no device of this process holds that memory");
        return;
    }
    if (pieces == 0)
        result = sum_all(session, &sum, request->address, request->size);
    for (uint64_t i = 0; i < pieces && result == CUDA_OK; i++)
        result = sum_all(session, &sum, request->address + checksum_piece(request->size, pieces, i),
                         LIVESHIFT_DEVICE_SAMPLE);
    reply->device = device;
    reply->value = checksum_of(&sum);
    says(reply, result, "copying that memory to the host failed");
}

static void export_block(struct session *session, struct arena_block *block,
                         struct liveshift_device_reply *reply) {
    if (atomic_load(&block->gone) != 0)
        says(reply, -EALREADY, "its memory was given up");
    else
        says(reply, memory_export(reply->address, &session->descriptor),
             "the driver gave no descriptor of it");
}

static void release_block(struct arena_block *block, struct liveshift_device_reply *reply) {
    if (atomic_load(&block->gone) != 0) {
        says(reply, -EALREADY, "its memory was given up");
        return;
    }
    /* Before: a thread that runs, though it should be held, then waits before it unmaps it, too. */
    atomic_store(&block->gone, 1);
    int result = memory_unmap(reply->address, reply->size);
    if (result != CUDA_OK)
        atomic_store(&block->gone, 0);
    says(reply, result, "the driver did not unmap it");
}

static void map_block(struct session *session, struct arena_block *block, uint64_t size,
                      struct liveshift_device_reply *reply) {
    if (atomic_load(&block->gone) == 0)
        says(reply, -EALREADY, "its memory is here");
    else if (size != reply->size)
        says(reply, -EINVAL, "the block has another size");
    else if (session->descriptor < 0)
        says(reply, -EBADF, "no descriptor came with the request");
    else {
        int result = contexts_enter(&session->contexts, reply->device, 0);
        if (result == CUDA_OK)
            result = memory_import(reply->address, size, reply->device,
                                   arena_accessors(reply->device), session->descriptor);
        if (result == CUDA_OK)
            atomic_store(&block->gone, 0);
        says(reply, result, "the driver did not map it");
    }
}

/* What concerns one block. What came with the request is used up. */
static void with_block(struct session *session, const struct liveshift_device_request *request,
                       struct liveshift_device_reply *reply) {
    struct arena_block *block = find_block(session, request->address);
    if (block == NULL) {
        says(reply, -ENOENT, "no block of the arena begins there");
    } else {
        reply->size = atomic_load(&block->size);
        reply->device = atomic_load(&block->device);
        reply->kind = LIVESHIFT_MEMORY_ARENA;
        if (request->op == LIVESHIFT_DEVICE_EXPORT)
            export_block(session, block, reply);
        else if (request->op == LIVESHIFT_DEVICE_RELEASE)
            release_block(block, reply);
        else
            map_block(session, block, request->size, reply);
        reply->value = atomic_load(&block->gone) == 0;
    }
}

static void synchronise(struct session *session, struct liveshift_device_reply *reply) {
    int many = 0, result = DEVICE_CALL(cuDeviceGetCount, &many);
    for (int device = 0; device < many && result == CUDA_OK; device++) {
        unsigned flags;
        int active = 0;
        result = DEVICE_CALL(cuDevicePrimaryCtxGetState, device, &flags, &active);
        if (result != CUDA_OK || active == 0)
            continue;
        result = contexts_enter(&session->contexts, device, 0);
        if (result == CUDA_OK)
            result = DEVICE_CALL(cuCtxSynchronize);
        reply->device = device;
    }
    says(reply, result, "waiting for the device's work failed");
}

static void answer(struct session *session, const struct liveshift_device_request *request,
                   struct liveshift_device_reply *reply) {
    switch (request->op) {
    case LIVESHIFT_DEVICE_NEXT:
        if (!device_list(&session->cursor, request->argument, reply))
            says(reply, -ENOENT, "there are no more allocations");
        break;
    case LIVESHIFT_DEVICE_CHECKSUM:
        checksum(session, request, reply);
        break;
    case LIVESHIFT_DEVICE_EXPORT:
    case LIVESHIFT_DEVICE_RELEASE:
    case LIVESHIFT_DEVICE_MAP:
        with_block(session, request, reply);
        break;
    case LIVESHIFT_DEVICE_SYNC:
        synchronise(session, reply);
        break;
    default:
        says(reply, -ENOSYS, "this process's interposer doesn't know that request");
    }
}

/* ---- messages --------------------------------------------------------------------------------- */

union carried {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr aligned;
};

static void drop_descriptor(struct session *session) {
    if (session->descriptor >= 0)
        close(session->descriptor);
    session->descriptor = -1;
}

/* Sends a reply, with the descriptor if it has one to give. */
static bool tell(struct session *session, struct liveshift_device_reply *reply) {
    union carried carried;
    struct iovec part = {reply, sizeof *reply};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (session->descriptor >= 0) {
        memset(&carried, 0, sizeof carried);
        message.msg_control = carried.bytes;
        message.msg_controllen = sizeof carried.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &session->descriptor, sizeof(int));
    }
    ssize_t sent;
    do
        sent = sendmsg(session->socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    drop_descriptor(session);
    return sent == (ssize_t)sizeof *reply;
}

/* Receives a request, and its descriptor; false: there is none to come, or not by this protocol. */
static bool hear(struct session *session, struct liveshift_device_request *request) {
    union carried carried;
    struct iovec part = {request, sizeof *request};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = carried.bytes,
                             .msg_controllen = sizeof carried.bytes};
    struct pollfd ready = {.fd = session->socket, .events = POLLIN};
    while (poll(&ready, 1, LOOK_MS) <= 0)
        if (task_obsolete(session->task)) {
            task_fails(session->task, ECANCELED, "another order came during the device session");
            return false;
        }
    ssize_t length = recvmsg(session->socket, &message, MSG_CMSG_CLOEXEC);
    if (length <= 0)
        return false; /* the helper has gone: nothing is owed to it */
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head != NULL && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(&session->descriptor, CMSG_DATA(head), sizeof(int));
    if (length == (ssize_t)sizeof *request && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0)
        return true;
    task_fails(session->task, EPROTO, "a request of the device session had %zd bytes", length);
    return false;
}

static void converse(struct session *session) {
    struct liveshift_device_request request;
    struct liveshift_device_reply reply = {
        .op = LIVESHIFT_DEVICE_HELLO, .kind = LIVESHIFT_DEVICE_PROTOCOL, .device = -1};
    reply.value = (uint64_t)session->task->gate->page->pid;
    if (!device_calls_find())
        says(&reply, -ENODEV, "no CUDA driver is loaded in this process");
    bool go_on = tell(session, &reply) && reply.result == 0;
    while (go_on && hear(session, &request) && request.op != LIVESHIFT_DEVICE_END) {
        reply = (struct liveshift_device_reply){
            .op = request.op, .address = request.address, .size = request.size, .device = -1};
        if (request.op != LIVESHIFT_DEVICE_MAP)
            drop_descriptor(session);
        answer(session, &request, &reply);
        if (request.op == LIVESHIFT_DEVICE_MAP || reply.result != 0)
            drop_descriptor(session);
        go_on = tell(session, &reply);
    }
    drop_descriptor(session);
}

static int connected(struct task *task) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    char path[PATH_MAX];
    if (!process_path(path, ".device.", task->gate->page->pid) ||
        strlen(path) >= sizeof to.sun_path) {
        task_fails(task, ENAMETOOLONG, "the path of the device session's socket is too long");
        return -1;
    }
    memcpy(to.sun_path, path, strlen(path) + 1);
    int end = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (end >= 0 && connect(end, (struct sockaddr *)&to, sizeof to) == 0)
        return end;
    task_fails(task, errno, "cannot connect to the device session's socket: error %d", errno);
    if (end >= 0)
        close(end);
    return -1;
}

void serve_devices(struct task *task) {
    static struct session session; /* of the one service thread */
    memset(&session, 0, sizeof session);
    session.task = task;
    session.descriptor = -1;
    session.buffer = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (session.buffer == MAP_FAILED) {
        task_fails(task, ENOMEM, "no memory for the device session");
        return;
    }
    session.socket = connected(task);
    if (session.socket >= 0) {
        int mode =
            CUDA_CAPTURES_RELAXED; /* a capture under way is not spoilt by what is done here */
        DEVICE_CALL(cuThreadExchangeStreamCaptureMode, &mode);
        contexts_begin(&session.contexts);
        converse(&session);
        contexts_end(&session.contexts);
        DEVICE_CALL(cuThreadExchangeStreamCaptureMode, &mode);
        close(session.socket);
    }
    munmap(session.buffer, BUFFER);
}
