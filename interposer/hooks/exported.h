/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LIVESHIFT_INTERPOSER_EXPORTED_H
#define LIVESHIFT_INTERPOSER_EXPORTED_H

/* Everything else in the library is hidden. */
#define EXPORTED __attribute__((visibility("default")))

#endif
