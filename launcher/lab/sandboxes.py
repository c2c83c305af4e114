# SPDX-License-Identifier: Apache-2.0
"""Starts a lab host as a sandbox (process 1 in namespaces of its own), enters it, and ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ...errors import LiveshiftError, NotPermitted, Refused
from . import cuts, plan, wiring
from .commands import ip, run
from .record import INSIDE, Lab, LabHost, Link, claim
from .tasks import Task, kill

_SPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")

# The machine's /sys shows the machine's devices, so a host gets one that shows its own.
_FINISH = f"""set -e
chmod 755 /run
mkdir /run/netns /run/sys
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup /run/sys; fi
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
if mountpoint -q /run/sys; then mount --move /run/sys /sys/fs/cgroup; fi
rmdir /run/sys
echo "$1" >{INSIDE}
"""


def start(lab: Lab, machine: LabHost) -> None:
    """Start a host whose network is there, but not its daemon. Raises LiveshiftError."""
    own = lab.directory / machine.name
    for name, mode in (("run", 0o755), ("state", 0o700), ("tmp", 0o1777), ("var-tmp", 0o1777)):
        _make(own / name, mode)
    for path in lab.local:
        _make(own / "local" / path.lstrip("/"), 0o1777)
    program = files("liveshift.criu_glue.capsule") / "capsule-init"
    if not program.is_file():
        raise LiveshiftError(
            f"{program} is missing: it is built when liveshift is installed",
            hint="`make demo` and `make test` install it; `pip install .` does too",
        )
    printed = run(
        [
            *(str(program), "--hold"),
            *("--netns", str(wiring.NAMED / machine.netns)),
            *("--hostname", machine.name),
            *plan.mounts(lab.directory, machine.name, lab.shared, lab.local),
        ],
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )
    machine.init = Task.of(int(printed))
    if machine.init is None:
        raise LiveshiftError(f"process 1 of lab host {machine.name} ended at once")
    about = f"{machine.name} of lab {lab.name}"
    run([*entry(machine, "--mount", "--net"), "sh", "-c", _FINISH, "sh", about])


def entry(machine: LabHost, *spaces: str) -> list[str]:
    """Return the command prefix that enters a host.

    Raises Refused if the host does not run, NotPermitted without root.
    """
    if os.geteuid() != 0:
        raise NotPermitted("entering a lab host needs root", hint="run it with sudo")
    if machine.init is None or not machine.init.alive:
        raise Refused(
            f"lab host {machine.name} does not run",
            hint="`liveshift lab down` and `liveshift lab up` make the lab again",
        )
    return ["nsenter", "--target", str(machine.init.pid), *(spaces or _SPACES), "--"]


def run_in(lab: Lab, host: str, argv: Sequence[str]) -> int:
    """Run a command on a host, with this process's terminal; return its exit code.

    The command runs in the current directory if the host has it, else in /. 128 + n means that
    signal n ended it. Only the command handles a Ctrl-C.
    """
    here = 'cd -- "$0" 2>/dev/null || cd /; exec "$@"'
    command = [*entry(lab.machine(host)), "sh", "-c", here, _current_directory(), *argv]
    in_main = threading.current_thread() is threading.main_thread()
    # A handler, not SIG_IGN, which the command would inherit.
    old = signal.signal(signal.SIGINT, lambda *_: None) if in_main else None
    try:
        code = subprocess.Popen(command).wait()
    finally:
        if in_main:
            signal.signal(signal.SIGINT, old)
    return code if code >= 0 else 128 - code


def kill_host(lab: Lab, host: str) -> None:
    """Cut a host's power: it is silent at once, then nothing of it runs. Its disk remains."""
    with claim(lab.directory):
        lab.refresh()
        machine = lab.machine(host)
        if machine.init is None:
            return
        # The link goes down first: the peers must not hear the dying processes end.
        ip(lab.switch, f"link set {machine.name} down")
        kill([machine.init])
        wiring.unplug(lab, machine)
        cuts.forget(lab, host)
        machine.init = machine.daemon = None
        machine.link = Link()
        lab.save()


def boot_host(lab: Lab, host: str) -> None:
    """Boot a killed host again: its link is as new, /run is empty, its daemon does not run."""
    with claim(lab.directory):
        lab.refresh()
        machine = lab.machine(host)
        if machine.running:
            return
        wiring.unplug(lab, machine)
        shutil.rmtree(lab.directory / machine.name / "run", ignore_errors=True)
        wiring.plug_in(lab, machine)
        start(lab, machine)
        lab.save()


def _make(path: Path, mode: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
