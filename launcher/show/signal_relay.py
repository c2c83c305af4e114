# SPDX-License-Identifier: Apache-2.0
"""Passes SIGINT and SIGTERM that reach ``liveshift run`` on to its job."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ...errors import LiveshiftError, NotFound, Unreachable
from ...runtime.messages import SignalJob
from ..client.client import Client
from . import render

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
REQUEST_S = 10.0


class SignalRelay:
    """Catches signals and sends them to a job: SIGINT and SIGTERM as they are, the second SIGINT
    as SIGKILL. The third one leaves the job alone and raises KeyboardInterrupt.

    The signal handler calls ``wake`` with the signal. ``wake`` must not block.
    """

    def __init__(self, wake: Callable[[signal.Signals], None]) -> None:
        self._wake = wake
        self._arrived: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self._unsent: list[signal.Signals] = []
        self._interrupts = 0
        self._starting = True

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Inside the block SIGINT and SIGTERM do not end this program by themselves.

        A signal that this program was started to ignore stays ignored: a shell without job control
        starts a background command (``liveshift run … &``) so, and Ctrl-C is not meant for it.
        """
        heard = [n for n in PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def started(self) -> None:
        """The job exists: signals can be sent to it, also those that came before."""
        self._starting = False

    def send(self, client: Client, job: str) -> None:
        """Send what has arrived. Raises Unreachable; the next call then sends the rest.

        Raises KeyboardInterrupt for the third SIGINT.
        """
        while not self._arrived.empty():
            self._unsent.append(self._translated(self._arrived.get(), job))
        while self._unsent:
            number = self._unsent[0]
            try:
                client.request(SignalJob(job, number), REQUEST_S)
            except Unreachable:
                raise
            except NotFound:
                pass  # the job has ended
            except LiveshiftError as error:
                render.failure(f"{number.name} was not passed on to {job}: {error}", error.hint)
            self._unsent.pop(0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._starting and number == signal.SIGINT and not self._arrived.empty():
            raise KeyboardInterrupt  # the start hangs, and this is the second signal
        self._arrived.put(signal.Signals(number))
        self._wake(signal.Signals(number))

    def _translated(self, number: signal.Signals, job: str) -> signal.Signals:
        if number != signal.SIGINT:
            render.note(f"{job}: {number.name} passed on")
            return number
        self._interrupts += 1
        if self._interrupts == 1:
            render.note(f"{job}: SIGINT passed on; Ctrl-C once more kills it")
            return number
        if self._interrupts == 2:
            render.note(f"{job}: killing it (SIGKILL)")
            return signal.SIGKILL
        render.note(f"{job} is left to itself: `liveshift status {job}` shows it")
        raise KeyboardInterrupt
