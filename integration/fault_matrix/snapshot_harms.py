# SPDX-License-Identifier: Apache-2.0
"""Harm that only a job with snapshots meets; all other harm is that of faults.py."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from liveshift.criu_glue.memory.store.store import PAGES_FILE

from .faults import Fault, Who
from .snapshot_scene import SnapshotScene

PAGE = 4096


def rank_killed() -> Fault[SnapshotScene]:
    """All processes of the rank, by SIGKILL; its sandbox stays."""

    @contextmanager
    def fault(scene: SnapshotScene) -> Iterator[None]:
        scene.kill_rank()
        yield

    return fault


def image_flipped(hosts: Sequence[Who[SnapshotScene]]) -> Fault[SnapshotScene]:
    """A bit of each page that these hosts keep of the capsule: which pages only its newest snapshot
    has, only the store knows."""

    @contextmanager
    def fault(scene: SnapshotScene) -> Iterator[None]:
        for who in hosts:
            init = scene.lab.machine(who(scene)).init
            assert init is not None
            held = Path(f"/proc/{init.pid}/root/run/liveshift/images/held")
            count = _flip(held / scene.capsule.replace("/", ".") / PAGES_FILE)
            assert count > 0, f"{who(scene)} has no page of {scene.capsule}"
        yield

    return fault


def _flip(path: Path) -> int:
    """Flip a bit in each page of a sparse file that has memory; how many pages these are."""
    count, at = 0, 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        while at < len(pages):
            try:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole follows
                break
            at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            for page in range(begin, at, PAGE):
                pages[page + count % PAGE] ^= 1
                count += 1
    return count
