# SPDX-License-Identifier: Apache-2.0
"""Says whose key a public key is, now and after each change of ``public/``.

    <keys>/public/<name>.pub                        a host, or the orchestrator
    <keys>/public/operators/<name>.<role>.pub       an operator, and what the key may do
    <keys>/public/revoked/<name>[.<role>].<time>.pub    a revoked key. It is refused wherever
                                                    else it lies: a copy put back changes nothing

Each key whose public half lies there belongs to the cluster. So others may not be able to write to
these directories or to the files in them.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from ...errors import ConfigError, LiveshiftError
from ..config.access import GIVEN, Role
from ..config.values import ORCHESTRATOR
from .key_files import check_directory, read_public

log = logging.getLogger("liveshift.keys")

HOST = "host"
OPERATOR = "operator"
NOBODY = "?"

LOOK_S = 1.0
"""Each file is checked every LOOK_S seconds. A file that was overwritten in place leaves no trace
in its directory, so the directories alone are not enough."""
MOST_REPORTED = 1000
"""The log names each refused peer once, and at most this many of them."""

STAMP = "%Y%m%dT%H%M%SZ"
_NAME = r"(?P<name>[a-z0-9-]+)"
_ROLE = rf"(?P<role>{'|'.join(GIVEN)})"
_PLAIN = re.compile(rf"{_NAME}\.pub")
_OPERATOR = re.compile(rf"{_NAME}\.{_ROLE}\.pub")
_REVOKED = re.compile(rf"{_NAME}(?:\.{_ROLE})?\.(?P<since>\d{{8}}T\d{{6}}Z)(?:-\d+)?\.pub")


@dataclass(frozen=True)
class Holder:
    """The owner of a key. ``role``: what an operator's key may do, None for a machine."""

    name: str
    role: Role | None = None

    @property
    def kind(self) -> str:
        if self.role is not None:
            return OPERATOR
        return ORCHESTRATOR if self.name == ORCHESTRATOR else HOST


@dataclass(frozen=True)
class KeyEntry:
    """One public half. It is valid if ``problem`` and ``since`` (time of revocation) are None."""

    path: Path
    holder: Holder
    key: bytes | None = None
    since: str | None = None
    problem: LiveshiftError | None = None

    @property
    def state(self) -> str:
        if self.since is not None:
            return "revoked"
        return "unusable" if self.problem else "valid"


def read(directory: Path) -> list[KeyEntry]:
    """Read every public half below a key directory, machines first, revoked keys last.

    Raises Refused when others can put keys there. A file that holds no key, or the same key as
    another file, becomes an entry with a problem. It does not affect the other keys.
    """
    public = directory / "public"
    check_directory(directory)
    entries: list[KeyEntry] = []
    for place, form in ((public, _PLAIN), (public / "operators", _OPERATOR)):
        entries += _listed(place, form)
    # Read last: a key that moves from there to here meanwhile is seen at least once.
    gone = revoked(directory)
    since = {entry.key: entry.since for entry in gone if entry.key}
    paths: dict[bytes | None, list[Path]] = {}
    for entry in entries:
        paths.setdefault(entry.key, []).append(entry.path)
    return [*(_judged(entry, paths[entry.key], since) for entry in entries), *gone]


def revoked(directory: Path) -> list[KeyEntry]:
    """Read the records of revoked keys; raises Refused when others can put records there."""
    public = directory / "public"
    if not public.is_dir():
        return []
    check_directory(public)
    return _listed(public / "revoked", _REVOKED)


def _listed(place: Path, form: re.Pattern[str]) -> list[KeyEntry]:
    try:
        names = sorted(os.listdir(place))
    except FileNotFoundError:
        return []
    check_directory(place)
    entries: list[KeyEntry] = []
    for name in names:
        if not name.endswith(".pub") or name.startswith("."):
            continue  # not ours, or a file that has not got its final name yet
        if not (match := form.fullmatch(name)):
            problem = ConfigError(f"{place / name}: the name does not say whose key it is")
            entries.append(KeyEntry(place / name, Holder(name.partition(".")[0]), problem=problem))
            continue
        found = match.groupdict()
        role = Role(found["role"]) if found.get("role") else None
        holder, since = Holder(found["name"], role), found.get("since")
        try:
            entries.append(KeyEntry(place / name, holder, read_public(place / name), since))
        except LiveshiftError as problem:
            entries.append(KeyEntry(place / name, holder, None, since, problem))
    return entries


