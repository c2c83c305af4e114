/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Serves a device session. All other threads of the process may be stopped meanwhile, anywhere. So
 * this code uses no malloc, no lock, no stdio but snprintf, and it looks up no function.
 */
#include "cuda/device_calls.h"
#include "device_serve.h"
#include "gate/process.h"
#include "service/service.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define POLL_MS 100 /* how often the thread looks whether the agent has given another order */

union control {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr aligned;
};

static void drop_descriptor(struct device_session *session) {
    if (session->descriptor >= 0)
        close(session->descriptor);
    session->descriptor = -1;
}

/* Sends a reply, with the session's descriptor if there is one, and closes that descriptor. */
static bool send_reply(struct device_session *session, struct liveshift_device_reply *reply) {
    union control control;
    struct iovec part = {reply, sizeof *reply};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (session->descriptor >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
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

/* Receives a request and its descriptor. False: the helper has closed, another order came, or the
   message does not fit the protocol. */
static bool receive_request(struct device_session *session,
                            struct liveshift_device_request *request) {
    union control control;
    struct iovec part = {request, sizeof *request};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct pollfd ready = {.fd = session->socket, .events = POLLIN};
    while (poll(&ready, 1, POLL_MS) <= 0)
        if (task_obsolete(session->task)) {
            task_fail(session->task, ECANCELED, "another order came during the device session");
            return false;
        }
    ssize_t length = recvmsg(session->socket, &message, MSG_CMSG_CLOEXEC);
    if (length <= 0)
        return false; /* the helper has gone and needs no answer */
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head != NULL && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(&session->descriptor, CMSG_DATA(head), sizeof(int));
    if (length == (ssize_t)sizeof *request && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0)
        return true;
    task_fail(session->task, EPROTO, "a request of the device session had %zd bytes", length);
    return false;
}

static void serve_session(struct device_session *session) {
    struct liveshift_device_request request;
    struct liveshift_device_reply reply = {
        .op = LIVESHIFT_DEVICE_HELLO, .kind = LIVESHIFT_DEVICE_PROTOCOL, .device = -1};
    reply.value = (uint64_t)session->task->gate->page->pid;
    if (!device_calls_find())
        device_set_result(&reply, -ENODEV, "no CUDA driver is loaded in this process");
    bool go_on = send_reply(session, &reply) && reply.result == 0;
    while (go_on && receive_request(session, &request) && request.op != LIVESHIFT_DEVICE_END) {
        reply = (struct liveshift_device_reply){
            .op = request.op, .address = request.address, .size = request.size, .device = -1};
        if (request.op != LIVESHIFT_DEVICE_MAP)
            drop_descriptor(session);
        device_handle_request(session, &request, &reply);
        if (request.op == LIVESHIFT_DEVICE_MAP || reply.result != 0)
            drop_descriptor(session);
        go_on = send_reply(session, &reply);
    }
    drop_descriptor(session);
}

static int connect_to_helper(struct task *task) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    char path[PATH_MAX];
    if (!process_path(path, ".device.", task->gate->page->pid) ||
        strlen(path) >= sizeof to.sun_path) {
        task_fail(task, ENAMETOOLONG, "the path of the device session's socket is too long");
        return -1;
    }
    memcpy(to.sun_path, path, strlen(path) + 1);
    int end = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (end >= 0 && connect(end, (struct sockaddr *)&to, sizeof to) == 0)
        return end;
    task_fail(task, errno, "cannot connect to the device session's socket: error %d", errno);
    if (end >= 0)
        close(end);
    return -1;
}

void serve_devices(struct task *task) {
    static struct device_session session; /* only the service thread uses it */
    memset(&session, 0, sizeof session);
    session.task = task;
    session.descriptor = -1;
    session.buffer =
        mmap(NULL, DEVICE_BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (session.buffer == MAP_FAILED) {
        task_fail(task, ENOMEM, "no memory for the device session");
        return;
    }
    session.socket = connect_to_helper(task);
    if (session.socket >= 0) {
        int mode =
            CUDA_CAPTURES_RELAXED; /* so the session does not spoil a capture that is under way */
        DEVICE_CALL(cuThreadExchangeStreamCaptureMode, &mode);
        contexts_begin(&session.contexts);
        serve_session(&session);
        contexts_end(&session.contexts);
        DEVICE_CALL(cuThreadExchangeStreamCaptureMode, &mode);
        close(session.socket);
    }
    munmap(session.buffer, DEVICE_BUFFER);
}
