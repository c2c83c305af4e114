/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds a function in a library that is loaded already.
 *
 * This does the work of dlopen(RTLD_NOLOAD) and dlsym, with these differences:
 * - It does not need them. glibc 2.34 moved them from libdl to libc and gave them new versions. So
 *   a library that was linked against a newer glibc and calls them is not loaded on an older one.
 * - It also finds a library that was loaded RTLD_LOCAL (Python's way).
 * - A preloaded library that replaces dlsym does not replace this.
 */
#ifndef LIVESHIFT_INTERPOSER_ELF_LOOKUP_H
#define LIVESHIFT_INTERPOSER_ELF_LOOKUP_H

/*
 * Returns the address of a function or object that a loaded library exports, as dlsym would. It
 * takes the symbol's default version and resolves an indirect function. If it finds nothing, it
 * returns NULL and sets *why to a sentence (static storage) that names the reason. `why` may be
 * NULL.
 *
 * `library` is compared with the file's base name and with the SONAME, whole or up to a dot:
 * "libcudart.so" finds libcudart.so.12, "libnccl.so.2" finds libnccl.so.2.27.5. If several match,
 * the function takes the one loaded first that exports the symbol.
 *
 * The search holds the dynamic linker's lock (for microseconds), so the caller should keep what it
 * found. The address is valid until the library is unloaded.
 */
void *elf_lookup(const char *library, const char *symbol, const char **why);

#endif
