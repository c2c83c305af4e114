# SPDX-License-Identifier: Apache-2.0
"""How the source stops a capsule and lets it go again: its CUDA processes, its network, its tree.

A freeze takes the device state off the GPUs, locks the network, and dumps the tree with CRIU. A
thaw undoes this in the other order of tree and network: tasks go on, then the network opens that
they expect, then the device state comes back.
"""

from __future__ import annotations

from pathlib import Path

from ....criu_glue.capsule import sandboxes
from ....criu_glue.criu.dump import FrozenTree
from ....criu_glue.network import network_lock
from ....errors import LiveshiftError, Unreachable
from ...model.stopwatch import Stopwatch
from ..gpu.cuda_processes import has_cuda
from ..gpu.device_state import DeviceLost
from ..gpu.devices import DeviceTree, FindDevices
from ..host.running_capsule import ROOT_PID, RunningCapsule


class FrozenCapsule:
    """A capsule that is about to be frozen, or is frozen. Every method blocks.

    ``images``: the directory for CRIU's hooks. ``devices``: the capsule's CUDA processes, if any.
    """

    def __init__(
        self,
        resident: RunningCapsule,
        images: Path,
        devices: DeviceTree | None,
        find_devices: FindDevices,
    ) -> None:
        self.tree = FrozenTree(resident.sandbox, ROOT_PID, images)
        self.devices = devices
        self._find_devices = find_devices
        self._resident = resident
        self._locked = False
        self._recovered = False
        self._removed = False

    def take_up(self) -> None:
        """Go on with a capsule that an earlier agent was freezing or held frozen."""
        self.tree.take_up()
        self._locked = self._recovered = self._resident.still = True

    def lock(self) -> None:
        network_lock.lock(self._resident.sandbox.init)
        self._locked = True

    def thaw(self) -> None:
        """Let the capsule go on here: its tree, then its device state. May be called again, also
        after an error."""
        self.thaw_tree()
        self._bring_devices_back()

    def thaw_tree(self) -> None:
        """Let the tree go on here: tasks first, then the network they expect. May be called again,
        also after an error."""
        alive = self._resident.sandbox.alive
        try:
            self.tree.thaw()
        finally:
            if self._locked and alive():
                self._unlock()
            self._locked = False
        self._resident.still = False

    def remove(self) -> None:
        """End the held copy, and remove its sandbox and network. May be called again after an
        error: what has gone is not removed twice, as the capsule may be back under its names."""
        resident = self._resident
        if not self._removed:
            resident.leaving = True
            resident.unplug()
            resident.remove()
            self.tree.release()
            self._removed = True
        self.devices = self.devices or self._find_devices()
        if self.devices is not None:
            self.devices.drop()

    def _unlock(self) -> None:
        try:
            network_lock.unlock(self._resident.sandbox.init)
        except LiveshiftError:
            if not self._recovered:  # else the earlier agent may have ended before it locked
                raise

    def _bring_devices_back(self) -> None:
        name = self._resident.spec.name
        devices = self.devices = self.devices or self._find_devices()
        alive = self._resident.sandbox.alive()
        if devices is None:
            if alive and has_cuda(self._resident):
                raise Unreachable(
                    f"the GPU helper, which has the device state of {name}, can't be reached",
                    hint="its log is gpu-helper.log in the run directory",
                )
            return
        if not alive:
            devices.drop()
            return
        try:
            devices.bring_back(Stopwatch())
        except DeviceLost as lost:  # it would hang at its next CUDA call, and so would its job
            sandboxes.end(self._resident.sandbox)
            raise DeviceLost("gpu restore", f"{lost.message}; so it was ended") from lost
