/* SPDX-License-Identifier: Apache-2.0 */
/* Looks symbols up in the tables that the dynamic linker itself uses. Layout of the tables: elf(5);
   of the GNU hash table: glibc's elf/dl-lookup.c; of symbol versions: the gABI's Sun extension (LSB
   5, 10.7). */

#include "elf_lookup.h"

#include <elf.h>
#include <limits.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VERSION_LOCAL 0
#define VERSION_NOT_DEFAULT 0x8000

/* One loaded library. A field is NULL if the library lacks it. */
struct image {
    uintptr_t base, low, high;
    const ElfW(Sym) * symbols;
    const char *strings;
    const char *soname;
    const uint32_t *gnu_hash;
    const uint32_t *sysv_hash;
    const ElfW(Half) * versions;
};

/* The address of one of the image's tables. Usually the dynamic linker has turned the offset into
   an address. It has not with musl, nor where the dynamic section can't be written. NULL: the
   table lies outside the image. */
static const void *table(const struct image *image, ElfW(Addr) value) {
    uintptr_t at = value < image->base ? image->base + value : value;
    return at >= image->low && at < image->high ? (const void *)at : NULL;
}

/* Reads where the tables of a library are. False: symbols can't be looked up in it. */
static bool read_image(struct image *image, const struct dl_phdr_info *info) {
    const ElfW(Dyn) *dynamic = NULL;
    *image = (struct image){.base = info->dlpi_addr, .low = UINTPTR_MAX};
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        uintptr_t at = info->dlpi_addr + segment->p_vaddr;
        if (segment->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)at;
        if (segment->p_type != PT_LOAD)
            continue;
        if (at < image->low)
            image->low = at;
        if (at + segment->p_memsz > image->high)
            image->high = at + segment->p_memsz;
    }
    if (dynamic == NULL)
        return false;
    const ElfW(Dyn) *soname = NULL;
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        ElfW(Addr) value = dynamic->d_un.d_ptr;
        switch (dynamic->d_tag) {
        case DT_SYMTAB:
            image->symbols = table(image, value);
            break;
        case DT_STRTAB:
            image->strings = table(image, value);
            break;
        case DT_GNU_HASH:
            image->gnu_hash = table(image, value);
            break;
        case DT_HASH:
            image->sysv_hash = table(image, value);
            break;
        case DT_VERSYM:
            image->versions = table(image, value);
            break;
        case DT_SONAME:
            soname = dynamic;
            break;
        }
    }
    if (soname != NULL && image->strings != NULL)
        image->soname = image->strings + soname->d_un.d_val;
    return image->symbols != NULL && image->strings != NULL;
}

static bool begins_with(const char *name, const char *wanted) {
    size_t length = strlen(wanted);
    return strncmp(name, wanted, length) == 0 && (name[length] == '\0' || name[length] == '.');
}

static bool is_called(const struct image *image, const char *path, const char *wanted) {
    const char *slash = strrchr(path, '/');
    return begins_with(slash != NULL ? slash + 1 : path, wanted) ||
           (image->soname != NULL && begins_with(image->soname, wanted));
}

/* Whether this row defines the name, so that the linker would bind another library to it. */
static bool defines(const struct image *image, uint32_t row, const char *name) {
    const ElfW(Sym) *symbol = &image->symbols[row];
    if (symbol->st_shndx == SHN_UNDEF || strcmp(image->strings + symbol->st_name, name) != 0)
        return false;
    unsigned type = symbol->st_info & 0xf; /* the same for both word sizes */
    if (type != STT_NOTYPE && type != STT_OBJECT && type != STT_FUNC && type != STT_GNU_IFUNC)
        return false;
    if (image->versions == NULL)
        return true;
    ElfW(Half) version = image->versions[row];
    return version != VERSION_LOCAL && (version & VERSION_NOT_DEFAULT) == 0;
}

static const ElfW(Sym) * by_gnu_hash(const struct image *image, const char *name) {
    uint32_t hashed = 5381;
    for (const char *c = name; *c != '\0'; c++)
        hashed = hashed * 33 + (unsigned char)*c;
    const uint32_t *head = image->gnu_hash;
    uint32_t bucket_count = head[0], first = head[1], bloom_words = head[2], bloom_shift = head[3];
    const ElfW(Addr) *bloom = (const ElfW(Addr) *)(head + 4);
    const uint32_t *buckets = (const uint32_t *)(bloom + bloom_words);
    const uint32_t *chains = buckets + bucket_count;
    const unsigned bits = sizeof(ElfW(Addr)) * CHAR_BIT;
    if (bucket_count == 0)
        return NULL;
    ElfW(Addr) word = bloom[hashed / bits & (bloom_words - 1)]; /* bloom_words is a power of two */
    if (((word >> hashed % bits) & (word >> (hashed >> bloom_shift) % bits) & 1) == 0)
        return NULL;
    for (uint32_t row = buckets[hashed % bucket_count]; row >= first; row++) {
        uint32_t link = chains[row - first];
        /* The lowest bit only marks the end of a chain. */
        if ((link | 1) == (hashed | 1) && defines(image, row, name))
            return &image->symbols[row];
        if (link & 1)
            break;
    }
    return NULL;
}

static const ElfW(Sym) * by_sysv_hash(const struct image *image, const char *name) {
    uint32_t hashed = 0;
    for (const char *c = name; *c != '\0'; c++) {
        hashed = (hashed << 4) + (unsigned char)*c;
        hashed = (hashed ^ (hashed >> 24 & 0xf0)) & 0x0fffffff;
    }
    const uint32_t *head = image->sysv_hash;
    uint32_t bucket_count = head[0];
    const uint32_t *buckets = head + 2, *chains = buckets + bucket_count;
    if (bucket_count == 0)
        return NULL;
    for (uint32_t row = buckets[hashed % bucket_count]; row != STN_UNDEF; row = chains[row])
        if (defines(image, row, name))
            return &image->symbols[row];
    return NULL;
}

struct search {
    const char *library, *symbol;
    bool loaded;
    bool found;
    bool indirect;
    uintptr_t address;
};

/* Runs under the dynamic linker's lock, so the library is not unloaded meanwhile. */
static int search_image(struct dl_phdr_info *info, size_t size, void *of) {
    struct search *search = of;
    struct image image;
    (void)size;
    if (!read_image(&image, info) || !is_called(&image, info->dlpi_name, search->library))
        return 0;
    search->loaded = true;
    const ElfW(Sym) *symbol = image.gnu_hash != NULL    ? by_gnu_hash(&image, search->symbol)
                              : image.sysv_hash != NULL ? by_sysv_hash(&image, search->symbol)
                                                        : NULL;
    if (symbol == NULL)
        return 0;
    search->found = true;
    search->indirect = (symbol->st_info & 0xf) == STT_GNU_IFUNC;
    search->address = symbol->st_value + (symbol->st_shndx == SHN_ABS ? 0 : image.base);
    return 1;
}

void *elf_lookup(const char *library, const char *symbol, const char **why) {
    struct search search = {.library = library, .symbol = symbol};
    const char *ignored;
    if (why == NULL)
        why = &ignored;
    dl_iterate_phdr(search_image, &search);
    if (!search.found) {
        *why = search.loaded ? "it does not export that name" : "it is not loaded in this process";
        return NULL;
    }
    if (!search.indirect)
        return (void *)search.address;
#ifdef __x86_64__ /* elsewhere a resolver's arguments depend on the architecture */
    return ((void *(*)(void))search.address)();
#else
    *why = "it chooses that function by the processor, in a way that is not known here";
    return NULL;
#endif
}
