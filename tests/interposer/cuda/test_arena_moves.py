# SPDX-License-Identifier: Apache-2.0
"""A process that allocates all the time, its memory taken and given back by the real helper."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_process import GPUS, Built, Holder
from gpu_helper import end_helper

from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.errors import LiveshiftError
from liveshift.interposer.layout import MemoryKind, WantedState

MIB = 1 << 20
PATIENCE_S = 60
BOTH = [gpu.split(":")[0] for gpu in GPUS.split(",")]


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuHelper]:
    monkeypatch.setenv("SIMCUDA_DEVICES", GPUS)
    with GpuHelper.start(tmp_path, Built("plain").doubles.folder) as client:
        yield client
        with contextlib.suppress(LiveshiftError):
            end_helper(client)


def test_a_busy_process_swaps_gpus_again_and_again(helper: GpuHelper, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    holder = Holder(Built("plain"), pages)
    pid, key = holder.pid, f"swap/{holder.pid}"
    still = holder("malloc", 6 * MIB)
    assert holder("put", still, 6 * MIB, 5) == 0
    assert holder("churn") == 0
    for _ in range(4):
        before = holder("rounds")
        while holder("rounds") < before + 8:
            pass
        helper.hold(pid, outside_s=PATIENCE_S)
        with helper.session(pid, pages, pid) as session:
            holder.order(WantedState.DEVICES)
            session.wait(PATIENCE_S)
            sums = session.checksums(0)
            gone = session.give_up(key)
        assert still in {block.address for block in gone}
        assert {block.kind for block in gone} == {MemoryKind.ARENA}
        assert helper.held()[key] == sum(block.size for block in gone)
        helper.lock(pid, PATIENCE_S)
        helper.checkpoint(pid)
        threads.stop(pid, PATIENCE_S)
        helper.release(pid)
        helper.hold(pid)
        os.kill(pid, signal.SIGCONT)
        helper.restore(pid, [(BOTH[0], BOTH[1]), (BOTH[1], BOTH[0])])
        helper.unlock(pid)
        with helper.session(pid, pages, pid) as session:
            holder.order(WantedState.DEVICES)
            session.wait(PATIENCE_S)
            session.take_back(key)
            now = session.checksums(0)  # a thread may have been about to tell of one more
            assert {address: now.get(address) for address in sums} == sums
        assert key not in helper.held()
        helper.release(pid)
    assert holder("rest") > 0
    assert holder("same", still, 6 * MIB, 5) == 0
    assert holder("free", still) == 0
    assert holder.rows() == []
    assert holder.end() == ""
