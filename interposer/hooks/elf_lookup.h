/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding a function in a library that is loaded already.
 *
 * It does the work of dlopen(RTLD_NOLOAD) and dlsym, with these differences:
 * - glibc 2.34 moved those from libdl to libc and gave them new versions, so that a library that
 *   was linked against a newer glibc and calls them is not loaded on an older one;
 * - a library that was loaded RTLD_LOCAL (Python's way) is found as well;
 * - other preloaded libraries that stand in front of dlsym do not stand in front of this.
 */
#ifndef LIVESHIFT_INTERPOSER_ELF_LOOKUP_H
#define LIVESHIFT_INTERPOSER_ELF_LOOKUP_H

/*
 * The address of a function or object that a loaded library exports, as dlsym would give it (its
 * default version; an indirect function is resolved), or NULL and the reason in words in *why
 * (static storage; why may be NULL).
 *
 * `library` is matched against the base name of the file and against the SONAME, whole or up to a
 * dot: "libcudart.so" finds libcudart.so.12, "libnccl.so.2" finds libnccl.so.2.27.5. If several
 * match, the function takes the one loaded first that exports the symbol.
 *
 * Takes the dynamic linker's lock for as long as the search lasts (microseconds): remember what was
 * found. The address stays good until the library is unloaded.
 */
void *elf_lookup(const char *library, const char *symbol, const char **why);

#endif
