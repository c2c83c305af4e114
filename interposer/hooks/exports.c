/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What liveshift_interposer.so exports about itself. It also exports the hooks; gloo.c,
 * gloo_connect.c and gloo_pairs.c have those for gloo.
 *
 * The rules for a hook:
 * - Hooks run on the application's threads, several at once. They hold no lock around a real
 *   function that may wait for peers.
 * - A collective's hook allocates nothing. After a process's first collective it makes no system
 *   call while the gate is open. (Rarer steps may do either: making a communicator, a group of NCCL
 *   calls, the first message to a peer, the first use of a stream.)
 * - gloo reports errors by C++ exceptions, which unwind through these frames. So we compile with
 *   -fexceptions, without which no cleanup would run. A hook swallows no exception and adds none.
 * - The only constructors register fork handlers (process.h). So a process that never calls a
 *   collective (a shell, a DataLoader worker) pays only for loading the library. LD_PRELOAD stays
 *   in the environment, because the children of a launcher such as torchrun do the training.
 * - Fork and exec: page.h says what happens to the page, process.c does it.
 */

#include "entry_points.h"
#include "exported.h"

/* Version of liveshift that this library was built from; static storage. */
EXPORTED const char *liveshift_interposer_version(void) { return LIVESHIFT_VERSION; }

/* "<need> <mangled name>" of each hook in entry_points.h, NUL-separated, ended by an empty string.
   liveshift.interposer.library reads it from the file and compares it with what a torch library
   exports. */
EXPORTED extern const char liveshift_interposer_symbols[];
#define X(kind, symbol, need) #need " " #symbol "\0"
const char liveshift_interposer_symbols[] =
    LIVESHIFT_GLOO_ENTRY_POINTS(X) LIVESHIFT_GLOO_PAIR_POINTS(X) LIVESHIFT_GLOO_CONTEXT_POINTS(X);
#undef X
