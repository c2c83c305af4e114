# SPDX-License-Identifier: Apache-2.0
"""Holds the processes of a stopped tree, as the GPU helper does with those that use CUDA."""

from __future__ import annotations

import os
import signal

from liveshift.criu_glue.capsule.sandboxes import Sandbox
from liveshift.criu_glue.capsule.tree import tasks
from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.hold import Spared, ThreadHold


def hold_tree(sandbox: Sandbox, spared: Spared) -> ThreadHold:
    """All of it but the spared threads, which go on; it ends with this process."""
    hold = ThreadHold([task.pid for task in tasks(sandbox)], spared, kill_on_exit=True)
    hold.begin(5)
    for task in tasks(sandbox):
        if not hold.held.issuperset(threads.of(task.pid)):
            os.kill(task.pid, signal.SIGCONT)
    return hold
