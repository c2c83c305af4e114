/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What liveshift_interposer.so tells of itself. Beside it, it exports the hooks: gloo.c,
 * gloo_connect.c and gloo_pairs.c for gloo.
 *
 * The law inside a hook:
 * - Hooks run on torch's own threads, several at once. No lock is held around the real function.
 * - Nothing is allocated, and beyond a process's first collective there is no system call
 *   while the gate is open. (Making a communicator may do both.)
 * - gloo reports errors by C++ exceptions, which unwind through these frames. Hence -fexceptions:
 *   no cleanup would run without it. A hook swallows nothing and adds nothing.
 * - No constructor but those that make fork handlers known (process.h): a process that never calls
 *   a collective (a shell, a DataLoader worker) pays for being loaded into and nothing else.
 *   LD_PRELOAD is left in the environment, because it is the children of a launcher such as torchrun
 *   that train.
 * - Fork and exec: page.h says what becomes of the page, process.c does it.
 */

#include "entry_points.h"
#include "exported.h"

/* Increase when one of the three names below changes its meaning or goes away. Read by tests. */
#define LIVESHIFT_INTERPOSER_ABI 2

EXPORTED extern const int liveshift_interposer_abi;
const int liveshift_interposer_abi = LIVESHIFT_INTERPOSER_ABI;

/* Version of liveshift that this library was built from; static storage. */
EXPORTED const char *liveshift_interposer_version(void) { return LIVESHIFT_VERSION; }

/* "<need> <mangled name>" of each hook, NUL-separated, ended by an empty string. Read from the file
   by liveshift.interposer.library, to compare with what a torch library exports. */
EXPORTED extern const char liveshift_interposer_symbols[];
#define X(kind, symbol, need) #need " " #symbol "\0"
const char liveshift_interposer_symbols[] =
    LIVESHIFT_GLOO_ENTRY_POINTS(X) LIVESHIFT_GLOO_PAIR_POINTS(X) LIVESHIFT_GLOO_CONTEXT_POINTS(X);
#undef X
