# SPDX-License-Identifier: Apache-2.0
"""Lab hosts that liveshift does not run, and programs on them that die with the host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bare_labs import without_daemons
from host_programs import running
from whereabouts import GONE, every_pid, spaces

from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab

CONTROL = "ctl"
"""The machine that is never killed: a store and a lighthouse run there."""


@contextmanager
def plain_lab(name: str, hosts: int) -> Iterator[Lab]:
    lab = without_daemons(name, hosts)
    try:
        yield lab
    finally:
        labs.down(name)


class Programs:
    """Programs on the hosts of a lab, until ``cleanup`` ends; each says what it has to say into
    a file of ``logs``."""

    def __init__(self, lab: Lab, logs: Path, cleanup: ExitStack) -> None:
        self.lab = lab
        self._logs = logs
        self._cleanup = cleanup
        self._count = 0
        self._files: list[Path] = []

    def start(self, host: str, argv: Sequence[str], **variables: str) -> None:
        """In the host's own pid namespace, so that it ends with the host."""
        self._count += 1
        log = self._logs / f"{self._count}-{host}.log"
        self._files.append(log)
        given = [f"{key}={value}" for key, value in variables.items()]
        command = [*labs.entry(self.lab.machine(host)), "env", *given, *argv]
        self._cleanup.enter_context(running(command, log))

    def trains(self, host: str, script: str) -> int:
        """The pid of the only process on the host that runs this script itself, on this machine."""
        init = self.lab.machine(host).init
        assert init is not None
        space = os.stat(f"/proc/{init.pid}/ns/pid").st_ino
        found = []
        for pid in every_pid():
            with suppress(*GONE):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                # torchrun's own words come before the script's.
                if os.fsencode(script) in words[1:3] and space in spaces(pid):
                    found.append(pid)
        (pid,) = found
        return pid

    def said(self) -> str:
        """The ends of what they have said."""
        found = []
        for log in self._files:
            lines = log.read_text(errors="replace").splitlines()[-12:] if log.exists() else []
            found += [f"--- {log.name}", *lines]
        return "\n".join(found)
