# SPDX-License-Identifier: Apache-2.0
"""Tells one file from another that has got its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """Names a file by its inode and the time of its birth. The inode alone is not enough: a file
    system gives the inode of a removed file to a new one.

    ``born_ns``: in ns since 1970; 0 if the file system does not know. ``mode``: the permissions
    that the file had when this was read."""

    inode: int
    born_ns: int
    mode: int

    def is_of(self, other: Identity) -> bool:
        """Return whether both name the same file, as far as its file system tells."""
        unknown = 0 in (self.born_ns, other.born_ns)
        return self.inode == other.inode and (unknown or self.born_ns == other.born_ns)
