# SPDX-License-Identifier: Apache-2.0
"""How long a holder may be silent in a pause, from what the snapshots before have shown."""

from __future__ import annotations

import pytest

from liveshift.runtime.agent.departure.paused_silence import PausedSilence
from liveshift.runtime.wire import CHUNK


def test_a_holder_that_is_always_slow_does_not_end_each_snapshot() -> None:
    """It gets twice the time after each one that it has ended, and then the time that it needs; but
    no more than the wire has patience. A fast snapshot lowers that only by and by."""
    silence = PausedSilence()
    seconds = [silence.seconds]
    for longest, broken in ((0.0, True), (0.2, True), (3.0, False), (2.0, False), (0.1, False)):
        silence.learn(longest, broken=broken, most=10.0)
        seconds.append(silence.seconds)
    assert seconds == pytest.approx([1.0, 2.0, 4.0, 6.0, 4.8, 3.84])
    for _ in range(10):
        silence.learn(0.1, broken=False, most=10.0)
    assert silence.seconds == 1.0
    for longest, broken in ((7.0, False), (0.0, True)):
        silence.learn(longest, broken=broken, most=10.0)
        assert silence.seconds == 10.0


@pytest.mark.parametrize(("rate", "limit"), [(0.0, 1.0), (CHUNK / 0.5, 3.5), (CHUNK * 1000, 1.005)])
def test_a_slow_link_gets_the_time_of_a_chunk_on_each_lane(rate: float, limit: float) -> None:
    silence = PausedSilence()
    assert silence.limit(rate, 5) == pytest.approx(limit)
    silence.learn(0.0, broken=True, most=10.0)
    assert silence.limit(rate, 5) == pytest.approx(limit + 1.0)
