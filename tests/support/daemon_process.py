# SPDX-License-Identifier: Apache-2.0
"""Real daemons on the loopback interface, with a state and a run directory of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from link_harness import free_address

from liveshift.runtime.control import keys
from liveshift.waiting import readable

CLUSTER = """
[cluster]
name = "daemons"
orchestrator = "{orchestrator}"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "127.0.0.1"
data_port = {data}
pages_port = {pages}
[paths]
state = "{top}/state"
run = "{top}/run"
keys = "{top}/keys"
"""


class Place:
    """A cluster file of one host and its keys; nothing runs yet, and no directory is there."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.state, self.run = top / "state", top / "run"
        self.config = top / "cluster.toml"
        self.orchestrator = free_address()
        self.data, self.pages = (int(free_address().rpartition(":")[2]) for _ in range(2))
        keys.init(top / "keys", ["h0"])
        names = {"orchestrator": self.orchestrator, "data": self.data, "pages": self.pages}
        self.config.write_text(CLUSTER.format(top=top, **names))

    def made(self) -> list[str]:
        """What lies in the state and the run directory."""
        tops = (self.state, self.run)
        return sorted(
            str(p.relative_to(self.top)) for t in tops for p in (t, *t.rglob("*")) if p.exists()
        )

    def command(self, daemon: str, *more: str) -> list[str]:
        config = str(self.config)
        return [sys.executable, "-m", "liveshift.launcher", daemon, "--config", config, *more]

    def fails(self, daemon: str, *more: str, code: int, under: tuple[str, ...] = ()) -> str:
        """Start a daemon that must not come up; what it said."""
        command = [*under, *self.command(daemon, *more)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    @contextmanager
    def runs(
        self, daemon: str, under: tuple[str, ...] = (), *more: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The daemon, from when it has said that it is ready; it is ended by SIGTERM. ``under``: a
        command that becomes it."""
        with ExitStack() as stack:
            ready = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            where = self.top / f"{daemon}.ready"
            ready.bind(str(where))
            stack.callback(where.unlink)
            env = {**os.environ, "NOTIFY_SOCKET": str(where)}
            process = stack.enter_context(
                subprocess.Popen(
                    [*under, *self.command(daemon, *more)], env=env, stderr=subprocess.PIPE
                )
            )
            try:
                assert readable(30, ready), f"{daemon} is not ready"
                assert ready.recv(100) == b"READY=1"
                yield process
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=20)


@contextmanager
def taken(address: str, port: int) -> Iterator[None]:
    """Somebody else listens there."""
    with socket.create_server((address, port)):
        yield
