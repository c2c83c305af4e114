# SPDX-License-Identifier: Apache-2.0
"""Programs on lab hosts that liveshift does not run: plain ones, and sandboxes made by hand."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from host_programs import line, on_host, running
from lab_session import JOBS

from liveshift.criu_glue.criu.tool import Criu
from liveshift.launcher.lab import LabHost, entry

from .cases import Case, Effort

SCRIPT = Path(__file__).resolve().parent / "streams.py"
PORT = 7999
PATIENCE_S = 600.0

_SANDBOX = """
echo "$1" >/proc/sys/kernel/ns_last_pid
trap '' CHLD
echo ready
exec sleep infinity
"""
"""Process 1 of a sandbox. It sets the first pid, and the kernel reaps its children."""


def training(case: Case, effort: Effort, python: str = "python", pace_s: float = 0.0) -> list[str]:
    """The command of a case's job, for all who run it; ``{out}`` in it is its directory.
    ``pace_s``: seconds that a step takes at least."""
    return [
        *(python, str(JOBS / "sized.py"), case.kind, "--size", str(case.size), "--out", "{out}"),
        *("--steps", "100000000", "--enough", "{out}/enough", "--threads", str(effort.threads)),
        *(("--pace", f"{pace_s:g}") if pace_s else ()),
    ]


@contextmanager
def serving(machine: LabHost) -> Iterator[subprocess.Popen[str]]:
    """A host that takes copies over TCP."""
    argv = ("python", str(SCRIPT), "serve", machine.address, str(PORT))
    with on_host(machine, argv) as server:
        assert line(server) == "listening"
        yield server


class Sandbox:
    """A pid namespace with its own /proc on a lab host, where CRIU finds its pids free."""

    def __init__(self, machine: LabHost, holder: subprocess.Popen[str]) -> None:
        self.machine = machine
        (init,) = psutil.Process(holder.pid).children()
        self.init = init.pid

    def enter(self, argv: Sequence[str]) -> list[str]:
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid")
        return ["nsenter", "--target", str(self.init), *spaces, "--", *argv]

    def path(self, path: Path) -> Path:
        """A path of the sandbox as this machine sees it."""
        return Path(f"/proc/{self.init}/root") / str(path).lstrip("/")

    @contextmanager
    def start(self, argv: Sequence[str], log: Path) -> Iterator[int]:
        """A program in the sandbox, nothing of ours open in it; its pid there."""
        shell = 'exec "$@" </dev/null >"$0" 2>&1'
        command = self.enter(["setsid", "sh", "-c", shell, str(log), *argv])
        with running(command) as entered:
            until = time.monotonic() + 10
            while not (found := psutil.Process(entered.pid).children()):
                assert time.monotonic() < until, f"{argv} did not start: {entered.poll()}"
                time.sleep(0.005)
            yield inner_pid(found[0].pid)

    def criu(self, criu: Criu, *options: str) -> float:
        """Run CRIU in the sandbox; returns the seconds that it took, fails with its last words."""
        began = time.monotonic()
        done = subprocess.run(
            self.enter(criu.command(*options)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        took = time.monotonic() - began
        assert done.returncode == 0, f"criu {options[0]}: {done.returncode}, {done.stderr[-500:]}"
        return took


@contextmanager
def sandbox(machine: LabHost, first_pid: int) -> Iterator[Sandbox]:
    """A sandbox for as long as this lasts; pids in it begin after ``first_pid``."""
    command = [
        *entry(machine, "--mount", "--uts", "--ipc", "--net"),
        *("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-c", _SANDBOX, "sh", str(first_pid)),
    ]
    with running(command) as holder:
        assert line(holder) == "ready"
        yield Sandbox(machine, holder)


def inner_pid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(each for each in lines if each.startswith("NSpid:")).split()[-1])


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())
