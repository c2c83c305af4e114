# SPDX-License-Identifier: Apache-2.0
"""Gives a file the owner, mode, attributes and time of its entry in a stream."""

from __future__ import annotations

import contextlib
import os
import tarfile

from . import attributes


def dress(fd: int, member: tarfile.TarInfo, at: str | None = None, lenient: bool = False) -> None:
    """Set owner, mode, attributes and time, in that order: a change of owner clears set-user-id,
    and a change of the mode is one of an access control list.

    ``at``: a path to the file, if the descriptor is of O_PATH. ``lenient`` leaves unchanged what
    the kernel does not let the thread's user set.
    """
    at_ns = int(member.mtime * 1e9)
    allowed = (PermissionError,) if lenient else ()
    with contextlib.suppress(*allowed):
        os.chown(at or fd, member.uid, member.gid)
    attributes.clear(at or fd, member)
    with contextlib.suppress(*allowed):
        os.chmod(at or fd, attributes.mode_without(member))
    attributes.put(at or fd, member)
    with contextlib.suppress(*allowed):
        os.utime(at or fd, ns=(at_ns, at_ns))
