/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the function that a hook stands in front of. */
#ifndef LIVESHIFT_INTERPOSER_FORWARD_H
#define LIVESHIFT_INTERPOSER_FORWARD_H

/* A gloo collective: its C++ reference to an options object, as C sees it. */
typedef void collective(void *options);

/* The real function of that mangled name. Ends the process with one line on stderr if torch doesn't
   have it: going on would mean a collective that silently does nothing. */
collective *real_collective(const char *symbol);

#endif
