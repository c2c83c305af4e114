/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TCP as NCCL's bootstrap uses it. The interface and the host hash are found once per process and
 * kept in statics: a process restored on another host goes on with the old ones (nccl#2348).
 */
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

/* Connecting is retried 34 times, each wait 100 ms longer than the last: about a minute. */
#define CONNECT_ATTEMPTS 34
#define CONNECT_STEP_MS 100

static uint64_t hashed(uint64_t hash, const char *text) {
    for (; *text != '\0'; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash;
}

static uint64_t the_host_hash;

static void find_host_hash(void) {
    const uint64_t seed = 0xcbf29ce484222325u;
    const char *given = getenv("NCCL_HOSTID");
    char text[256] = "";
    if (given != NULL && *given != '\0') {
        the_host_hash = hashed(seed, given);
        return;
    }
    gethostname(text, sizeof text - 1);
    the_host_hash = hashed(seed, text);
    FILE *boot_id = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (boot_id != NULL) {
        if (fgets(text, sizeof text, boot_id) != NULL)
            the_host_hash = hashed(the_host_hash, text);
        fclose(boot_id);
    }
}

/* hash(host name, boot id), or of NCCL_HOSTID: read once per process */
uint64_t host_hash(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_host_hash);
    return the_host_hash;
}

/* NCCL_SOCKET_IFNAME: prefixes by commas; '^' first excludes them; '=' first wants the whole name. */
static bool name_in(const char *list, const char *name, bool exact) {
    while (*list != '\0') {
        size_t length = strcspn(list, ",");
        if (length > 0 && strncmp(list, name, length) == 0 && (!exact || name[length] == '\0'))
            return true;
        list += length + (list[length] == ',');
    }
    return false;
}

static bool wanted(const char *filter, const char *name) {
    bool exclude = *filter == '^';
    filter += exclude;
    bool exact = *filter == '=';
    filter += exact;
    return name_in(filter, name, exact) != exclude;
}

static bool pick(struct ifaddrs *all, const char *filter, union address *address) {
    for (struct ifaddrs *one = all; one != NULL; one = one->ifa_next) {
        if (one->ifa_addr == NULL || (one->ifa_flags & IFF_UP) == 0 ||
            !wanted(filter, one->ifa_name))
            continue;
        if (one->ifa_addr->sa_family == AF_INET) {
            memcpy(&address->v4, one->ifa_addr, sizeof address->v4);
            return true;
        }
        if (one->ifa_addr->sa_family == AF_INET6 &&
            !IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6 *)one->ifa_addr)->sin6_addr)) {
            memcpy(&address->v6, one->ifa_addr, sizeof address->v6);
            return true;
        }
    }
    return false;
}

static union address the_interface;
static bool interface_found;

static void find_interface(void) {
    struct ifaddrs *all = NULL;
    const char *given = getenv("NCCL_SOCKET_IFNAME");
    if (getifaddrs(&all) != 0)
        return;
    if (given != NULL && *given != '\0')
        interface_found = pick(all, given, &the_interface);
    else
        interface_found = pick(all, "^docker,lo,virbr", &the_interface) ||
                          pick(all, "docker", &the_interface) || pick(all, "lo", &the_interface);
    freeifaddrs(all);
}

bool interface_address(union address *address) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_interface);
    *address = the_interface;
    if (!interface_found)
        warn("Bootstrap : no socket interface found");
    return interface_found;
}

static socklen_t address_size(const union address *address) {
    return address->any.sa_family == AF_INET6 ? sizeof address->v6 : sizeof address->v4;
}

int listen_here(union address *address) {
    if (!interface_address(address))
        return -1;
    int fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t size = address_size(address);
    if (address->any.sa_family == AF_INET6)
        address->v6.sin6_port = 0;
    else
        address->v4.sin_port = 0;
    if (fd < 0 || bind(fd, &address->any, size) != 0 || listen(fd, 1024) != 0 ||
        getsockname(fd, &address->any, &size) != 0) {
        warn("listening failed: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

/* Waits for the descriptor; false once the communicator (NULL: none) is aborted. */
static bool await(struct ncclComm *comm, int fd, short events) {
    struct pollfd both[2] = {{.fd = fd, .events = events},
                             {.fd = comm ? comm->wake[0] : -1, .events = POLLIN}};
    for (;;) {
        int ready = poll(both, 2, -1);
        if (ready < 0 && errno != EINTR)
            return false;
        if (ready > 0)
            return both[1].revents == 0;
    }
}

/* Sleeps between two attempts; false if the communicator was aborted meanwhile. */
static bool pause_for(struct ncclComm *comm, int milliseconds) {
    struct pollfd wake = {.fd = comm ? comm->wake[0] : -1, .events = POLLIN};
    return poll(&wake, 1, milliseconds) == 0;
}

static bool connected(struct ncclComm *comm, int fd, const union address *address) {
    int error = 0;
    socklen_t size = sizeof error;
    if (connect(fd, &address->any, address_size(address)) == 0)
        return true;
    if (errno != EINPROGRESS || !await(comm, fd, POLLOUT))
        return false;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
        return false;
    errno = error;
    return error == 0;
}

static void settle(int fd) {
    int one = 1;
    int flags = fcntl(fd, F_GETFL);
    /* no keep-alive and no user timeout, as in the real one: a silent peer is waited for for ever */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
}

int connect_to(struct ncclComm *comm, const union address *address) {
    for (int attempt = 1; attempt <= CONNECT_ATTEMPTS; attempt++) {
        int fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            break;
        if (connected(comm, fd, address)) {
            settle(fd);
            return fd;
        }
        int error = errno;
        close(fd);
        if (error != ECONNREFUSED && error != ETIMEDOUT && error != EHOSTUNREACH)
            break;
        if (!pause_for(comm, attempt * CONNECT_STEP_MS))
            break;
    }
    warn("connecting to a peer failed: %s", strerror(errno));
    return -1;
}

int accept_from(struct ncclComm *comm, int listener) {
    if (!await(comm, listener, POLLIN))
        return -1;
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        settle(fd);
    return fd;
}

bool write_all(int fd, const void *bytes, size_t count) {
    const char *next = bytes;
    while (count > 0) {
        ssize_t sent = send(fd, next, count, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        next += sent;
        count -= (size_t)sent;
    }
    return true;
}

bool read_all(struct ncclComm *comm, int fd, void *bytes, size_t count) {
    char *next = bytes;
    while (count > 0) {
        if (!await(comm, fd, POLLIN))
            return false;
        ssize_t got = recv(fd, next, count, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        next += got;
        count -= (size_t)got;
    }
    return true;
}
