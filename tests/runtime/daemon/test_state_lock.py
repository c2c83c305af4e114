# SPDX-License-Identifier: Apache-2.0
"""The lock of a state directory holds, and says who has it, where it can."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from liveshift.errors import Refused
from liveshift.runtime.daemon import state_lock


@contextmanager
def no_space() -> Iterator[None]:
    """The kernel writes no byte to any file of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused(state: Path) -> str:
    with pytest.raises(Refused) as caught, state_lock.held(state, "agent"):
        raise AssertionError("held twice")
    return str(caught.value)


def test_it_names_its_holder(tmp_path: Path) -> None:
    with state_lock.held(tmp_path, "agent"):
        assert refused(tmp_path).endswith(f"pid {os.getpid()}")
    assert list(tmp_path.iterdir()) == []


def test_it_holds_where_no_pid_can_be_written(tmp_path: Path) -> None:
    """A full disk keeps no agent down: frozen copies wait for it."""
    (tmp_path / "agent.lock").write_text("4711\n")  # of one that was killed
    with no_space(), state_lock.held(tmp_path, "agent"):
        assert refused(tmp_path).endswith("pid unknown")
    assert list(tmp_path.iterdir()) == []
