/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program on the double of gloo. Its arguments are steps, done in order:
 *   connect RANK SEED  make the context of that rank of three, with listeners numbered from SEED
 *   odd                what members write from now on has no numbers for peers
 *   call N             N times allreduce on the context made last
 *   many               the same by four threads, 1000 times each
 *   nested             a barrier from within an allreduce
 *   end                the context made last ends
 *   fork               the parent waits, prints the child's pid and ends; the child goes on
 *   send PEER, recv PEER, any    post it on the buffer of the context made last
 *   sent PEER, received PEER     one of the buffer's is complete
 *   drop                         the buffer ends
 *   wait               print "waiting" and read a line
 */
#include "members.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST 600

static struct context contexts[MOST];
static int made;
static bool odd;

static void call(long times, void (*inside)(void)) {
    struct options options = {.context = &contexts[made - 1].base, .inside = inside};
    while (times-- > 0)
        allreduce(&options);
}

static void barrier_inside(void) {
    struct options options = {.context = &contexts[made - 1].base};
    barrier(&options);
}

static void point_to_point(char **step) {
    static struct buffer buffer;
    static const int peers[] = {0, 1, 2};
    struct ranks any = {peers, peers + 3, peers + 3};
    int peer = step[1] != NULL ? atoi(step[1]) : 0;
    buffer.context = &contexts[made - 1].transport;
    if (!strcmp(*step, "send"))
        buffer_send(&buffer, peer, 0, 0, 0);
    if (!strcmp(*step, "recv"))
        buffer_recv(&buffer, peer, 0, 0, 0);
    if (!strcmp(*step, "any"))
        buffer_recv_any(&buffer, &any, 0, 0, 0);
    if (!strcmp(*step, "sent"))
        buffer_sent(&buffer, peer);
    if (!strcmp(*step, "received"))
        buffer_received(&buffer, peer);
    if (!strcmp(*step, "drop"))
        buffer_end(&buffer);
}

static pthread_barrier_t together;

static void *thousand(void *unused) {
    pthread_barrier_wait(&together);
    call(1000, NULL);
    return unused;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (made > 0)
            point_to_point(argv + i);
        if (!strcmp(argv[i], "connect"))
            connect_members(&contexts[made++], atoi(argv[i + 1]), atol(argv[i + 2]), odd);
        if (!strcmp(argv[i], "odd"))
            odd = true;
        if (!strcmp(argv[i], "call"))
            call(atol(argv[i + 1]), NULL);
        if (!strcmp(argv[i], "nested"))
            call(1, barrier_inside);
        if (!strcmp(argv[i], "end"))
            context_end(&contexts[--made].base);
        if (!strcmp(argv[i], "wait")) {
            puts("waiting");
            fflush(stdout);
            getchar();
        }
        if (!strcmp(argv[i], "fork")) {
            pid_t child = fork();
            if (child > 0) {
                waitpid(child, NULL, 0);
                printf("%d\n", child);
                return 0;
            }
        }
        if (!strcmp(argv[i], "many")) {
            pthread_t threads[4];
            pthread_barrier_init(&together, NULL, 4);
            for (int t = 0; t < 4; t++)
                pthread_create(&threads[t], NULL, thousand, NULL);
            for (int t = 0; t < 4; t++)
                pthread_join(threads[t], NULL);
        }
    }
    return 0;
}
