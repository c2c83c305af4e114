# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the device state of processes that change places between two GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from liveshift.errors import StepFailed, Unreachable
from liveshift.runtime.agent.gpu.device_state import DeviceLost, SavedDevices
from liveshift.runtime.model.stopwatch import Stopwatch

PAIRS = [("GPU-a", "GPU-b"), ("GPU-b", "GPU-a")]
NO_ROOM = StepFailed("gpu restore", "out of memory")
AWAY = Unreachable("the GPU helper does not answer")
STUCK = DeviceLost("gpu restore", "its CUDA state has failed")


@dataclass
class Driver:
    """Where the device state of each process is: old, off, new; what is made to fail, and how."""

    where: dict[int, str] = field(default_factory=lambda: {1001: "old", 1002: "old"})
    fails: dict[str, list[Exception | None]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def call(self, what: str) -> None:
        self.done.append(what)
        if self.fails.get(what):
            error = self.fails[what].pop(0)
            if error is not None:
                raise error


class Tree:
    """As DeviceTree, of one process."""

    def __init__(self, driver: Driver, pid: int) -> None:
        self.driver, self.pid, self.saved = driver, pid, list[SavedDevices]()

    def save(self, watch: Stopwatch) -> list[SavedDevices]:
        with watch.phase("gpu save", frozen=True):
            if self.pid not in self.driver.where:
                return []
            self.driver.call(f"save {self.pid}")
            self.driver.where[self.pid] = "off"
            self.saved.append(
                SavedDevices(self.pid, used={"GPU-a": 80}, sums={0x1000: 7}, samples=4)
            )
            return self.saved

    def bring_back(self, watch: Stopwatch, gpus: Sequence[tuple[str, str]] = ()) -> None:
        to = "new" if gpus else "old"
        with watch.phase("gpu restore", frozen=True):
            if self.pid not in self.driver.where:
                return
            self.driver.call(f"{to} {self.pid}")
            if self.driver.where[self.pid] == "off":
                self.driver.where[self.pid] = to
            self.driver.call(f"verify {to} {self.pid}")

    def drop(self) -> None:
        self.driver.done.append("drop")

    def off_gpus(self) -> bool:
        return self.driver.where[self.pid] == "off"
