# SPDX-License-Identifier: Apache-2.0
"""CURVE key pairs of a cluster: made, loaded, revoked.

        <keys>/orchestrator.key        the orchestrator's secret   } each only on its own machine,
        <keys>/hosts/<name>.key        a host's secret             } mode 0600
        <keys>/operators/<name>.key    an operator's secret: hand it over, then remove it here
        <keys>/public/                 all public halves (keyring.py): the same on every machine

A file is one line: the key in Z85 (40 characters, ZeroMQ RFC 32). A public key can be computed from
its secret, so half a pair is never lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from ...errors import ConfigError, NotFound, Refused, WrongUsage
from ..config.access import GIVEN, Role
from ..config.values import ORCHESTRATOR, HostName, Unfit, read_value
from . import keyring
from .key_files import (
    check_directory,
    make_directory,
    read_public,
    read_secret,
    remove_key,
    sync_directory,
    write_key,
)
from .keyring import KeyEntry


@dataclass(frozen=True)
class KeyPair:
    """Both halves in Z85, as ZeroMQ's socket options take them."""

    public: bytes
    secret: bytes = field(repr=False)


# ---- making ------------------------------------------------------------------------------------


def init(directory: Path, hosts: Iterable[str]) -> list[Path]:
    """Make the key pairs of a new cluster and return the files written.

    It keeps a host's pair that is already there. Raises Refused, with nothing changed, when the
    orchestrator has a key already. That key is written last, so calling init again finishes an
    interrupted init.
    """
    names = [_name(name, "host") for name in hosts]
    secret = secret_path(directory, ORCHESTRATOR)
    if secret.exists():
        raise Refused(
            f"{secret}: the cluster has its keys already",
            hint="`liveshift keys add-host` adds a host; a new orchestrator key needs this file"
            " removed, and the new public key on every host",
        )
    written: list[Path] = []
    for name in (*names, ORCHESTRATOR):
        written += _make_pair(directory, secret_path(directory, name), public_path(directory, name))
    return written


def add_host(directory: Path, name: str) -> list[Path]:
    """Make the key pair of one more host and return the files written.

    Raises Refused when the host has a pair already, or an operator has that name.
    """
    secret = secret_path(directory, _name(name, "host"))
    _refuse_taken(directory, name, keyring.OPERATOR)
    made = _make_pair(directory, secret, public_path(directory, name))
    if not made:
        raise Refused(
            f'{secret}: host "{name}" has its keys already',
            hint=f"`liveshift keys revoke {name}` first, to give the host new ones",
        )
    return made


def add_operator(directory: Path, name: str, role: Role) -> list[Path]:
    """Make the key pair of an operator and return the files written: secret, public half.

    Raises Refused when an operator or a host of that name has keys, or there is no cluster here.
    """
    assert role in GIVEN
    secret = _operator_secret(directory, _name(name, "operator"))
    if not public_path(directory, ORCHESTRATOR).exists():
        raise NotFound(
            f"{directory} holds no cluster's keys",
            hint="`liveshift keys init` makes them; operators' are made at the same place",
        )
    _refuse_taken(directory, name, keyring.HOST, keyring.OPERATOR)
    return _make_pair(directory, secret, directory / "public/operators" / f"{name}.{role}.pub")


def revoke(directory: Path, name: str) -> list[Path]:
    """Take a host's or an operator's key out of use; return its record and the files removed.

    The record is written first and stays. So calling this again finishes an interrupted revoke,
    and a copy of the key that is put back has no effect. Raises NotFound when no key has that
    name, Refused for the orchestrator's.
    """
    if name == ORCHESTRATOR:
        raise Refused(
            "the orchestrator's key cannot be revoked: it is what the others know it by",
            hint="to change it, remove it and its public half, `liveshift keys init`, and copy"
            " public/ to every host and operator",
        )
    entries = keyring.read(directory)
    held = [e for e in entries if e.holder.name == name and e.path.parent.name != "revoked"]
    if not held:
        raise _nobody(directory, name, entries)
    touched: list[Path] = []
    for entry in held:
        if entry.key is None and entry.problem:
            raise entry.problem
        assert entry.key is not None
        if entry.since is None:
            touched.append(_record(directory, entry, entry.key))
        remove_key(entry.path)
        touched.append(entry.path)
        operator = entry.holder.kind == keyring.OPERATOR
        secret = _operator_secret(directory, name) if operator else secret_path(directory, name)
        with suppress(NotFound):
            if zmq.curve_public(read_secret(secret)) == entry.key and remove_key(secret):
                touched.append(secret)
    return touched


# ---- loading -----------------------------------------------------------------------------------


def load_private(directory: Path, name: str) -> KeyPair:
    """The key pair of ``orchestrator`` or of a host.

    Raises NotFound when there is none; Refused when the file is not the current user's own,
    others have a right to it, or it was revoked; NotPermitted when the current user may not read
    it; ConfigError when it holds no key, or when ``public/`` holds another public half.
    """
    path = secret_path(directory, name)
    pair = load_pair(path)
    _refuse_revoked(directory, pair.public, path)
    with suppress(NotFound):  # a host may have its secret before public/ was copied to it
        if read_public(public_path(directory, name)) != pair.public:
            raise ConfigError(
                f"{path} does not belong to {public_path(directory, name)}",
                hint="one of them is from an older pair: copy both from where they were made",
            )
    return pair


