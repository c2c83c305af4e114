# SPDX-License-Identifier: Apache-2.0
"""Plans a lab: its names, addresses, the mounts of a host and the cluster file.

Nothing here changes the system; some functions look at it.

    10.88.0.2       ctl         the orchestrator's machine
    10.88.0.10+i    h<i>        the hosts
    ls-<lab>-<host>             network namespaces; ls-<lab>-sw has the switch that connects them
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, get_type_hints

from ...criu_glue.capsule.mounts import PSEUDO, Mount, below
from ...errors import WrongUsage
from ...runtime.config.cluster import (
    SCHEMA,
    Cluster,
    Endpoint,
    Env,
    Files,
    HostSettings,
    Paths,
    Timeouts,
)
from ...runtime.config.values import Unfit, expected, read_value

CONTROL = "ctl"
SWITCH = "sw"
CONTROL_ADDRESS = "10.88.0.2"
ORCHESTRATOR_PORT = 7400
PREFIX_LENGTH = 24
MOST_HOSTS = 32

NAME = r"[a-z0-9](?:[a-z0-9-]{0,6}[a-z0-9])?"
_HOST = rf"h[0-9]{{1,2}}|{CONTROL}|{SWITCH}"

OWN = ("/tmp", "/var/tmp", "/run", "/dev/shm", "/run/liveshift", "/var/lib/liveshift", "/etc/hosts")
"""Every host has these paths for itself."""

_NEVER_LOCAL = re.compile(
    r"/|/(proc|sys|dev|etc|usr|s?bin|lib|lib64|var|var/lib)|/(proc|sys|dev)/.*"
)


def checked_name(name: str) -> str:
    """Return the name if a lab can have it; raises WrongUsage."""
    if not re.fullmatch(NAME, name):
        raise WrongUsage(
            f'"{name}" cannot be the name of a lab',
            hint="use 1 to 8 of the characters a-z, 0-9 and - (not first or last)",
        )
    return name


def host_names(count: int) -> list[str]:
    """Return h0, h1 …; raises WrongUsage for a number of hosts that a lab cannot have."""
    if not 1 <= count <= MOST_HOSTS:
        raise WrongUsage(f"a lab has 1 to {MOST_HOSTS} hosts, got {count}")
    return [f"h{index}" for index in range(count)]


def address(index: int) -> str:
    return f"10.88.0.{10 + index}"


def mac(address: str) -> str:
    """Return the MAC of a host's eth0: locally administered, ``l``, the four bytes of its
    address."""
    return "02:6c:" + ":".join(f"{int(byte):02x}" for byte in address.split("."))


def netns(lab: str, host: str) -> str:
    return f"ls-{lab}-{host}"


def lab_of_netns(name: str) -> str | None:
    """Return the lab to which a network namespace of this name belongs; None: to none.

    A host's name has no hyphen, so that labs "a" and "a-h0" cannot be confused.
    """
    match = re.fullmatch(rf"ls-({NAME})-(?:{_HOST})", name)
    return match[1] if match else None


def hosts_file(count: int) -> str:
    """Return /etc/hosts, which is the same in every host."""
    entries = [("127.0.0.1", "localhost"), (CONTROL_ADDRESS, CONTROL)]
    entries += [(address(index), name) for index, name in enumerate(host_names(count))]
    return "".join(f"{a}\t{n}\n" for a, n in entries)


def local_directories(paths: Iterable[str]) -> list[str]:
    """Return the directories that each host has for itself; raises WrongUsage for one that can't
    be."""
    plain = [re.sub("^//", "/", os.path.normpath(path)) for path in paths]
    for path in plain:
        if not path.startswith("/") or path in OWN or _NEVER_LOCAL.fullmatch(path):
            raise WrongUsage(
                f"{path} cannot be a directory of each host's own",
                hint="use an absolute path such as /scratch; /tmp and /var/tmp are private anyway",
            )
    return sorted(set(plain))


def brought_back(wanted: Iterable[str], local: Sequence[str]) -> list[str]:
    """Return those directories of ``wanted`` that the private places of a host would hide.

    Every host must see them, so they are mounted again there. A private place itself is never
    brought back: that would undo it.
    """
    private = (*OWN, *local)
    hidden = {
        path
        for path in map(os.path.abspath, wanted)
        if path not in private and any(below(path, place) for place in private)
    }
    return sorted(path for path in hidden if not any(p != path and below(path, p) for p in hidden))


def needed_directories() -> list[str]:
    """Return the directories of the program and the current one, which every host must see."""
    package = str(files("liveshift"))
    found = [sys.prefix, sys.base_prefix, package, os.path.dirname(package)]
    found += [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    if criu := os.environ.get("LIVESHIFT_CRIU"):
        found.append(os.path.dirname(os.path.abspath(criu)))
    with suppress(FileNotFoundError):  # it was removed, so it is not needed
        found.append(os.getcwd())
    return [path for path in found if os.path.isdir(path)]


def machine_mounts(mounts: Iterable[Mount], local: Sequence[str]) -> list[str]:
    """Return mount points of real file systems below "/", which all hosts see alike (/home)."""
    elsewhere = (*OWN, *local, "/proc", "/sys", "/dev")
    points = {mount.point for mount in mounts if mount.kind not in PSEUDO} - {"/"}
    return sorted(p for p in points if not any(below(p, place) for place in elsewhere))


def mounts(directory: Path, host: str, shared: Sequence[str], local: Sequence[str]) -> list[str]:
    """Return the mount options of capsule-init that make a host's own view of the file system.

    Parents come before what lies below them, since a mount hides what was mounted below it earlier.
    """
    own = directory / host
    sources: dict[str, Path | None] = {path: Path(path) for path in shared}
    sources |= {path: own / "local" / path.lstrip("/") for path in local}
    sources |= {
        "/tmp": own / "tmp",
        "/var/tmp": own / "var-tmp",
        "/run": None,
        "/dev/shm": None,
        "/run/liveshift": own / "run",
        "/var/lib/liveshift": own / "state",
        "/etc/hosts": directory / "hosts",
    }
    options: list[str] = []
    for target in sorted(sources, key=lambda path: (path.count("/"), path)):
        source = sources[target]
        options += ["--tmpfs", target] if source is None else ["--bind", str(source), target]
    return [*options, "--proc"]


Tables = Mapping[str, Mapping[str, str]]
"""Tables of the cluster file by name: their keys, and values as on a command line."""


def cluster(
    name: str,
    hosts: int,
    directory: Path,
    *,
    slots: int = 1,
    spare: Mapping[str, str] | None = None,
    memory: Mapping[str, str] | None = None,
    shared: Sequence[str] = (),
    timeouts: Mapping[str, str] | None = None,
    tables: Tables | None = None,
) -> Cluster:
    """Return the lab's cluster file; raises WrongUsage if the lab is not possible."""
    kinds: dict[str, Any] = get_type_hints(Cluster)
    names = host_names(hosts)
    for key, by_host in (("spare", spare), ("memory", memory)):
        if unknown := sorted(set(by_host or {}) - set(names)):
            raise WrongUsage(
                f"{key} of {unknown[0]}: no such host in a lab of {hosts}",
                hint=f"its hosts are: {', '.join(names)}",
            )
    settings: dict[str, dict[str, Any]] = {n: {"slots": _read("slots", slots, n)} for n in names}
    for host, word in (spare or {}).items():
        settings[host]["spare"] = _read("spare", word, host)
    for host, size in (memory or {}).items():
        settings[host]["memory"] = _read("memory", size, host)
    criu = os.environ.get("LIVESHIFT_CRIU")
    return Cluster(
        name=f"lab-{name}",
        orchestrator=Endpoint(CONTROL_ADDRESS, ORCHESTRATOR_PORT),
        overlay=IPv4Network("10.99.0.0/16"),
        hosts=tuple(
            HostSettings(name=host, address=address(index), **settings[host])
            for index, host in enumerate(names)
        ),
        files=Files(shared=tuple(map(Path, ("/", *shared))), carried=(Path("/var/tmp"),)),
        env=Env(set_={"PYTHONUNBUFFERED": "1"}),
        paths=Paths(keys=directory / "keys", criu=Path(os.path.abspath(criu)) if criu else None),
        timeouts=Timeouts(**_table("timeouts", "timeout", timeouts or {}, float)),
        **{
            table: kinds[table](**_table(table, f"setting of {table}", given, _value))
            for table, given in (tables or {}).items()
        },
    )


def _value(text: str) -> object:
    """Read a value as TOML would; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _table(
    table: str, what: str, given: Mapping[str, str], raw: Callable[[str], object]
) -> dict[str, Any]:
    """Read the keys of a table of the cluster file as they are written on a command line. ``raw``
    turns each text into what TOML would give. Raises WrongUsage."""
    known = SCHEMA[table]
    found = {}
    for key, text in given.items():
        if key not in known:
            raise WrongUsage(f'no {what} "{key}"', hint=f"there are: {', '.join(known)}")
        try:
            found[key] = read_value(known[key].kind, raw(text))
        except (Unfit, ValueError):
            raise WrongUsage(
                f'{table}.{key}: found "{text}", expected {expected(known[key].kind)}'
            ) from None
    return found


def _read(key: str, raw: object, host: str) -> Any:
    try:
        return read_value(SCHEMA["hosts"][key].kind, raw)
    except Unfit as unfit:
        raise WrongUsage(f"{key} of {host}: {unfit}") from None
