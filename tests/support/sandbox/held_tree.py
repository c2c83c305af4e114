# SPDX-License-Identifier: Apache-2.0
"""Holds the processes of a stopped tree, as the GPU helper does with those that use CUDA."""

from __future__ import annotations

import os
import signal

from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.hold import Spared, ThreadHold


class HeldTree:
    """The holds of all its processes."""

    def __init__(self, holds: list[ThreadHold]) -> None:
        self._holds = holds

    @property
    def held(self) -> frozenset[int]:
        """The threads that are held now."""
        return frozenset[int]().union(*(hold.held for hold in self._holds))

    def lost(self) -> bool:
        """Whether one was killed meanwhile."""
        return any(hold.lost() for hold in self._holds)

    def spare_from_exit(self) -> None:
        for hold in self._holds:
            hold.spare_from_exit()

    def end(self) -> None:
        for hold in self._holds:
            hold.end()


def hold_tree(sandbox: Sandbox, spared: Spared) -> HeldTree:
    """All of it but the spared threads, which go on; it ends with this process."""
    holds = [ThreadHold(task.pid, spared, kill_on_exit=True) for task in tasks(sandbox)]
    for hold in holds:
        hold.begin(5)
    tree = HeldTree(holds)
    for task in tasks(sandbox):
        if not tree.held.issuperset(threads.of(task.pid)):
            os.kill(task.pid, signal.SIGCONT)
    return tree
