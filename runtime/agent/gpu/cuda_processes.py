# SPDX-License-Identifier: Apache-2.0
"""The processes of a capsule that may hold device state; sessions with their service threads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ....criu_glue.capsule import sandboxes
from ....criu_glue.capsule.tree import tasks
from ....cuda_snapshot import threads
from ....cuda_snapshot.helper.client import GpuHelper
from ....cuda_snapshot.helper.session_client import DeviceSession
from ....errors import StepFailed
from ....interposer.layout import WantedState, text_of
from ....interposer.orders import OrderedPage
from ..host.running_capsule import RunningCapsule

SESSION_S = 20.0
"""A service thread must answer within this many seconds; it looks for orders at least once a
second."""


@dataclass
class CudaProcess:
    """A process that holds device state; ``pid`` is the one that the host sees."""

    pid: int
    inner: int
    page: OrderedPage | None  # None: it has no service thread

    def check_runs(self, step: str) -> None:
        """Raise StepFailed if a user has stopped the process: the driver waits until it goes on."""
        if threads.stopped(self.pid):
            raise StepFailed(
                step,
                f"process {self.inner} is stopped (SIGSTOP), and the driver waits until it goes on",
                hint="let it go on (SIGCONT), and try again",
            )


def has_cuda(resident: RunningCapsule) -> bool:
    """Whether a process of the capsule may have device state."""
    for task in tasks(resident.sandbox):
        with suppress(FileNotFoundError, ProcessLookupError):
            if maps_driver(task.pid):
                return True
    return False


def maps_driver(pid: int) -> bool:
    """Whether the driver's library is mapped; without it the driver does not know the process."""
    with open(f"/proc/{pid}/maps", "rb") as maps:
        return b"/libcuda.so" in maps.read()


def served(page: OrderedPage | None) -> OrderedPage | None:
    """The page, if a service thread looks at it: every process with device memory has one."""
    if page is None or not page.allocations():
        return None
    return page


@contextmanager
def device_session(
    helper: GpuHelper, resident: RunningCapsule, process: CudaProcess
) -> Iterator[DeviceSession]:
    """A session with the process's service thread, which serves nothing else meanwhile."""
    page = process.page
    assert page is not None
    directory = resident.sandbox.root / sandboxes.PAGES.lstrip("/")
    with helper.session(process.pid, directory, process.inner) as session:
        order = page.order()
        page.give(WantedState.DEVICES, order["attempt"], order["version"] + 1)
        session.wait(SESSION_S)
        yield session
    _await_served(page)


def _await_served(page: OrderedPage) -> None:
    """Wait until the service thread has ended the session; raises StepFailed with its message."""
    order, until = page.order(), time.monotonic() + SESSION_S
    asked = (order["attempt"], order["version"], WantedState.DEVICES)
    while True:
        answer = page.answer()
        if (answer["done_attempt"], answer["done_version"], answer["done_want"]) == asked:
            if code := answer["done_result"]:
                raise StepFailed("gpu", text_of(answer["message"]) or os.strerror(code))
            return
        if time.monotonic() > until:
            raise StepFailed("gpu", f"process {page.pid}: its service thread does not answer")
        time.sleep(0.001)
