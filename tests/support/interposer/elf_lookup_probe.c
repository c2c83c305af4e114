/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments: any number of "load" FILE and "find" LIBRARY SYMBOL. Prints a line for each find. */

#include "hooks/elf_lookup.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
    for (int i = 1; i < argc;) {
        if (strcmp(argv[i], "load") == 0) {
            if (dlopen(argv[i + 1], RTLD_NOW | RTLD_LOCAL) == NULL) {
                puts(dlerror());
                return 1;
            }
            i += 2;
            continue;
        }
        const char *why = "no reason";
        int (*found)(void) = elf_lookup(argv[i + 1], argv[i + 2], &why);
        if (found != NULL)
            printf("%d\n", found());
        else
            puts(why);
        i += 3;
    }
    return 0;
}
