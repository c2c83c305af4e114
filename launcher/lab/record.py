# SPDX-License-Identifier: Apache-2.0
"""Labs on this machine and what is known of each: its directory and lab.json.

    <root>/<name>/lab.json        written before anything is made, then kept true
                  cluster.toml    as for any cluster
                  hosts           /etc/hosts of its hosts
                  keys/           secret keys have mode 0600
                  log/<host>.log  what the daemons log
                  <host>/run      its /run/liveshift, with the daemons' sockets
                  <host>/state    its /var/lib/liveshift
                  <host>/tmp, var-tmp, local/…   its /tmp, /var/tmp and other own directories

The directory is also the lock: a command that makes, changes or removes the lab holds a flock on
it.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...errors import LiveshiftError, NotFound, NotPermitted, Refused, WrongUsage, no_such
from ..client.context import LAB_ROOT, LAB_ROOT_VARIABLE, lab_socket
from . import plan
from .tasks import Task

INSIDE = Path("/run/liveshift-lab")
"""Inside a host, this file names the host and its lab."""

_LOCK_S = 2.0
"""A command waits this many seconds for the lock. The children of a killed command may hold it for
a moment."""

_LONGEST_ROOT = 60
"""The root directory's path has at most this many characters. The path of a socket must fit into
107 (unix(7)), a device's alias into 255."""


class Link(msgspec.Struct, frozen=True):
    """The properties of a host's link, the same in both directions.

    ``rate`` in bit/s (0: as fast as it goes), ``loss`` in percent, ``delay`` in milliseconds one
    way, ``cut``: the cable is out.
    """

    rate: int = 0
    loss: float = 0.0
    delay: float = 0.0
    cut: bool = False


class LabHost(msgspec.Struct):
    """One virtual host. ``init`` is its process 1, ``daemon`` its agent (on ``ctl`` the
    orchestrator)."""

    name: str
    address: str
    netns: str
    init: Task | None = None
    daemon: Task | None = None
    link: Link = Link()

    @property
    def running(self) -> bool:
        return self.init is not None and self.init.alive


class Lab(msgspec.Struct):
    """A lab. ``shared``: directories below private places that all hosts see. ``local``:
    directories that each host has for itself. ``cuts``: the pairs of machines between which nothing
    passes (cuts.py)."""

    name: str
    directory: Path
    hosts: dict[str, LabHost]
    control: LabHost
    shared: list[str]
    local: list[str]
    cuts: list[tuple[str, str]] = []
    state: Literal["making", "up"] = "making"

    @property
    def config(self) -> Path:
        return self.directory / "cluster.toml"

    @property
    def socket(self) -> Path:
        """The orchestrator's socket, as this machine's own processes reach it."""
        return lab_socket(self.directory.parent, self.name)

    @property
    def machines(self) -> list[LabHost]:
        """The control host, then the hosts."""
        return [self.control, *self.hosts.values()]

    @property
    def switch(self) -> str:
        """The network namespace of the switch."""
        return plan.netns(self.name, plan.SWITCH)

    @property
    def running(self) -> bool:
        """Whether at least one of its machines runs."""
        return any(machine.running for machine in self.machines)

    def machine(self, name: str) -> LabHost:
        """Return a host or ``ctl``; raises NotFound, which names those there are."""
        for machine in self.machines:
            if machine.name == name:
                return machine
        known = (m.name for m in self.machines)
        raise no_such(f'no host "{name}" in lab "{self.name}"', name, known, "there are")

    def log(self, host: str) -> Path:
        return self.directory / "log" / f"{host}.log"

    def save(self) -> None:
        raw = msgspec.json.format(msgspec.json.encode(self, enc_hook=str)) + b"\n"
        staged = self.directory / f".lab.json.{os.getpid()}"
        staged.write_bytes(raw)
        staged.chmod(0o644)
        staged.rename(self.directory / "lab.json")

    def refresh(self) -> None:
        """Take over what another command has changed since."""
        now = load(self.name)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(now, name))


def root() -> Path:
    """Return the directory of all labs; raises WrongUsage if $LIVESHIFT_LAB_ROOT cannot be it."""
    given = os.environ.get(LAB_ROOT_VARIABLE) or str(LAB_ROOT)
    if not re.fullmatch(rf"/[A-Za-z0-9._/-]{{1,{_LONGEST_ROOT}}}", given):
        raise WrongUsage(
            f"${LAB_ROOT_VARIABLE} cannot be {given!r}",
            hint="use an absolute path of letters, digits, . _ - and /, at most"
            f" {_LONGEST_ROOT} long",
        )
    return Path(os.path.realpath(given))


def names() -> list[str]:
    """Return the names of all labs, also of those half made or half removed."""
    try:
        found = sorted(path.name for path in root().iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    return [name for name in found if re.fullmatch(plan.NAME, name)]


def load(name: str) -> Lab:
    """Return what lab.json says. Raises NotFound if there is no such lab or it is half removed,
    LiveshiftError if the file is not understood."""
    directory = root() / plan.checked_name(name)
    try:
        raw = (directory / "lab.json").read_bytes()
    except FileNotFoundError:
        if directory.exists():
            raise NotFound(
                f'lab "{name}" is not whole: {directory} has no lab.json',
                hint=f"`liveshift lab down {name}` removes what is left of it",
            ) from None
        there = names()
        raise NotFound(
            f'no lab "{name}" on this machine',
            hint=f"there are: {', '.join(there)}" if there else "`liveshift lab up` makes one",
        ) from None
    try:
        lab = msgspec.json.decode(raw, type=Lab, dec_hook=_read_path)
    except msgspec.DecodeError as error:
        raise LiveshiftError(
            f"{directory}/lab.json is not understood: {error}",
            hint=f"`liveshift lab down {name}` removes the lab without it",
        ) from None
    return lab


def find(name: str | None = None) -> Lab:
    """Return the lab of that name, or the only one there is; raises NotFound or WrongUsage."""
    if name is not None:
        return load(name)
    there = names()
    if not there:
        raise NotFound("no lab on this machine", hint="`liveshift lab up --hosts 3` makes one")
    if len(there) > 1:
        raise WrongUsage(
            f"there are {len(there)} labs on this machine: {', '.join(there)}",
            hint="name one: `--lab NAME` (`liveshift lab down NAME`), or set $LIVESHIFT_LAB",
        )
    return load(there[0])


def refuse_inside() -> None:
    """Raise Refused inside of a lab, where pids and names mean something else."""
    if INSIDE.exists():
        raise Refused(
            f"this is host {INSIDE.read_text().strip()}: labs are changed from outside",
            hint="run this outside of the lab",
        )


@contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Hold the lab's lock, to change the lab.

    Raises Refused if another command holds it, or inside of a lab; NotFound if there is no such
    lab; NotPermitted without root.
    """
    if os.geteuid() != 0:
        raise NotPermitted(f'changing lab "{directory.name}" needs root', hint="run it with sudo")
    refuse_inside()
    lock = _lock(directory)
    try:
        yield
    finally:
        os.close(lock)


def _lock(directory: Path) -> int:
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f'no lab "{directory.name}" on this machine') from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if directory.exists() and os.path.samestat(os.fstat(lock), directory.stat()):
                return lock
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(lock)
                raise Refused(
                    f'another command is at work on lab "{directory.name}"',
                    hint="wait until it has ended, or end it",
                ) from None
        os.close(lock)
        time.sleep(0.02)  # another command holds it, or has removed and made it again


def _read_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"a value of type {kind}")
