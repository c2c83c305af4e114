# SPDX-License-Identifier: Apache-2.0
"""Fault points: named places in a migration or a snapshot, where a test can hold a daemon and harm
it.

Nothing happens unless ``$LIVESHIFT_FAULTPOINTS`` names a directory. A file ``<name>`` in it arms a
point. The first daemon that reaches the point renames the file to ``<name>.reached`` and waits
until that file is removed. Only the code at the point waits: heartbeats and other requests go on.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

POINTS = (
    "orchestrator.prepared",  # surveyed, checked; the destination has an empty sandbox
    "orchestrator.precopied",  # the directories are sent; the job trains
    "source.locked",  # the network is locked; the tasks still run
    "source.dumped",  # the tree is held frozen, its image is on the wire
    "source.promised",  # the source gave up its right to go on by itself
    "orchestrator.frozen",  # the image is complete; not committed
    "orchestrator.committed",  # the journal names the destination
    "destination.restoring",  # before CRIU restores
    "destination.claiming",  # the tree is ready to run; the agent has not asked
    "destination.granted",  # the tree may run; its network is still locked
    "destination.running",  # the tree runs; the orchestrator does not know yet
    "orchestrator.resumed",  # the orchestrator saw it run; the frozen copy still exists
    "source.finishing",  # the source is about to remove the frozen copy
)
"""The fault points of each migration, in the order in which it reaches them."""

GPU_POINTS = (
    "source.devices_saved",  # device state has left the GPUs; the tasks still run, without CUDA
    "destination.devices_back",  # device state is on GPUs again; no task has run
    "swap.saved",  # between two GPUs of a host: neither holds a process's device state
    "swap.brought",  # the new GPU holds that process's device state, and the process goes on
)
"""The fault points that only a capsule with CUDA processes reaches."""

SNAPSHOT_POINTS = (
    "snapshot.locked",  # at a source: the network is locked; the tasks still run
    "snapshot.dumped",  # at a source: the tree is held frozen, CRIU's image is on the wire
    "snapshot.complete",  # the journal names the new generation; holders have the earlier one too
    "rewind.committed",  # the journal has the rewind; the earlier copies are still there
    "rewind.ended",  # at a host: its earlier copy is gone; the orchestrator does not know yet
    "rewind.forwarded",  # at a holder: the target has the whole image, and has not restored it
)
"""The fault points of a snapshot and of a rewind. No migration reaches them."""

POLL_S = 0.002


def reach(name: str) -> None:
    """Reach a fault point in a thread, and wait there if it is armed."""
    held = _held(name)
    while held is not None and held.exists():
        time.sleep(POLL_S)


async def reached(name: str) -> None:
    """Reach a fault point in a coroutine, and wait there if it is armed. Other tasks go on."""
    held = _held(name)
    while held is not None and held.exists():
        await asyncio.sleep(POLL_S)


def _held(name: str) -> Path | None:
    """The file whose removal ends the wait; None if no test has armed this point."""
    assert name in POINTS + GPU_POINTS + SNAPSHOT_POINTS, f"{name} is not a fault point"
    directory = os.environ.get("LIVESHIFT_FAULTPOINTS")
    if not directory:
        return None
    held = Path(directory) / f"{name}.reached"
    try:
        os.rename(Path(directory) / name, held)
    except FileNotFoundError:
        return None
    return held
