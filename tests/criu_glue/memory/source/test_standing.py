# SPDX-License-Identifier: Apache-2.0
"""Only a tree that CRIU has stopped stands; with CRIU this is test_page_filter.py."""

from __future__ import annotations

import time

import pytest
from memory_subject import state, subject
from waits import until

from liveshift import ptrace
from liveshift.criu_glue.memory.source.standing import wait_stopped


@pytest.mark.root
def test_what_somebody_else_has_stopped_does_not_stand() -> None:
    """A profiler lets it go on a moment later."""
    with subject() as job:
        ptrace.seize(job.pid)
        ptrace.interrupt(job.pid)
        until(lambda: state(job.pid) == "t")
        with pytest.raises(TimeoutError, match=rf"thread {job.pid} .* was not stopped"):
            wait_stopped(lambda: [job.pid], time.monotonic() + 0.1)
        ptrace.detach(job.pid)


@pytest.mark.root
def test_what_has_ended_does() -> None:
    with subject() as job:
        job.do("child = os.fork() or os._exit(0)")
        child = job.number("child")
        until(lambda: state(child) == "Z")
        wait_stopped(lambda: [child], time.monotonic() + 1)
