# SPDX-License-Identifier: Apache-2.0
"""Does to an expendable process what a move on the fast path does: ``python -m … UUID``.

It writes a line before each step, "rank PID" and "step WORDS", and last "works", "fails WHY" (so
will the next trial) or "unable WHY" (it could not be tried now). Killing who calls the driver in
mid-operation puts the driver at odds, so nobody kills this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

from ...errors import LiveshiftError
from ..checkpoint import Checkpoint, ProcessState
from ..driver import CudaError, CUresult
from . import rank
from .memory import Memory

LOCK_MS = 20_000
MOST_WORDS = 400


class Unable(LiveshiftError):
    """The trial could not be made."""


def say(text: str) -> None:
    """Whoever listened may have gone; the trial ends in order all the same."""
    with contextlib.suppress(OSError):
        os.write(1, (" ".join(text.split())[:MOST_WORDS] + "\n").encode())


def main(uuid: str) -> None:
    """Says how it went, whatever that is."""
    step = "starting"

    def begin(words: str) -> None:
        nonlocal step
        step = words
        say(f"step {words}")

    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-m", rank.__spec__.name, uuid, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    say(f"rank {child.pid}")
    try:
        begin("giving memory away")
        driver, memory = Checkpoint(), Memory(uuid)
        word, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
        if not word:
            raise Unable(_last_words(child))
        handle = memory.imported(descriptors[0])
        os.close(descriptors[0])
        begin("lock")
        driver.lock(child.pid, LOCK_MS)
        begin("checkpoint")
        driver.checkpoint(child.pid)
        if driver.state(child.pid) is not ProcessState.CHECKPOINTED:
            raise LiveshiftError("the process is not checkpointed then")
        begin("reading given memory")
        here = memory.reserve()
        memory.map(here, handle)
        if not memory.holds(here, rank.GIVEN):
            raise LiveshiftError("memory that was given away has lost its content")
        begin("restore")
        driver.restore(child.pid)
        begin("unlock")
        driver.unlock(child.pid)
        begin("taking memory back")
        descriptor = memory.exported(handle)
        socket.send_fds(ours, [b"back"], [descriptor])
        os.close(descriptor)
        word = ours.recv(16)
        if not word:
            raise LiveshiftError(_last_words(child))
        if word != b"right":
            raise LiveshiftError("memory holds other bytes than before")
        say("works")
    except Unable as error:
        say(f"unable {step}: {error}")
    except CudaError as error:
        now = error.result in (CUresult.OUT_OF_MEMORY, CUresult.DEVICE_UNAVAILABLE)
        say(f"{'unable' if now else 'fails'} {step}: {error}")
    except (LiveshiftError, OSError) as error:
        say(f"fails {step}: {error}")
    finally:
        child.kill()
        child.wait()


def _last_words(child: subprocess.Popen[bytes]) -> str:
    _, said = child.communicate()
    lines = said.decode(errors="replace").strip().splitlines()
    return f"the process ended with {child.returncode}: {lines[-1] if lines else ''}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    main(sys.argv[1])
