# SPDX-License-Identifier: Apache-2.0
"""Starts the resident helper, and waits until its own trial is over.

A helper that begins tries the fast path on a process of its own (cuda_snapshot/fast_path), and does
no other operation meanwhile: the first figure of a step would hold that time.
"""

from __future__ import annotations

import time

from liveshift.cuda_snapshot.fast_path.probe import PROBING
from liveshift.cuda_snapshot.helper.client import GpuHelper

from .step import Step

PROBE_S = 60.0


def settled_helper(step: Step) -> tuple[GpuHelper, str]:
    """Start a helper, and wait until its trial is over. Returns it and what it found: "" if the
    fast path is available, else why not."""
    helper = GpuHelper.start(step.work, step.machine.driver_folder)
    until = time.monotonic() + min(PROBE_S, step.left_s)
    while PROBING in (said := helper.host().fast_path) and time.monotonic() < until:
        time.sleep(0.1)
    step.figure("the product's probe", said or "the fast path is available")
    return helper, said
