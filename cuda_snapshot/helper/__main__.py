# SPDX-License-Identifier: Apache-2.0
"""The helper process: ``python -m liveshift.cuda_snapshot.helper DIRECTORY IDLE_S [LIBRARIES]``.

starting.py starts it with a pipe as its standard output. The helper writes one line to the pipe: an
empty one when it listens, or the reason why it can't. It runs in a session and a process group of
its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import threading
from pathlib import Path

from ...errors import LiveshiftError
from ..checkpoint import CheckpointApi
from ..cuda import Cuda
from ..devices import Nvml
from ..fast_path.probe import FastPath
from .calls import LOG
from .operations import Operations
from .server import Server
from .service import Service

OUT_OF_MEMORY_SCORE = -900
"""The OOM killer must spare the helper: killed in the middle of an operation, it would also cost
the process that it works on."""

PATIENCE_S = 3600.0
"""The trial of the fast path waits at most this many seconds for its turn, since moves go first."""


def main(directory: Path, idle_s: float, libraries: Path | None) -> int:
    """Serve until there is nothing more to do; returns the exit status."""
    said = sys.stdout.fileno()
    with contextlib.suppress(OSError):  # without CAP_SYS_RESOURCE
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))
    # The helper needs one descriptor for each block of device memory that it holds.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    nvml = Nvml(libraries)
    try:
        operations, fast_path = Operations(CheckpointApi(), nvml), FastPath(directory, libraries)
        service = Service(operations, fast_path, Cuda())
        server = Server(directory, service.answer, service.why_stay, idle_s)
    except (LiveshiftError, OSError) as error:
        hint = getattr(error, "hint", None)
        os.write(said, f"{error}{f' ({hint})' if hint else ''}\n".encode())
        return 1
    os.write(said, b"\n")
    _log_to(directory / LOG)
    turn = operations.turn("trying the fast path", PATIENCE_S)
    threading.Thread(target=fast_path.find_out, args=(nvml, turn), daemon=True).start()
    server.serve()
    nvml.close()
    return 0


def _log_to(path: Path) -> None:
    """Write the log to a file, and standard output and error too: the driver's library may print
    messages there."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {os.getpid()} %(levelname)s %(message)s",
        stream=sys.stderr,
    )


if __name__ == "__main__":
    folder, seconds, *more = sys.argv[1:]
    status = main(Path(folder), float(seconds), Path(more[0]) if more else None)
    logging.shutdown()
    os._exit(status)  # threads may still wait for clients, and the driver's exit may hang
