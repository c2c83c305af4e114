# SPDX-License-Identifier: Apache-2.0
"""The order of a capsule's processes."""

from __future__ import annotations

import os
import signal
import subprocess

from liveshift.criu_glue.capsule.tree import children_first


def test_children_come_before_their_parents() -> None:
    script = "sleep 600 >/dev/null & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        gone = 2**22 + 1  # above the kernel's largest
        for pids in ([parent.pid, child, gone], [gone, child, parent.pid]):
            assert children_first(pids) == [child, parent.pid, gone]
        os.kill(child, signal.SIGKILL)
