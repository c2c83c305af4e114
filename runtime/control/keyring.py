# SPDX-License-Identifier: Apache-2.0
"""Whose key is it? What lies in ``public/``, as read once and as it is at any moment.

    <keys>/public/<name>.pub                        a host, or the orchestrator
    <keys>/public/operators/<name>.<role>.pub       an operator, and what the key may do
    <keys>/public/revoked/<name>[.<role>].<time>.pub    a key that counts no more, wherever else
                                                    it may lie: a copy put back changes nothing

Who holds a key whose public half lies there belongs to the cluster, so none of these directories,
nor what is in them, may be writable by others.
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
"""How often files are looked at one by one: one that was written over in place leaves no trace in
its directory."""
MOST_TOLD = 1000
"""Peers that were turned away are told of once each, up to this many."""

STAMP = "%Y%m%dT%H%M%SZ"
_NAME = r"(?P<name>[a-z0-9-]+)"
_ROLE = rf"(?P<role>{'|'.join(GIVEN)})"
_PLAIN = re.compile(rf"{_NAME}\.pub")
_OPERATOR = re.compile(rf"{_NAME}\.{_ROLE}\.pub")
_REVOKED = re.compile(rf"{_NAME}(?:\.{_ROLE})?\.(?P<since>\d{{8}}T\d{{6}}Z)(?:-\d+)?\.pub")


@dataclass(frozen=True)
class Holder:
    """Whose key it is; ``role``: what an operator's key may do, None for a machine."""

    name: str
    role: Role | None = None

    @property
    def kind(self) -> str:
        if self.role is not None:
            return OPERATOR
        return ORCHESTRATOR if self.name == ORCHESTRATOR else HOST


@dataclass(frozen=True)
class Entry:
    """One public half; without ``problem`` and ``since`` (when it was revoked) it counts."""

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


def read(directory: Path) -> list[Entry]:
    """Every public half below a key directory, machines first, those revoked last.

    Raises Refused when others could put keys there. A file that holds no key, or one that another
    file holds too, is an entry with a problem: it keeps nobody else out.
    """
    public = directory / "public"
    check_directory(directory)
    entries: list[Entry] = []
    for place, form in ((public, _PLAIN), (public / "operators", _OPERATOR)):
        entries += _listed(place, form)
    # Read last: a key on its way from there to here is seen at least once.
    gone = revoked(directory)
    since = {entry.key: entry.since for entry in gone if entry.key}
    paths: dict[bytes | None, list[Path]] = {}
    for entry in entries:
        paths.setdefault(entry.key, []).append(entry.path)
    return [*(_judged(entry, paths[entry.key], since) for entry in entries), *gone]


def revoked(directory: Path) -> list[Entry]:
    """The records of keys that count no more; raises Refused when others could put some there."""
    public = directory / "public"
    if not public.is_dir():
        return []
    check_directory(public)
    return _listed(public / "revoked", _REVOKED)


def _listed(place: Path, form: re.Pattern[str]) -> list[Entry]:
    try:
        names = sorted(os.listdir(place))
    except FileNotFoundError:
        return []
    check_directory(place)
    entries: list[Entry] = []
    for name in names:
        if not name.endswith(".pub") or name.startswith("."):
            continue  # somebody's own file, or one on its way to its name
        if not (match := form.fullmatch(name)):
            problem = ConfigError(f"{place / name}: the name does not say whose key it is")
            entries.append(Entry(place / name, Holder(name.partition(".")[0]), problem=problem))
            continue
        found = match.groupdict()
        role = Role(found["role"]) if found.get("role") else None
        holder, since = Holder(found["name"], role), found.get("since")
        try:
            entries.append(Entry(place / name, holder, read_public(place / name), since))
        except LiveshiftError as problem:
            entries.append(Entry(place / name, holder, None, since, problem))
    return entries


def _judged(entry: Entry, twins: list[Path], since: dict[bytes, str | None]) -> Entry:
    """``twins``: the files that hold this key."""
    if entry.key is None:
        return entry
    if entry.key in since:
        return Entry(entry.path, entry.holder, entry.key, since[entry.key])
    if len(twins) > 1:
        problem = ConfigError(
            f"{twins[-1]} holds the key of {twins[0]}",
            hint="everybody needs a key of their own, since it tells who speaks: remove the copy",
        )
        return Entry(entry.path, entry.holder, entry.key, None, problem)
    return entry


class Known:
    """Whose key is it now? ZAP asks for every handshake, receivers for every frame.

    Files are read again when they have changed, so neither a new key nor a revoked one needs a
    restart. While the directory cannot be trusted nobody new is let in, and who was known stays.
    May be used by several threads.
    """

    def __init__(self, directory: Path, *, operators: bool = False) -> None:
        self._directory = directory
        self._operators = operators  # whether their keys open this door
        public = directory / "public"
        self._places = (directory, public, public / "operators", public / "revoked")
        self._seen: object = None
        self._seen_files: object = None
        self._looked = 0.0
        self._lock = threading.Lock()
        self._holders: dict[str, Holder] = {}
        self._revoked: dict[str, str] = {}
        self._trusted = False
        self._told: set[str] = set()

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP's question, the key in Z85."""
        text = key.decode()
        holders = self.holders()
        if not self._trusted:
            return False  # why was said when it was found
        if text in holders:
            return True
        if text not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(text)
            whose = f"the revoked key of {self._revoked[text]}" if text in self._revoked else text
            log.error("turned away a peer with an unknown key: %s", whose)
        return False

    def owner(self, frame: zmq.Frame) -> str:
        """The host (or orchestrator) whose key the connection that brought this frame was opened
        with; NOBODY for an operator's, and for one that was revoked since."""
        return self.name_of(str(frame.get("User-Id")))

    def name_of(self, key: str) -> str:
        """The same for a public key, in Z85."""
        holder = self.holders().get(key)
        return holder.name if holder and holder.role is None else NOBODY

    def holder(self, frame: zmq.Frame) -> Holder | None:
        """Like :meth:`owner`, operators too; None for nobody."""
        return self.holders().get(str(frame.get("User-Id")))

    def holders(self) -> dict[str, Holder]:
        """Everybody who is known at this moment, by key."""
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
        self._told -= self._holders.keys()


def _trace(path: str | Path) -> tuple[int, ...] | None:
    """Changes when the file, or what is in the directory, does."""
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