def load_pair(path: Path) -> KeyPair:
    """The pair of a secret in any file, such as an operator's; raises like :func:`load_private`."""
    secret = read_secret(path)
    return KeyPair(zmq.curve_public(secret), secret)


def public_keys(directory: Path) -> dict[str, bytes]:
    """The public key of every machine by name (the orchestrator's under ``orchestrator``), in Z85.

    Raises NotFound when there are none, Refused when others could have written them, ConfigError
    when a file holds no key or two files hold the same: a key must prove who speaks. Revoked keys
    are left out.
    """
    found: dict[str, bytes] = {}
    for entry in keyring.read(directory) if directory.is_dir() else ():
        if entry.since is None and entry.problem:
            raise entry.problem
        if entry.state == "valid" and entry.holder.role is None and entry.key:
            found[entry.holder.name] = entry.key
    if not found:
        raise NotFound(
            f"{directory / 'public'}: no public keys (*.pub) here",
            hint="`liveshift keys init` makes a cluster's keys; a host gets a copy of public/",
        )
    return found


def public_key(directory: Path, name: str) -> bytes:
    """The public key of ``orchestrator`` or of a host; raises like :func:`public_keys`."""
    check_directory(directory)
    path = public_path(directory, name)
    key = read_public(path)
    _refuse_revoked(directory, key, path)
    return key


def secret_path(directory: Path, name: str) -> Path:
    """The path of the secret of ``orchestrator`` or of a host."""
    if name == ORCHESTRATOR:
        return directory / f"{name}.key"
    return directory / "hosts" / f"{_name(name, 'host')}.key"


def public_path(directory: Path, name: str) -> Path:
    """The path of the public key of ``orchestrator`` or of a host."""
    return directory / "public" / f"{name}.pub"


# ------------------------------------------------------------------------------------------------


def _operator_secret(directory: Path, name: str) -> Path:
    return directory / "operators" / f"{name}.key"


def _name(name: str, whose: str) -> str:
    """Check a name. Operators' names follow the rule for hosts: unique, and without a dot."""
    try:
        read_value(HostName, name)
        return name
    except Unfit as unfit:
        raise WrongUsage(f"{whose} name: {unfit}") from None


def _make_pair(directory: Path, secret_file: Path, public_file: Path) -> list[Path]:
    """Make what is missing of a pair. The secret comes first: the public half follows from it."""
    written: list[Path] = []
    make_directory(directory, 0o755)  # it holds public/, which every user may read
    if not secret_file.exists():
        if public_file.exists():
            raise Refused(
                f"{public_file} is there without its secret {secret_file}",
                hint="if the secret lives on another machine all is well; otherwise remove the"
                " public file to make a new pair",
            )
        make_directory(secret_file.parent, 0o700)
        write_key(secret_file, zmq.curve_keypair()[1], 0o600)
        written.append(secret_file)
    if not public_file.exists():
        pair = load_pair(secret_file)
        _refuse_revoked(directory, pair.public, secret_file)
        make_directory(public_file.parent, 0o755)
        write_key(public_file, pair.public, 0o644)
        written.append(public_file)
    return written


def _refuse_revoked(directory: Path, key: bytes, path: Path) -> None:
    for entry in keyring.revoked(directory):
        if entry.key == key:
            raise Refused(
                f"{path}: this key of {entry.holder.name} was revoked ({entry.since})",
                hint="remove the file; `liveshift keys add-host` or add-operator makes a new pair",
            )


def _refuse_taken(directory: Path, name: str, *kinds: str) -> None:
    """Refuse a name that has a key, because `keys revoke NAME` must be unambiguous."""
    for entry in keyring.read(directory) if directory.is_dir() else ():
        if entry.holder.name == name and entry.since is None and entry.holder.kind in kinds:
            raise Refused(
                f"{entry.path}: {name} is the name of {_described(entry)} already",
                hint=f"choose another name, or `liveshift keys revoke {name}` first",
            )


def _described(entry: KeyEntry) -> str:
    role = f' with the role "{entry.holder.role}"' if entry.holder.role else ""
    return f"{'an' if entry.holder.role else 'a'} {entry.holder.kind}{role}"


def _nobody(directory: Path, name: str, entries: list[KeyEntry]) -> Exception:
    before = [e.since for e in entries if e.holder.name == name and e.since]
    if before:
        return Refused(f"{name} has no key: it was revoked already ({before[-1]})")
    known = ", ".join(e.holder.name for e in entries if e.since is None)
    return NotFound(
        f'no host or operator named "{name}" has a key in {directory}', hint=f"there are: {known}"
    )


def _record(directory: Path, entry: KeyEntry, key: bytes) -> Path:
    """Record durably that a key is revoked."""
    place = directory / "public" / "revoked"
    make_directory(place, 0o755)
    sync_directory(place.parent)
    role = f".{entry.holder.role}" if entry.holder.role else ""
    stem = f"{entry.holder.name}{role}.{time.strftime(keyring.STAMP, time.gmtime())}"
    for again in range(1000):  # the same name may be revoked twice within a second
        path = place / (f"{stem}-{again}.pub" if again else f"{stem}.pub")
        with suppress(FileExistsError):
            write_key(path, key, 0o644)
            return path
    raise Refused(f"{place} holds a thousand records of {stem}")
