# SPDX-License-Identifier: Apache-2.0
"""The names that CRIU gives, during a dump, to files that have lost the name a task used.

A task may have a file open or mapped by a name that is gone, while the file has another name. A
POSIX named semaphore is always such a file (sem_open(3) of glibc makes it under a temporary name).
With ``--link-remap`` CRIU gives the file a new name beside the old one, ``link_remap.<n>`` (criu:
files-reg.c, create_link_remap). That name travels like any other file, and CRIU restores from it.
CRIU removes these names: at the source when it lets go of the tree, at the destination once the
tree is restored.
"""

from __future__ import annotations

import contextlib
import os
import re

from ..capsule.sandboxes import PRIVATE, Sandbox
from ..files import below

NAME = re.compile(r"link_remap\.[0-9]{1,10}")


def clear(sandbox: Sandbox) -> None:
    """Remove the names that a killed CRIU has left in a capsule's own directories.

    The next dump would find these names taken. Other directories are left alone: another capsule
    may share them, and CRIU may be dumping that one now."""
    for private in PRIVATE:
        top = sandbox.root / private.strip("/")
        with contextlib.suppress(OSError), below.opened(top) as directory:
            for _, _, names, folder in os.fwalk(".", dir_fd=directory):
                for name in filter(NAME.fullmatch, names):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)
