# SPDX-License-Identifier: Apache-2.0
"""How the destination brings a capsule up and lets it run: its tree and its CUDA processes.

Device state comes back before the tree runs: CRIU leaves the tasks stopped then, and the GPU helper
holds the CUDA processes while their state returns to the GPUs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ....criu_glue.criu.restore import RestoringTree
from ....cuda_snapshot.assignment import Pairs
from ....errors import LiveshiftError, StepFailed
from ...model.manifest import Manifest
from ...model.stopwatch import Stopwatch
from ..gpu.device_memory import TABLE, decode
from ..gpu.devices import DeviceTree, FindDevices
from ..host.running_capsule import RunningCapsule


class RestoredCapsule:
    """A capsule that is being restored. Every method blocks.

    ``gpus``: the GPU on this host for each GPU of the source. ``find_devices`` finds the CUDA
    processes of a migration that an earlier agent began, once they are needed.
    """

    def __init__(
        self,
        resident: RunningCapsule,
        images: Path,
        devices: DeviceTree | None,
        gpus: Pairs,
        find_devices: FindDevices,
    ) -> None:
        self.tree = RestoringTree(resident.sandbox, images)
        self._images = images
        self._devices = devices
        self._gpus = gpus
        self._find_devices = find_devices

    def saved_devices(self, manifest: Manifest) -> DeviceTree | None:
        """The CUDA processes whose device state came with the image, None if none came. Raises
        StepFailed if some came, but there is no GPU helper: none of the processes may go on."""
        if TABLE not in manifest.streams:
            return None
        self._devices = self._devices or self._find_devices()
        if self._devices is None:
            raise StepFailed(
                "restore",
                "the image has device state, and the GPU helper of this host can't be reached",
                hint="its log is gpu-helper.log in the run directory",
            )
        self._devices.saved = decode((self._images / TABLE).read_bytes())
        return self._devices if self._devices.saved else None

    def bring_devices(self, devices: DeviceTree, watch: Stopwatch, deadline_s: float) -> None:
        """Put the device state of a stopped tree onto the GPUs. After an error no task is left."""
        try:
            self.tree.stop_at_door(deadline_s)
            devices.arrive(watch, self._gpus)
        except BaseException:
            self.drop()
            raise

    def let_go(self, manifest: Manifest, deadline_s: float) -> None:
        """Open the network and let the tree go on."""
        if (devices := self.saved_devices(manifest)) is not None:
            self.tree.let_run_held(devices)
            devices.continue_parents()
        else:
            self.tree.let_run(deadline_s)

    def finish_letting_go(self, manifest: Manifest, deadline_s: float) -> None:
        """Do the rest of :meth:`let_go`, which an earlier agent has begun."""
        resumed = self.tree.resumed()
        if (devices := self.saved_devices(manifest)) is not None:
            devices.recover_held(some=resumed)
            if resumed:
                devices.continue_parents()
                devices.end()
        if not resumed:
            self.let_go(manifest, deadline_s)

    def drop(self) -> None:
        """End a restored tree that may not run; sandbox and image stay."""
        self.tree.drop()
        if self._devices is not None:
            with contextlib.suppress(LiveshiftError):  # the helper notices the end by itself
                self._devices.end()

    def drop_devices(self) -> None:
        """Let the GPU helper drop the device memory that came."""
        if self._devices is not None or self._gpus:
            self._devices = self._devices or self._find_devices()
        if self._devices is not None:
            self._devices.drop()
