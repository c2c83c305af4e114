# SPDX-License-Identifier: Apache-2.0
"""Carries the extended attributes of a file in its entry: access control lists, and ``user.*``.

A file with an access control list shows the list's mask in the group bits of its mode. Without the
list its group would get what the mask allows. File capabilities do not go along: they are rights of
root, and a stream comes for a capsule of any user.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import stat
import struct
import tarfile
from collections.abc import Iterator

import msgspec

HEADER = "LIVESHIFT.attributes"
"""The header of an entry that has such attributes: name → value, in msgpack and base64."""

MOST = 8 << 10
"""So many bytes of attributes go along: the header of an entry is small
(unpacking.HEADER_LIMIT)."""

LISTS = ("system.posix_acl_access", "system.posix_acl_default")
"""Their values name users and groups by number, as owner and group of an entry do."""

_ENTRY = struct.Struct("<HHI")  # linux/posix_acl_xattr.h: tag, rights, user or group
_GROUP, _MASK = 0x04, 0x10  # linux/posix_acl.h


def read(file: int | str) -> dict[str, bytes]:
    """Return the attributes of a file that go along, {} if it has none. ``file``: its descriptor,
    or its path. If the path ends in a link, the attributes are those of the link."""
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError):
        for name in os.listxattr(file, follow_symlinks=isinstance(file, int)):
            if name in LISTS or name.startswith("user."):
                with contextlib.suppress(OSError):  # it is gone by now
                    found[name] = os.getxattr(file, name, follow_symlinks=isinstance(file, int))
    return found


def _size(found: dict[str, bytes]) -> int:
    return sum(len(name) + len(value) for name, value in found.items())


def add(info: tarfile.TarInfo, found: dict[str, bytes]) -> None:
    """Put attributes into an entry. If all are too large for it, only the lists go along. If these
    are too large as well, no attribute does, and the group gets only the rights that its list gives
    it."""
    if _size(found) > MOST:
        found = {name: found[name] for name in LISTS if name in found}
    if _size(found) > MOST:
        info.mode = _reduced(info.mode, found.get(LISTS[0], b""))
    elif found:
        raw = base64.b64encode(msgspec.msgpack.encode(found)).decode()
        info.pax_headers = {**info.pax_headers, HEADER: raw}


def mode_without(info: tarfile.TarInfo) -> int:
    """Return the mode that the file of an entry has as long as it lacks its access control list.
    Its group gets what the list gives it, and not what the mask allows. Raises ValueError as
    :func:`put`."""
    return stat.S_IMODE(_reduced(info.mode, _of(info).get(LISTS[0], b"")))


def clear(file: int | str, info: tarfile.TarInfo) -> None:
    """Take away the lists that the entry does not have. A new file has inherited them from its
    directory."""
    for name in LISTS:
        if name not in _of(info):
            with contextlib.suppress(OSError):  # mostly, it has none
                os.removexattr(file, name)


def put(file: int | str, info: tarfile.TarInfo) -> None:
    """Give a file the attributes of its entry, but for those that its file system or the thread's
    user cannot set. Raises OSError (EIO), and ValueError if the header is damaged."""
    for name, value in _of(info).items():
        if name not in LISTS and not name.startswith("user."):
            raise ValueError(f"{info.name} has an attribute that does not go along: {name[:100]!a}")
        try:
            os.setxattr(file, name, value)
        except OSError as error:
            if error.errno == errno.EIO:
                raise


def _of(info: tarfile.TarInfo) -> dict[str, bytes]:
    if (raw := info.pax_headers.get(HEADER)) is None:
        return {}
    try:
        decoded = base64.b64decode(raw, validate=True)
        return msgspec.msgpack.decode(decoded, type=dict[str, bytes])
    except msgspec.DecodeError as error:
        raise ValueError(f"{info.name} has damaged attributes: {error}") from error


def _reduced(mode: int, value: bytes) -> int:
    rights = _rights_of_group(value)
    return mode if rights is None else mode & ~stat.S_IRWXG | rights << 3


def _rights_of_group(value: bytes) -> int | None:
    """Return what a list lets the owning group do, as three bits of a mode; None if ``value`` is no
    list."""
    rights = dict(_entries(value))
    if _GROUP not in rights:
        return None
    return rights[_GROUP] & rights.get(_MASK, 7) & 7


def _entries(value: bytes) -> Iterator[tuple[int, int]]:
    for at in range(4, len(value) - _ENTRY.size + 1, _ENTRY.size):
        tag, rights, _ = _ENTRY.unpack_from(value, at)
        yield tag, rights
