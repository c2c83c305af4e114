# SPDX-License-Identifier: Apache-2.0
"""The timeline of a migration that an earlier orchestrator has begun."""

from __future__ import annotations

import time

import msgspec
import pytest
from journal_rows import row

from liveshift.runtime.model.timeline import Timeline


@pytest.mark.parametrize(("ago", "least"), [(30.0, 30.0), (-86_400.0, 2.0)])
def test_the_time_of_a_recovered_migration_goes_on(ago: float, least: float) -> None:
    """The clock may have been set back since the earlier orchestrator has written its row."""
    written = msgspec.structs.replace(row(7), asked=time.time() - ago, seconds=2.0, frozen_s=0.5)
    times = Timeline.of(written)
    assert least <= times.seconds() < least + 5
    assert 0.5 <= times.frozen_seconds() < least + 5
    with times.phase("restore"):
        pass
    assert times.phases[-1].start >= least
