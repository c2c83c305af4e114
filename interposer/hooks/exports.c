/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What liveshift_interposer.so exports about itself. It also exports the hooks; gloo.c,
 * gloo_connect.c and gloo_pairs.c have those for gloo.
 *
 * The rules for a hook:
 * - Hooks run on torch's own threads, several at once. They hold no lock around the real function.
 * - A hook allocates nothing. After a process's first collective it makes no system call while the
 *   gate is open. (Making a communicator may do both.)
 * - gloo reports errors by C++ exceptions, which unwind through these frames. So we compile with
 *   -fexceptions, without which no cleanup would run. A hook swallows no exception and adds none.
 * - The only constructors register fork handlers (process.h). So a process that never calls a
 *   collective (a shell, a DataLoader worker) pays only for loading the library. LD_PRELOAD stays
 *   in the environment, because the children of a launcher such as torchrun do the training.
 * - Fork and exec: page.h says what happens to the page, process.c does it.
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
