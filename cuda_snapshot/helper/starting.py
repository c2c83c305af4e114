# SPDX-License-Identifier: Apache-2.0
"""Starts the GPU helper's process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from ...errors import LiveshiftError, Unreachable
from ..environment import environment
from ..lines import Lines
from .calls import LOG

START_S = 120.0
"""A helper must start within this many seconds: without persistence mode cuInit takes seconds for
each GPU."""


def launch(directory: Path, libraries: Path | None, idle_s: float) -> None:
    """Start the helper and wait until it listens; the caller has the lock file. If it can't start,
    raises LiveshiftError with the helper's own words."""
    command = [sys.executable, "-m", __package__, str(directory.absolute()), str(idle_s)]
    if libraries is not None:
        command.append(str(libraries.absolute()))
    with open(directory / LOG, "ab") as log:
        os.chmod(log.fileno(), 0o600)
        # In a session of its own the helper gets no signals of a terminal or of the agent's end.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(libraries),
            cwd="/",
            start_new_session=True,
        )
    threading.Thread(target=child.wait, daemon=True).start()  # so that it is reaped when it ends
    assert child.stdout is not None
    with child.stdout as pipe:
        line = Lines(pipe.fileno()).next(START_S)
    if line is None:
        # We do not kill it: it may be in the middle of the driver's initialisation.
        raise Unreachable(
            f"the GPU helper {child.pid} did not start within {START_S:g} s: a GPU or its driver"
            " hangs",
            hint=f"look at dmesg for NVRM messages, and at {directory / LOG}",
        )
    if not line:
        raise LiveshiftError(
            "the GPU helper ended before it could say why", hint=f"its log is {directory / LOG}"
        )
    if why := line.strip():
        raise LiveshiftError(f"the GPU helper can't start: {why}")
