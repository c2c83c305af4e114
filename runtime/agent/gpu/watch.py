# SPDX-License-Identifier: Apache-2.0
"""The agent's view of its host's GPUs, and its connection to the GPU helper.

The agent starts the helper if there is a driver. The client starts it again if it has ended. For
heartbeats the agent keeps the helper's last answer for a while; for plans and moves it asks again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .... import units
from ....errors import LiveshiftError
from ...messages import DeviceError, GpuHost, GpuSeat
from .device_errors import Address, DeviceErrors, address

if TYPE_CHECKING:
    from ....cuda_snapshot.helper.client import GpuHelper

log = logging.getLogger("liveshift.gpus")

LOOK_S = 2.0
"""For heartbeats the agent looks at the GPUs every LOOK_S seconds: a new user of a GPU may stay
unseen for this long."""
MISSING_S = 60.0
"""The agent tries every MISSING_S seconds to start a helper that did not start."""
ARENA = "LIVESHIFT_DEVICE_ARENA"
"""The interposer reads this variable: with it, cudaMalloc returns memory that can be taken away and
put back."""
OFF = "gpu.fast_path is off"
"""Why no memory is streamed if the cluster file turns that off."""
LIBCUDA = "libcuda.so.1"
SIGNS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))


class GpuWatch:
    """``directory``: the agent's run directory. ``libraries``: where the driver's libraries are, if
    the linker does not find them. ``fast_path`` False: the cluster file has turned it off."""

    def __init__(self, directory: Path, libraries: Path | None, fast_path: bool = True) -> None:
        self._directory = directory
        self._libraries = libraries
        self._fast_path = fast_path
        self._starting = threading.Lock()
        self._helper: GpuHelper | None = None
        self._last: GpuHost | None = None
        self._errors: DeviceErrors | None = None
        self._addresses: dict[Address, str] = {}
        self.why_none = "it has not been started yet"

    def present(self) -> bool:
        """Whether files show that there is a driver; without one nothing is started."""
        own = self._libraries is not None and (self._libraries / LIBCUDA).exists()
        return own or any(sign.exists() for sign in SIGNS)

    def helper(self) -> GpuHelper | None:
        """The connection to the helper, which is started if necessary; blocks. None if there can
        be none; ``why_none`` then says why."""
        with self._starting:
            if self._helper is None:
                self._helper = self._start()
            return self._helper

    def host(self, taken: Mapping[str, str]) -> GpuHost:
        """What the helper reports now; blocks. ``taken``: GPUs that moves under way have promised,
        uuid → the reason in words. Raises LiveshiftError."""
        helper = self.helper()
        if helper is None:
            return GpuHost("", (0, 0), False, False, self.why_none, [], {})
        seen = helper.host()
        busy = {
            gpu.uuid: f"is used by process {units.some(sorted(gpu.processes), 1)}"
            for gpu in seen.gpus
            if gpu.processes
        }
        self._last = GpuHost(
            driver=seen.driver,
            cuda=seen.cuda,
            can_remap=seen.can_remap,
            mps=any(gpu.mps for gpu in seen.gpus),
            fast_path=seen.fast_path if self._fast_path else OFF,
            gpus=list(seen.gpus),
            taken={**busy, **taken},
            why_none=seen.why_none or "",
        )
        return self._last

    def refresh(self) -> None:
        """Ask the helper for the state of the GPUs, for heartbeats; blocks, and raises nothing."""
        try:
            self.host({})
        except LiveshiftError as error:
            log.warning("%s", error)

    def environment(self) -> dict[str, str]:
        """Environment variables for a capsule that starts here, so that its device memory can be
        streamed when it moves; blocks."""
        if not (self._last and not self._last.fast_path):
            self.refresh()
        return {ARENA: "1"} if self._last and not self._last.fast_path else {}

    def seats(self, taken: Collection[str]) -> list[GpuSeat]:
        """The GPUs at the last look; ``taken``: uuids that moves under way have promised."""
        if self._last is None:
            return []
        return [
            GpuSeat(gpu.uuid, gpu.name, free=not gpu.processes and gpu.uuid not in taken)
            for gpu in self._last.gpus
        ]

    def used_by(self, pids: Collection[int]) -> dict[str, int]:
        """The GPUs on which any of these processes computed at the last look, and the bytes that
        they had there, as far as NVML reports that."""
        used = {}
        for gpu in self._last.gpus if self._last else ():
            processes = gpu.processes or {}
            if held := [processes[pid] or 0 for pid in pids if pid in processes]:
                used[gpu.uuid] = sum(held)
        return used

    def errors(self, seconds: float) -> list[DeviceError]:
        """The errors of this host's GPUs in the last so many seconds."""
        if self._last is None and self._errors is None:
            return []
        if self._errors is None:
            self._errors = DeviceErrors()
        for gpu in self._last.gpus if self._last else ():  # one that falls off the bus stays known
            if (where := address(gpu.pci_bus_id)) is not None:
                self._addresses[where] = gpu.uuid
        return self._errors.within(seconds, self._addresses)

    async def keep(self) -> None:
        """Look at the GPUs repeatedly, as long as the agent runs."""
        while True:
            missing = False
            if await asyncio.to_thread(self.present):
                try:
                    await asyncio.to_thread(self.host, {})
                except LiveshiftError as error:
                    log.warning("%s", error)
                    self._last = None  # so that heartbeats report no usable GPU
                missing = self._helper is None
            await asyncio.sleep(MISSING_S if missing else LOOK_S)

    def _start(self) -> GpuHelper | None:
        if not self.present():
            self.why_none = "no NVIDIA driver is installed"
            return None
        from ....cuda_snapshot.helper.client import GpuHelper

        try:
            return GpuHelper.start(self._directory, self._libraries)
        except LiveshiftError as error:
            if self.why_none != str(error):
                log.warning("no GPU can be used here: %s", error)
            self.why_none = str(error)
            return None
