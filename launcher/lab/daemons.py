# SPDX-License-Identifier: Apache-2.0
"""Runs the real daemons in a lab: an agent on every host, the orchestrator on ``ctl``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from ...errors import LiveshiftError, Unreachable
from ...runtime.messages import GetStatus, Status
from ..client.client import Client
from . import plan
from .record import Lab, LabHost, claim
from .sandboxes import entry
from .tasks import Task, host_pid, kill

READY_S = 30.0
"""The orchestrator must have seen every agent within this many seconds."""

# The daemon gets a session of its own, away from the terminal, and signals as an init system leaves
# them. A shell that starts `lab up` in the background makes it ignore SIGINT, and jobs would
# inherit that.
_DETACHED = ("setsid", "--fork", "env", "--default-signal", "sh", "-c")
_SAY_PID = 'umask 022; echo $$; exec "$@" >&2'


def start(lab: Lab, machine: LabHost) -> None:
    """Start a host's daemon, which continues its log. Raises LiveshiftError if it ends at once."""
    with lab.log(machine.name).open("ab") as log:
        done = subprocess.run(
            [*entry(machine), *_DETACHED, _SAY_PID, "sh", *_command(lab, machine)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_environment(),
            check=False,
        )
    init = machine.init
    assert init is not None  # entry() has checked it
    pid = host_pid(init.pid, int(done.stdout)) if done.stdout.strip() else None
    machine.daemon = Task.of(pid) if pid else None
    if machine.daemon is None:
        raise _ended(lab, machine)


def start_daemon(lab: Lab, host: str) -> None:
    """Start the daemon of a host (or of ``ctl``) unless it runs. Does not wait for its answer."""
    with claim(lab.directory):
        lab.refresh()
        machine = lab.machine(host)
        if machine.daemon is None or not machine.daemon.alive:
            start(lab, machine)
            lab.save()


def stop_daemon(lab: Lab, host: str) -> None:
    """Kill the daemon of a host (or of ``ctl``) and wait for its end. Jobs are not touched."""
    with claim(lab.directory):
        lab.refresh()
        machine = lab.machine(host)
        if machine.daemon is None:
            return
        kill([machine.daemon])
        machine.daemon = None
        lab.save()


def wait_ready(lab: Lab, seen: Callable[[int], None] = lambda up: None) -> None:
    """Wait until the orchestrator answers and every running host is up for it.

    ``seen`` is called with the number of hosts that are up. Raises LiveshiftError with the end of
    the log if a daemon ends, Unreachable after READY_S seconds.
    """
    until = time.monotonic() + READY_S
    wanted = {machine.name for machine in lab.hosts.values() if machine.running}
    missing = wanted
    with Client(lab.socket) as client:
        while missing:
            for machine in lab.machines:
                if machine.daemon is not None and not machine.daemon.alive:
                    raise _ended(lab, machine)
            if time.monotonic() > until:
                raise Unreachable(
                    f"lab {lab.name}: after {READY_S:g} s {', '.join(sorted(missing))} not up\n"
                    + "\n".join(_log_end(lab, machine) for machine in lab.machines)
                )
            try:
                status = client.get(Status, GetStatus(), timeout=2.0)
                missing = wanted - {row.name for row in status.hosts if row.state == "up"}
            except Unreachable:
                pass
            seen(len(wanted - missing))
            time.sleep(0.03 if missing else 0)


def _command(lab: Lab, machine: LabHost) -> Iterator[str]:
    yield from (sys.executable, "-m", "liveshift.launcher.cli")
    if machine.name == plan.CONTROL:
        yield from ("orchestrator", "--config", str(lab.config))
    else:
        yield from ("agent", "--config", str(lab.config), "--host", machine.name)


def _environment() -> dict[str, str]:
    """Return the environment of a machine that has just started, and what it takes to find this
    very program."""
    kept = ("PYTHON", "LIVESHIFT_", "LANG", "LC_")
    own = {key: value for key, value in os.environ.items() if key.startswith(kept)}
    own.pop("LIVESHIFT_SOCKET", None)
    path = os.environ.get("PATH", os.defpath)
    return own | {"PATH": f"{path}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


def _ended(lab: Lab, machine: LabHost) -> LiveshiftError:
    what = "orchestrator" if machine.name == plan.CONTROL else "agent"
    return LiveshiftError(
        f"lab {lab.name}: the {what} on {machine.name} has ended\n{_log_end(lab, machine)}"
    )


def _log_end(lab: Lab, machine: LabHost) -> str:
    try:
        text = lab.log(machine.name).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        text = []
    shown = text[-12:] or ["(nothing)"]
    return f"log of {machine.name}:\n" + "\n".join(f"  {line}" for line in shown)
