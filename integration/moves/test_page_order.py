# SPDX-License-Identifier: Apache-2.0
"""No page is older at the destination than it was at the source.

Pages go over several connections, where a later chunk overtakes an earlier one: most easily where
the link is slow and the job rewrites, in each step, about what is on its way at once.
"""

from __future__ import annotations

import sys

import pytest
from lab_session import JOBS, NewLab

from liveshift.launcher import lab as labs

MOVES = 4
MEGABYTES = 12


@pytest.mark.long
def test_a_page_that_is_rewritten_all_the_time_arrives_as_it_was_last(new_lab: NewLab) -> None:
    session = new_lab("--hosts", "2")
    for host in ("h0", "h1"):
        labs.link(session.lab, host, rate="1gbit")
    job = session.start(
        "stamps",
        (
            *(sys.executable, str(JOBS / "stamps.py"), "--out", "{out}"),
            *("--megabytes", str(MEGABYTES), "--enough", "{out}/enough"),
        ),
    )
    job.wait_step(20)
    for _ in range(MOVES):
        row = job.migrate(0)
        (ahead,) = (phase for phase in row.phases if phase.name == "pre-copy")
        assert ahead.bytes is not None
        assert ahead.bytes > 2 * MEGABYTES * 1_000_000, "it went over more than once"
        job.go_on(10)
    job.stop()
    wrong = {step["step"]: step["wrong"] for step in job.steps() if step["wrong"]}
    assert not wrong, f"pages that were not as they had been left, by step: {wrong}"
