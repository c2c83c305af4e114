# SPDX-License-Identifier: Apache-2.0
"""Finds the cluster that a command speaks to, from options and surroundings: a daemon's socket or a
remote orchestrator."""

from __future__ import annotations

import os
import re
import socket as sockets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import Unreachable, WrongUsage

SOCKET_VARIABLE = "LIVESHIFT_SOCKET"
LAB_VARIABLE = "LIVESHIFT_LAB"
LAB_ROOT_VARIABLE = "LIVESHIFT_LAB_ROOT"
CONNECT_VARIABLE = "LIVESHIFT_CONNECT"
KEY_VARIABLE = "LIVESHIFT_KEY"

LAB_ROOT = Path("/var/lib/liveshift-lab")
RUN = Path("/run/liveshift")
DAEMONS = ("orchestrator.sock", "agent.sock")


@dataclass(frozen=True)
class Remote:
    """An orchestrator on another machine (HOST:PORT) and the operator's key to use with it."""

    address: str
    key: Path


Place = Path | Remote


def find(
    socket: str | None = None,
    lab: str | None = None,
    connect: str | None = None,
    key: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Place:
    """Return the place to speak to: ``--connect``, else ``--socket`` or ``--lab``, else
    $LIVESHIFT_CONNECT, else what :func:`find_socket` finds.

    Raises WrongUsage if options contradict each other or the key is missing, and what
    :func:`find_socket` raises.
    """
    local = "--socket" if socket else "--lab" if lab else None
    if connect and local:
        raise WrongUsage(f"--connect and {local} each name a cluster: give one of them")
    if not local:
        connect = connect or environment.get(CONNECT_VARIABLE)
    if not connect:
        if key:
            raise WrongUsage("--key goes with --connect tcp://HOST:PORT")
        return find_socket(socket, lab, environment)
    match = re.fullmatch(r"(?:tcp://)?([^/:\s]+:[0-9]{1,5})", connect)
    if not match or int(match[1].rpartition(":")[2]) not in range(1, 65536):
        raise WrongUsage(
            f'"{connect}" is not an address of an orchestrator',
            hint="write tcp://HOST:PORT; the port is that of cluster.orchestrator, 7400 perhaps",
        )
    key = key or environment.get(KEY_VARIABLE)
    if not key:
        raise WrongUsage(
            f"{connect} needs an operator's key",
            hint=f"give --key FILE or set ${KEY_VARIABLE}; `liveshift keys add-operator` makes one"
            " where the cluster's keys are",
        )
    return Remote(match[1], Path(key).expanduser())


def find_socket(
    socket: str | None = None,
    lab: str | None = None,
    environment: Mapping[str, str] = os.environ,
    run: Path = RUN,
) -> Path:
    """Return the socket to speak to: the first of these that is given or exists.

    1. ``--socket`` or ``--lab``
    2. ``$LIVESHIFT_SOCKET``, then ``$LIVESHIFT_LAB``
    3. this machine's own daemon: its orchestrator, else its agent, which passes requests on
    4. the one lab that runs here

    Raises Unreachable if there is none, WrongUsage if several labs run.
    """
    root = Path(environment.get(LAB_ROOT_VARIABLE) or LAB_ROOT)
    if not socket and not lab:
        socket = environment.get(SOCKET_VARIABLE)
    if socket:
        return Path(socket)
    if lab := lab or environment.get(LAB_VARIABLE):
        return _of_lab(root, lab)
    for name in DAEMONS:
        if os.path.exists(run / name):  # unlike Path.exists, False where we may not look
            return run / name
    return _only_lab(root)


def lab_socket(root: Path, name: str) -> Path:
    """Return where the orchestrator of a lab listens."""
    return root / name / "ctl" / "run" / "orchestrator.sock"


def labs(root: Path) -> list[str]:
    """Return the names of the labs whose orchestrator's socket exists."""
    try:
        names = sorted(entry.name for entry in root.iterdir())
    except OSError:
        return []
    return [name for name in names if os.path.exists(lab_socket(root, name))]


def _of_lab(root: Path, name: str) -> Path:
    path = lab_socket(root, name)
    if "/" in name or not os.path.exists(path):
        there = labs(root)
        raise Unreachable(
            f'no lab "{name}" runs here: there is no {path}',
            hint=f"these run: {', '.join(there)}"
            if there
            else f"`liveshift lab up {name} --hosts 3` makes it",
        )
    return path


def _only_lab(root: Path) -> Path:
    found = labs(root)
    if len(found) > 1:  # sockets left over from a killed lab do not count
        found = [name for name in found if _listens(lab_socket(root, name))] or found
    if len(found) > 1:
        raise WrongUsage(
            f"several labs run here: {', '.join(found)}",
            hint=f"say which: `--lab {found[0]}`, or `export {LAB_VARIABLE}={found[0]}`",
        )
    if not found:
        raise Unreachable(
            "no cluster here: neither a lab nor a daemon of this machine runs",
            hint="`liveshift lab up --hosts 3` makes a cluster on this machine",
        )
    return lab_socket(root, found[0])


def _listens(path: Path) -> bool:
    with suppress(OSError), sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.connect(str(path))
        return True
    return False
