# SPDX-License-Identifier: Apache-2.0
"""A server outside of a lab's cluster, to which a capsule may connect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lab_session import LabSession

from liveshift.launcher import lab as labs

PORT = 7777

_SERVER = f"""
import socket, sys
server = socket.create_server((sys.argv[1], {PORT})); print("ready", flush=True)
held, _ = server.accept()
print("met", flush=True); sys.stdin.read()
"""


@contextmanager
def outside_server(lab: LabSession) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server on the orchestrator's machine, which is no host. It keeps the first connection that
    it accepts. Gives its address, and a function that waits for this connection."""
    machine = lab.lab.machine("ctl")
    words = [*labs.entry(machine), sys.executable, "-c", _SERVER, machine.address]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        said = server.stdout

        def met() -> None:
            assert said.readline() == "met\n"

        try:
            assert said.readline() == "ready\n"
            yield machine.address, met
        finally:
            server.kill()  # it may be waiting for a connection yet
