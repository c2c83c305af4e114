# SPDX-License-Identifier: Apache-2.0
"""Which file it is, when its name may be another file's by now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """A file by inode and time of birth: a file system gives the inode of a file that was removed
    to a new one. ``born_ns``: 0 if its file system does not know. ``mode``: its mode at that
    time."""

    inode: int
    born_ns: int
    mode: int

    def is_of(self, other: Identity) -> bool:
        """Whether both are of one file, as far as its file system tells."""
        unknown = 0 in (self.born_ns, other.born_ns)
        return self.inode == other.inode and (unknown or self.born_ns == other.born_ns)
