// SPDX-License-Identifier: Apache-2.0
//
// Reads what CRIU sends during a lazy restore (criu: uffd.c, send_uffd and
// lazy_pages_finish_restore). For each process CRIU sends its pid as 32 bits, and then one byte
// with the descriptor. For a zombie it sends only the pid, negative. At the end, after its
// post-restore hook, it sends the number RESTORE_FINISHED.

#include "fill.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { RESTORE_FINISHED = 0x52535446 };

// If CRIU cannot send that it has finished, it gives the tree up, and by then it has opened the
// network already. So we send our end of the connection to CRIU, in a message that CRIU never
// reads. The connection then stays open even if this agent ends.
static void keep_connection_open(int connection) {
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    control.head.cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(&control.head), &connection, sizeof connection);
    char byte = 0;
    struct iovec vector = {&byte, 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    (void)!sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static bool accept_criu(struct fill *f) {
    int connection = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (connection < 0)
        return false;
    keep_connection_open(connection);
    epoll_ctl(f->epoll, EPOLL_CTL_DEL, f->listener, NULL);
    pthread_mutex_lock(&f->lock);
    f->connection = connection;
    fill_watch(f, connection, &f->connection);
    if (f->report.phase == FILL_WAITING)
        f->report.phase = FILL_RUNNING;
    pthread_mutex_unlock(&f->lock);
    return true;
}

static int descriptor_in(struct msghdr *message) {
    int fd = -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c != NULL; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
            memcpy(&fd, CMSG_DATA(c), sizeof fd); // the buffer has room for one descriptor only
    return fd;
}

// CRIU has sent the descriptor of the expected process. The caller holds the lock.
static void register_process(struct fill *f, int fd) {
    uint32_t pid = f->expected;
    f->expected = 0;
    for (struct process *p = f->processes; p != NULL; p = p->next)
        if (p->pid == pid) {
            close(fd);
            fill_fail(f, "CRIU sent the descriptor of process %" PRIu32 " twice", pid);
            return;
        }
    struct process *p = fill_add_process(f, pid, fd);
    const struct image *image = store_find_image(f->store, pid);
    uint64_t preplaced = 0, lost = 0;
    if (image != NULL && f->store->evicted)
        lost = image_lost(image, store_process(f->store, pid), f->plan);
    if (lost > 0)
        fill_fail(f,
                  "process %" PRIu32 ": %" PRIu64
                  " pages lay only in a CRIU that was started early, "
                  "and are not there any more",
                  pid, lost);
    else if (p != NULL && image != NULL &&
             pieces_of(&p->pieces, image, f->plan ? store_process(f->store, pid) : NULL, f->plan,
                       &preplaced) != 0)
        fill_fail(f, "out of memory for the pages of process %" PRIu32, pid);
    f->report.preplaced += preplaced;
    pthread_cond_broadcast(&f->work);
}

// Handles a complete number from CRIU. The caller holds the lock.
static void handle_number(struct fill *f) {
    int32_t number;
    memcpy(&number, f->received, sizeof number);
    f->received_bytes = 0;
    if (number == RESTORE_FINISHED)
        f->finished = true;
    else if (number > 0 && (uint32_t)number <= LAST_PID)
        f->expected = (uint32_t)number;
    else if (number >= 0)
        fill_fail(f, "CRIU sent the unknown number %#" PRIx32 " for a process", number);
}

static void handle_eof(struct fill *f) {
    epoll_ctl(f->epoll, EPOLL_CTL_DEL, f->connection, NULL);
    close(f->connection);
    f->connection = -1;
    if (!f->finished)
        fill_fail(f, "CRIU gave up before the tree was let go");
}

bool fill_read_criu(struct fill *f) {
    if (f->connection < 0)
        return f->listener >= 0 && f->report.phase == FILL_WAITING && accept_criu(f);
    char byte;
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec vector = {&byte, 1};
    if (!f->expected)
        vector =
            (struct iovec){f->received + f->received_bytes, sizeof f->received - f->received_bytes};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    ssize_t n = recvmsg(f->connection, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return errno == EINTR;
    int fd = n > 0 ? descriptor_in(&message) : -1;
    pthread_mutex_lock(&f->lock);
    bool more = n > 0;
    if (n <= 0) {
        handle_eof(f);
    } else if (f->expected && fd >= 0) {
        register_process(f, fd);
    } else if (f->expected || fd >= 0) {
        if (fd >= 0)
            close(fd);
        fill_fail(f, "CRIU sent a descriptor where none was expected, or sent none where one was");
    } else {
        f->received_bytes += (uint32_t)n;
        if (f->received_bytes == sizeof f->received)
            handle_number(f);
    }
    fill_update_phase(f);
    pthread_mutex_unlock(&f->lock);
    return more;
}