def _judged(entry: KeyEntry, twins: list[Path], since: dict[bytes, str | None]) -> KeyEntry:
    """Mark an entry that is revoked or ambiguous. ``twins``: the files that hold this key."""
    if entry.key is None:
        return entry
    if entry.key in since:
        return KeyEntry(entry.path, entry.holder, entry.key, since[entry.key])
    if len(twins) > 1:
        problem = ConfigError(
            f"{twins[-1]} holds the key of {twins[0]}",
            hint="every holder needs its own key, since the key shows who sends: remove the copy",
        )
        return KeyEntry(entry.path, entry.holder, entry.key, None, problem)
    return entry


class KnownKeys:
    """Says whose key it is now. ZAP asks at every handshake, receivers ask for every frame.

    It reads files again when they have changed, so a new or revoked key needs no restart. While
    the directory cannot be trusted, it lets no new peer in, and known peers stay. Several threads
    may use it.
    """

    def __init__(self, directory: Path, *, operators: bool = False) -> None:
        self._directory = directory
        self._operators = operators  # whether operators' keys are accepted here
        public = directory / "public"
        self._places = (directory, public, public / "operators", public / "revoked")
        self._seen: object = None
        self._seen_files: object = None
        self._looked = 0.0
        self._lock = threading.Lock()
        self._holders: dict[str, Holder] = {}
        self._revoked: dict[str, str] = {}
        self._trusted = False
        self._reported: set[str] = set()

    def callback(self, domain: str, key: bytes) -> bool:
        """Answer ZAP: whether the key (in Z85) may connect."""
        text = key.decode()
        holders = self.holders()
        if not self._trusted:
            return False  # _read() has logged the reason
        if text in holders:
            return True
        if text not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(text)
            whose = f"the revoked key of {self._revoked[text]}" if text in self._revoked else text
            log.error("turned away a peer with an unknown key: %s", whose)
        return False

    def owner(self, frame: zmq.Frame) -> str:
        """The host (or orchestrator) that owns the key of the connection which brought this frame;
        NOBODY for an operator's key, and for a key that was revoked since."""
        return self.name_of(str(frame.get("User-Id")))

    def name_of(self, key: str) -> str:
        """Like :meth:`owner`, for a public key in Z85."""
        holder = self.holders().get(key)
        return holder.name if holder and holder.role is None else NOBODY

    def holder(self, frame: zmq.Frame) -> Holder | None:
        """Like :meth:`owner`, but also for operators; None for an unknown key."""
        return self.holders().get(str(frame.get("User-Id")))

    def holders(self) -> dict[str, Holder]:
        """All holders that are known at this moment, by key."""
        with self._lock:
            seen = tuple(map(_trace, self._places))
            late = time.monotonic() - self._looked > LOOK_S
            if late or seen != self._seen:
                self._looked = time.monotonic()
                files = [_files(place) for place in self._places[1:]]
                if (seen, files) != (self._seen, self._seen_files):
                    self._read()
                    self._seen, self._seen_files = seen, files
            return self._holders

    def _read(self) -> None:
        try:
            entries = read(self._directory)
        except (LiveshiftError, OSError) as error:
            self._trusted = False
            log.error("no peer can be let in: %s", error)
            return
        self._trusted = True
        for entry in entries:
            if entry.problem and entry.since is None:
                log.error("%s is not let in: %s", entry.holder.name, entry.problem)
        keys = {entry: entry.key.decode() for entry in entries if entry.key}
        self._revoked = {k: e.holder.name for e, k in keys.items() if e.state == "revoked"}
        self._holders = {
            key: entry.holder
            for entry, key in keys.items()
            if entry.state == "valid" and (self._operators or entry.holder.role is None)
        }
        self._reported -= self._holders.keys()


def _trace(path: str | Path) -> tuple[int, ...] | None:
    """A value that changes when the file, or the list of files in the directory, does."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _files(place: Path) -> list[tuple[str, tuple[int, ...] | None]]:
    try:
        return sorted((entry.name, _trace(entry.path)) for entry in os.scandir(place))
    except OSError:
        return []
