# SPDX-License-Identifier: Apache-2.0
"""Key files: one line of Z85, written whole or not at all, read only if the file can be trusted."""

from __future__ import annotations

import errno
import os
import stat
import struct
from pathlib import Path

from zmq.utils import z85

from ...errors import ConfigError, NotFound, NotPermitted, Refused

KEY_LENGTH = 40  # characters of Z85: 32 bytes

OWN = 0o177
"""Permission bits that no other user may have on a secret. Its owner may read and write it."""
OTHERS_WRITE = 0o022
"""Permission bits that others may not have on public keys: these decide who is in the cluster."""


def write_key(path: Path, key: bytes, mode: int) -> None:
    """Write the file durably; raises FileExistsError instead of replacing a file."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)  # the umask may have removed bits
            file.write(key + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    sync_directory(path.parent)


def make_directory(path: Path, mode: int) -> None:
    """Make a directory of exactly this mode if it is missing, its parents with mode 0755."""
    if path.is_dir():
        return
    make_directory(path.parent, 0o755)
    path.mkdir(mode=mode)
    path.chmod(mode)  # the umask may have removed bits


def remove_key(path: Path) -> bool:
    """Remove the file durably; return whether it was there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync_directory(path.parent)
    return True


def sync_directory(path: Path) -> None:
    """Make the changes in this directory durable, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_secret(path: Path) -> bytes:
    """Read a secret of the current user, closed to all others; raises like :func:`read_public`."""
    return _read_key(path, forbidden=OWN, owners=(os.geteuid(),), mode="600")


def read_public(path: Path) -> bytes:
    """Read a public key that only root or the current user could have written.

    Raises NotFound when there is no file, Refused when another user could have written it,
    NotPermitted when the current user may not read it, ConfigError when it holds no key.
    """
    return _read_key(path, forbidden=OTHERS_WRITE, owners=(0, os.geteuid()), mode="644")


def check_directory(path: Path) -> None:
    """Raises Refused for a directory that others can put files in, NotFound for a missing one."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise NotFound(f"{path}: no such directory") from None
    _check_rights(path, status, forbidden=OTHERS_WRITE, owners=(0, os.geteuid()), mode="755")


def _read_key(path: Path, *, forbidden: int, owners: tuple[int, ...], mode: str) -> bytes:
    try:
        # Rights are checked on the open file, so that it cannot be exchanged in between.
        # O_NONBLOCK: a pipe in its place must not block us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(
            f"{path}: no such key",
            hint="`liveshift keys init` makes a cluster's keys, `liveshift keys add-host` one"
            " host's; copy a host's own to that host",
        ) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refused(f"{path}: found a symbolic link, expected a plain file") from None
        raise NotPermitted(
            f"{path}: cannot read the key as user {os.geteuid()}: {error.strerror}"
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{path}: found no plain file, expected a key")
        _check_rights(path, status, forbidden=forbidden, owners=owners, mode=mode)
        text = file.read(4096).strip()
    try:
        if len(text) == KEY_LENGTH and len(z85.decode(text)) == 32:
            return text
    except (KeyError, ValueError, struct.error):  # not a digit of Z85, or a group above 2^32
        pass
    raise ConfigError(
        f"{path}: found {len(text)} characters that are no key,"
        f" expected {KEY_LENGTH} characters of Z85",
        hint="copy the file again from where the keys were made",
    )


def _check_rights(
    path: Path, status: os.stat_result, *, forbidden: int, owners: tuple[int, ...], mode: str
) -> None:
    """Refuse a file that another user owns, or where others have one of the forbidden rights."""
    if status.st_uid not in owners:
        raise Refused(
            f"{path}: belongs to user {status.st_uid}, expected user {os.geteuid()}",
            hint=f"chown {os.geteuid()} {path}",
        )
    seen = stat.S_IMODE(status.st_mode)
    if seen & forbidden:
        danger = "read the secret" if forbidden & 0o044 else "put in keys of their own"
        others = f": other users could {danger}" if seen & forbidden & 0o077 else ""
        raise Refused(
            f"{path}: its mode is {seen:04o}, expected 0{mode}{others}",
            hint=f"chmod {mode} {path}",
        )
