# SPDX-License-Identifier: Apache-2.0
"""CURVE key pairs of a cluster, as files.

    <keys>/orchestrator.key     the orchestrator's secret      } each only on its own machine,
    <keys>/hosts/<name>.key     a host's secret                } mode 0600
    <keys>/public/<name>.pub    everybody's public key: the same on every machine

Who holds a key whose public half lies in ``public/`` belongs to the cluster, so neither that
directory nor what is in it may be writable by others. A file is one line: the key in Z85
(40 characters, ZeroMQ RFC 32). A public key follows from its secret, so a pair is never half lost.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ..errors import ConfigError, NotFound, NotPermitted, Refused
from .config_values import HOST_NAME, ORCHESTRATOR, Unfit

__all__ = [
    "ORCHESTRATOR",
    "KeyPair",
    "add_host",
    "init",
    "load_private",
    "public_keys",
    "public_path",
    "secret_path",
]

_KEY_LENGTH = 40  # characters of Z85: 32 bytes


@dataclass(frozen=True)
class KeyPair:
    """Both halves in Z85, as ZeroMQ's socket options take them."""

    public: bytes
    secret: bytes = field(repr=False)


def init(directory: Path, hosts: Iterable[str]) -> list[Path]:
    """Make the key pairs of a new cluster and return the files written.

    A host's pair that is already there is kept. Raises Refused, with nothing changed, when the
    orchestrator has a key already. That key is written last, so an interrupted init is finished
    by calling it again.
    """
    names = [_host_name(name) for name in hosts]
    secret = secret_path(directory, ORCHESTRATOR)
    if secret.exists():
        raise Refused(
            f"{secret}: the cluster has its keys already",
            hint="`liveshift keys add-host` adds a host; a new orchestrator key needs this file"
            " removed, and the new public key on every host",
        )
    return [path for name in (*names, ORCHESTRATOR) for path in _make_pair(directory, name)]


def add_host(directory: Path, name: str) -> list[Path]:
    """Make the key pair of one more host and return the files written.

    Raises Refused when the host has a pair already.
    """
    made = _make_pair(directory, _host_name(name))
    if not made:
        raise Refused(
            f'{secret_path(directory, name)}: host "{name}" has its keys already',
            hint="remove this file and the public one first if the host shall have new ones",
        )
    return made


def load_private(directory: Path, name: str) -> KeyPair:
    """The key pair of ``orchestrator`` or of a host.

    Raises NotFound when there is none; Refused when the file is not the current user's own or
    others have a right to it; NotPermitted when the current user may not read it; ConfigError
    when it holds no key, or one whose public half in ``public/`` is another.
    """
    path = secret_path(directory, name)
    secret = _read_key(path, forbidden=0o177, owners=(os.geteuid(),), mode="600")
    pair = KeyPair(zmq.curve_public(secret), secret)
    with suppress(NotFound):  # a host may hold its secret before public/ has come from elsewhere
        if _read_public(directory, name) != pair.public:
            raise ConfigError(
                f"{path} does not belong to {public_path(directory, name)}",
                hint="one of them is from an older pair: copy both from where they were made",
            )
    return pair


def public_keys(directory: Path) -> dict[str, bytes]:
    """Every public key by name (the orchestrator's under ``orchestrator``), in Z85.

    Raises NotFound when there are none, Refused when others could have written them, ConfigError
    when a file holds no key or two hold the same: a key tells who speaks.
    """
    public = directory / "public"
    names = sorted(path.stem for path in public.glob("*.pub"))
    if not names:
        raise NotFound(
            f"{public}: no public keys (*.pub) here",
            hint="`liveshift keys init` makes a cluster's keys; a host gets a copy of public/",
        )
    _check_rights(public, public.stat(), forbidden=0o022, owners=(0, os.geteuid()), mode="755")
    found: dict[str, bytes] = {}
    for name in names:
        key = _read_public(directory, name)
        twin = next((other for other in found if found[other] == key), None)
        if twin:
            raise ConfigError(
                f"{public_path(directory, name)} holds the key of {public_path(directory, twin)}",
                hint="each machine needs a key of its own: remove the copy",
            )
        found[name] = key
    return found


def secret_path(directory: Path, name: str) -> Path:
    """Where the secret of ``orchestrator`` or of a host lies."""
    if name == ORCHESTRATOR:
        return directory / f"{name}.key"
    return directory / "hosts" / f"{_host_name(name)}.key"


def public_path(directory: Path, name: str) -> Path:
    """Where the public key of ``orchestrator`` or of a host lies."""
    return directory / "public" / f"{name}.pub"


def _host_name(name: str) -> str:
    try:
        return HOST_NAME.read(name)
    except Unfit as unfit:
        raise ConfigError(f"host name: {unfit}") from None


def _make_pair(directory: Path, name: str) -> list[Path]:
    """Make what is missing of a pair; the secret first, since the public half follows from it."""
    secret_file, public_file = secret_path(directory, name), public_path(directory, name)
    written: list[Path] = []
    if not secret_file.exists():
        if public_file.exists():
            raise Refused(
                f"{public_file} is there without its secret {secret_file}",
                hint="if the secret lives on another machine all is well; otherwise remove the"
                " public file to make a new pair",
            )
        private = 0o755 if name == ORCHESTRATOR else 0o700  # <keys> itself holds public/ as well
        _write(secret_file, zmq.curve_keypair()[1], 0o600, directory_mode=private)
        written.append(secret_file)
    if not public_file.exists():
        _write(public_file, load_private(directory, name).public, 0o644, directory_mode=0o755)
        written.append(public_file)
    return written


def _write(path: Path, key: bytes, mode: int, *, directory_mode: int) -> None:
    """Write the file whole or not at all, and durably."""
    path.parent.mkdir(mode=directory_mode, parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask took away
            file.write(key + b"\n")
            file.flush()
            os.fsync(file.fileno())
        staged.rename(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _read_public(directory: Path, name: str) -> bytes:
    path = public_path(directory, name)
    return _read_key(path, forbidden=0o022, owners=(0, os.geteuid()), mode="644")


def _read_key(path: Path, *, forbidden: int, owners: tuple[int, ...], mode: str) -> bytes:
    try:
        # Rights are looked at on the open file, so that it cannot be exchanged in between.
        # O_NONBLOCK: a pipe in its place must not hold us up.
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
        if len(text) == _KEY_LENGTH and len(z85.decode(text)) == 32:
            return text
    except (KeyError, ValueError, struct.error):  # no digit of Z85; a group beyond 2^32
        pass
    raise ConfigError(
        f"{path}: found {len(text)} characters that are no key,"
        f" expected {_KEY_LENGTH} characters of Z85",
        hint="copy the file again from where the keys were made",
    )


def _check_rights(
    path: Path, status: os.stat_result, *, forbidden: int, owners: tuple[int, ...], mode: str
) -> None:
    """Refuse a file that somebody else owns, or where others have one of the forbidden rights."""
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
