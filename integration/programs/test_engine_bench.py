# SPDX-License-Identifier: Apache-2.0
"""The data path by itself, with one thread at each end and with two. How fast it is is for
``make bench-engine``."""

from __future__ import annotations

import pytest
from engine_bench.source import measure

SIZE = 128 << 20


@pytest.mark.root
@pytest.mark.parametrize("threads", [1, 2])
def test_all_memory_goes_over_by_so_many_threads(threads: int) -> None:
    seen = measure(SIZE, threads, ready=True)
    assert seen.gb * 1e9 > SIZE
    assert (seen.read_by, seen.stored_by) == (threads, threads)
    assert seen.cpu_s_per_gb_source > 0.05
    assert seen.cpu_s_per_gb_destination > 0.05
