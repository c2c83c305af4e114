/* SPDX-License-Identifier: Apache-2.0 */
/* Built together with the interposer's own sources: gives loop.c's context an identity, as
   gloo_connect.c does when the members of a context have met. */

#include "gloo/gloo_contexts.h"
#include "hooks/exported.h"

#include <stdlib.h>

EXPORTED void identify(const void *context);
void identify(const void *context) {
    const struct communicator_info made = {
        .library = LIVESHIFT_GLOO, .id = 7, .size = 2, .rank = 0, .device = -1};
    const void *const keys[2] = {context, NULL};
    if (gloo_context_add(current_gate(), &made, keys) == NULL)
        abort();
}
