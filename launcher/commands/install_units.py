# SPDX-License-Identifier: Apache-2.0
"""``liveshift install-units``: writes systemd units that start the daemons of this installation.

A unit that looks for ``liveshift`` in systemd's PATH finds no virtual environment, and restarts
every two seconds for ever. So the installed units name the interpreter that runs this command.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import LiveshiftError, NotFound, NotPermitted
from .daemons import CONFIG, Config, OwnHost

if TYPE_CHECKING:
    from ...runtime.config.cluster import Cluster, Paths

TEMPLATES = Path(__file__).parents[1] / "systemd"
UNITS = Path("/etc/systemd/system")
PROGRAM = (sys.executable, "-m", "liveshift.launcher.cli")
"""The command line that starts this installation, independent of where pip has put its scripts."""

PLACEHOLDER = "/usr/bin/env liveshift"
"""A unit template has this text in the place of the program."""

PATHS = "# install-units writes here what a cluster file with other [paths] needs.\n"
"""This line of the orchestrator's template is replaced by what other [paths] need."""


class Daemon(StrEnum):
    """Which daemons run on a machine."""

    AGENT = "agent"
    ORCHESTRATOR = "orchestrator"


def install_units(
    daemons: Annotated[
        list[Daemon], typer.Argument(metavar="agent|orchestrator …", help="Which daemons run here.")
    ],
    config: Config = CONFIG,
    host: OwnHost = "",
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="Where the units are written.")
    ] = UNITS,
    start: Annotated[
        bool, typer.Option("--start", help="Also enable and start them (systemctl enable --now).")
    ] = False,
) -> None:
    """Write systemd units that run the daemons of this installation.

    The units name this Python interpreter by its path, so a virtual environment needs no PATH.
    Run it again after the installation has moved.
    """
    from ...runtime.config.cluster import load

    cluster = load(config)  # refuse now what the daemon would refuse when it starts
    if Daemon.AGENT in daemons:
        _check_host(cluster, host)
    for daemon in daemons:
        unit = directory / f"liveshift-{daemon.value}.service"
        try:
            unit.write_text(rendered(daemon, Path(os.path.abspath(config)), host, cluster.paths))
        except PermissionError:
            raise NotPermitted(
                f"cannot write {unit}", hint="run the same command as root"
            ) from None
        except OSError as error:
            raise LiveshiftError(f"cannot write {unit}: {error.strerror}") from error
        sys.stdout.write(f"{unit}\n")
    names = [f"liveshift-{daemon.value}.service" for daemon in daemons]
    if start:
        _systemctl("daemon-reload")
        _systemctl("enable", "--now", *names)
    else:
        sys.stderr.write(f"systemctl daemon-reload && systemctl enable --now {' '.join(names)}\n")


def _check_host(cluster: Cluster, host: str) -> None:
    """Raise NotFound for a host that the cluster file does not name: its agent would end at once,
    and systemd would start it again for ever."""
    here = socket.gethostname().partition(".")[0]  # as systemd's %l
    try:
        cluster.host(host or here)
    except NotFound as error:
        if host:
            raise
        raise NotFound(str(error), hint=f'name it: --host NAME; this machine is "{here}"') from None


def rendered(daemon: Daemon, config: Path, host: str, paths: Paths) -> str:
    """Return a unit's text for this interpreter, cluster file and host ("": the machine's name)."""
    text = (TEMPLATES / f"liveshift-{daemon.value}.service").read_text()
    text = text.replace(PLACEHOLDER, " ".join(PROGRAM))
    text = text.replace(str(CONFIG), str(config))
    text = text.replace(PATHS, "".join(_writable(paths)))
    return text.replace("--host %l", f"--host {host}") if host else text


def _writable(paths: Paths) -> Iterator[str]:
    """Yield lines for the directories that the orchestrator writes to and its template lacks.

    ``+``: they are made by a process that sees the file system as it is, and before ExecStart= gets
    its own.
    """
    usual = type(paths)()
    for path, before, mode in ((paths.state, usual.state, 700), (paths.run, usual.run, 755)):
        if path != before:
            quoted = '"' + str(path).replace("%", "%%") + '"'
            yield f"ExecStartPre=+/bin/mkdir -p -m {mode} {quoted}\nReadWritePaths={quoted}\n"


def _systemctl(*args: str) -> None:
    try:
        done = subprocess.run(["systemctl", *args], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LiveshiftError(
            "there is no systemctl on this machine, so the units were written but not started",
            hint="start the daemons by this machine's own means: the units' ExecStart says how",
        ) from None
    if done.returncode != 0:
        raise LiveshiftError(
            f"systemctl {' '.join(args)} failed: {done.stderr.strip()}",
            hint="`journalctl -u liveshift-agent -e` shows what a daemon said",
        )
