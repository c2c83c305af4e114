# SPDX-License-Identifier: Apache-2.0
"""Named places in a migration at which a test can hold a daemon, to do harm exactly there.

Nothing happens unless ``$LIVESHIFT_FAULTPOINTS`` names a directory. A point is armed by a file
``<name>`` in it; the first daemon to come there renames it to ``<name>.reached`` and waits until
that is removed. Only what waits is held: beats and other asks go on.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

POINTS = (
    "orchestrator.prepared",  # surveyed, checked, an empty room at the destination; the job trains
    "orchestrator.precopied",  # directories are over; the job trains
    "source.locked",  # the network is locked; the tasks still run
    "source.dumped",  # the tree is held frozen, its image is on the wire
    "source.promised",  # the source gave up its right to go on by itself
    "orchestrator.frozen",  # the image is complete; not committed
    "orchestrator.committed",  # the journal names the destination
    "destination.restoring",  # before CRIU restores
    "destination.claiming",  # the tree is ready to run; the agent has not asked
    "destination.granted",  # it may run; its network is still locked
    "destination.running",  # it runs; the orchestrator has not heard
    "orchestrator.resumed",  # it was seen to run; the frozen copy is still there
    "source.finishing",  # the frozen copy is about to be taken away
)
"""In the order in which a migration comes by."""

GPU_POINTS = (
    "source.devices_saved",  # device state has left the GPUs; the tasks still run, without CUDA
    "destination.devices_back",  # device state is on GPUs again; no task has run
    "swap.saved",  # between two GPUs of a host: a process's device state is on none of them
    "swap.brought",  # … is on the other one, and the process goes on
)
"""What only a capsule with CUDA processes comes by."""

POLL_S = 0.002


def reach(name: str) -> None:
    """Come by a point in a thread."""
    held = _held(name)
    while held is not None and held.exists():
        time.sleep(POLL_S)


async def reached(name: str) -> None:
    """Come by a point in the event loop, which goes on."""
    held = _held(name)
    while held is not None and held.exists():
        await asyncio.sleep(POLL_S)


def _held(name: str) -> Path | None:
    """The file whose removal is to be waited for; None when nobody has armed this point."""
    assert name in POINTS + GPU_POINTS, f"{name} is no fault point"
    directory = os.environ.get("LIVESHIFT_FAULTPOINTS")
    if not directory:
        return None
    held = Path(directory) / f"{name}.reached"
    try:
        os.rename(Path(directory) / name, held)
    except FileNotFoundError:
        return None
    return held
