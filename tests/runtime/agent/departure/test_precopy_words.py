# SPDX-License-Identifier: Apache-2.0
"""What a pre-copy tells of itself in words."""

from __future__ import annotations

from liveshift.runtime.agent.departure.precopy import CopiedAhead, describe_rounds


def test_rounds_tell_what_they_did() -> None:
    assert describe_rounds(CopiedAhead(1, 5, 2_000_000)) == "1 round, 2.00 MB rewritten in the last"
    done = CopiedAhead(3, 5, 12_000_000, wanted=1_500_000, lost=0.05)
    assert describe_rounds(done) == (
        "3 rounds, 12.0 MB rewritten in the last, the job 5% slower, 1.50 MB sent"
        " that the destination no longer had"
    )


def test_rounds_name_processes_that_cannot_be_followed() -> None:
    done = CopiedAhead(2, 5, 1_000_000, untracked={7: "somebody traces it"})
    assert describe_rounds(done).endswith(
        "in the last; read in full while the job is paused: process 7 (somebody traces it)"
    )
    done.untracked[9] = "it uses a GPU"
    assert "process 7 and 1 more (somebody traces it)" in describe_rounds(done)
