# SPDX-License-Identifier: Apache-2.0
"""Does to a process of its own (rank.py) what a move does on the fast path: ``python -m … UUID``.

It writes the line "rank PID", a line "step WORDS" before each step, and last "works", "fails WHY"
(the next trial will fail, too) or "unable WHY" (the trial could not be made now). Killing a process
in the middle of a driver call leaves the driver in a bad state, so the helper never kills this one.

The order is that of a move (runtime/agent/gpu/devices.py). Threads are held while none of them is
inside a CUDA call, and released, stopped, once the process is checkpointed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from ...errors import LiveshiftError
from .. import threads
from ..checkpoint import CheckpointApi, CudaState
from ..driver import CudaError, CUresult
from ..hold import ThreadHold, spared_threads
from ..whereabouts import Whereabouts
from . import rank
from .memory import FastPathMemory

LOCK_MS = 10_000
HOLD_S = 10.0
MOST_WORDS = 400
HELD = "with its threads held"
"""The names of some steps end in these words. If such a step fails, this host can have no device
sessions on either path."""
OUTSIDE_S = 10.0
"""At most so many seconds pass until the first thread is held while it sleeps."""
SLEEPS = (35, 230)
"""The system calls nanosleep and clock_nanosleep of x86-64."""


class Unable(LiveshiftError):
    """The trial could not be made."""


def say(text: str) -> None:
    """Write a line. If no process reads any more, the trial still goes on to its end."""
    with contextlib.suppress(OSError):
        os.write(1, (" ".join(text.split())[:MOST_WORDS] + "\n").encode())


def main(uuid: str, lock_ms: int) -> None:
    """Make the trial and write its result."""
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
    pid, hold = child.pid, ThreadHold(child.pid)
    try:
        begin("starting with CUDA")
        driver, memory = CheckpointApi(), FastPathMemory(uuid)
        if not ours.recv(16):
            raise Unable(_last_words(child))
        restore_thread = driver.restore_thread(pid)
        hold = ThreadHold(pid, lambda pid: spared_threads(pid, restore_thread))
        begin("hold")
        _hold_outside(hold, pid)
        begin(f"lock for its work to end {HELD}")
        driver.lock(pid, lock_ms)
        driver.unlock(pid)
        begin(f"giving memory away {HELD}")
        ours.sendall(b"give")
        word, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
        if not word:
            raise LiveshiftError(_last_words(child))
        # Driver 580 does not export imported memory again: it goes back by the same descriptor.
        handle = memory.cuda.import_descriptor(descriptors[0])
        begin(f"lock {HELD}")
        driver.lock(pid, lock_ms)
        begin("checkpoint")
        driver.checkpoint(pid)
        # The restore thread answers this, so it is asked while that thread still runs.
        if driver.state(pid) is not CudaState.CHECKPOINTED:
            raise LiveshiftError("the driver does not report the process as checkpointed")
        begin("stop")
        threads.stop(pid, HOLD_S)
        hold.end()
        begin("reading given memory")
        here = memory.reserve()
        memory.map(here, handle)
        if not memory.holds(here, rank.GIVEN):
            raise LiveshiftError("memory that was given away has lost its content")
        begin("restore")
        hold.begin(HOLD_S)
        os.kill(pid, signal.SIGCONT)
        driver.restore(pid)
        begin("unlock")
        driver.unlock(pid)
        begin("taking memory back")
        ours.sendall(b"take")
        _hear(ours, child, b"ready")
        socket.send_fds(ours, [b"back"], descriptors)
        os.close(descriptors[0])
        _hear(ours, child, b"right")
        begin("going on")
        hold.end()
        ours.sendall(b"go on")
        _hear(ours, child, b"right")
        say("works")
    except Unable as error:
        say(f"unable {_tried(step)}: {error}")
    except CudaError as error:
        now = error.result in (CUresult.OUT_OF_MEMORY, CUresult.DEVICE_UNAVAILABLE)
        say(f"unable {_tried(step)}: {error}" if now else f"fails {step}: {error}")
    except (LiveshiftError, OSError) as error:
        say(f"fails {step}: {error}")
    finally:
        child.kill()
        hold.end()
        child.wait()


def _tried(step: str) -> str:
    """The name of a step that could not be tried, without HELD: it says nothing about sessions."""
    return step.removesuffix(f" {HELD}")


def _hear(peer: socket.socket, child: subprocess.Popen[bytes], expected: bytes) -> None:
    """Receive a word from the rank. Raises LiveshiftError if it is not the expected one."""
    word = peer.recv(16)
    if not word:
        raise LiveshiftError(_last_words(child))
    if word != expected:
        raise LiveshiftError("memory holds other bytes than before")


def _hold_outside(hold: ThreadHold, pid: int) -> None:
    """Hold the process while its first thread sleeps between two calls of CUDA: it must not be held
    inside the driver, or while it runs Python code."""
    where, until = Whereabouts(pid), time.monotonic() + OUTSIDE_S
    while time.monotonic() < until:
        hold.begin(HOLD_S)
        if threads.system_call(pid) in SLEEPS and not where.inside(hold.held):
            return
        hold.end()
        time.sleep(0.001)
    raise LiveshiftError("its first thread was never seen outside of the driver")


def _last_words(child: subprocess.Popen[bytes]) -> str:
    _, said = child.communicate()
    lines = said.decode(errors="replace").strip().splitlines()
    return f"the process ended with {child.returncode}: {lines[-1] if lines else ''}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    main(sys.argv[1], int(sys.argv[2]))
