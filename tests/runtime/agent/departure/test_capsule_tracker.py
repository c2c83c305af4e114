# SPDX-License-Identifier: Apache-2.0
"""Which holder has what a lasting tracker has sent: the others get all memory. SIGSTOP is here in
the place of CRIU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from memory_subject import MANY, Subject, family
from page_chunks import PAGE, Pages
from tracked import finish

from liveshift.criu_glue.memory.source.pulling import PullStopped
from liveshift.criu_glue.memory.source.tracker import MemoryTracker
from liveshift.errors import Refused, StepFailed
from liveshift.runtime.agent.departure.capsule_tracker import CapsuleTracker

pytestmark = pytest.mark.root

ALL = MANY * PAGE


@pytest.fixture
def capsule(job: Subject) -> Iterator[CapsuleTracker]:
    resident: Any = SimpleNamespace(spec=SimpleNamespace(name="gpt/1"))
    made = CapsuleTracker(resident, lambda _: MemoryTracker(family(job.pid)))
    yield made
    made.close()


def snapshot(job: Subject, tracker: MemoryTracker, pages: Pages) -> int:
    """Send an image; return its bytes."""
    ahead = tracker.round(pages)
    assert ahead.untracked == {}
    return ahead.sent_bytes + finish(job, tracker, pages).sent_bytes


@pytest.mark.parametrize(
    ("returned", "holder", "generation", "has"),
    [
        (16, "h2", 16, True),
        (16, "h3", 16, False),
        (16, "h2", 15, False),  # it has gone back to an earlier one
        (16, "h2", 0, False),  # it was restarted
        (0, "h2", 16, False),  # it is not certain that all has come
        (0, "h2", 0, False),
    ],
)
def test_only_what_was_written_goes_to_a_holder_that_has_the_rest(
    job: Subject,
    capsule: CapsuleTracker,
    returned: int,
    holder: str,
    generation: int,
    has: bool,
) -> None:
    pages = Pages()
    assert snapshot(job, capsule.lend("h2", 0), pages) > ALL
    capsule.returned(returned)
    job.do("[put(page, 9) for page in range(100)]")
    there = pages if has else Pages()
    lent = capsule.lend(holder, generation)
    assert capsule.sends_all is not has
    sent = snapshot(job, lent, there)
    assert 100 * PAGE <= sent < 0.8 * ALL if has else sent > ALL
    capsule.returned()


def test_a_snapshot_that_never_came_back_leaves_nothing_certain(
    job: Subject, capsule: CapsuleTracker
) -> None:
    pages = Pages()
    snapshot(job, capsule.lend("h2", 0), pages)
    capsule.returned(16)
    capsule.lend("h2", 16)
    capsule.returned()
    capsule.returned(17)  # a second call says nothing any more
    assert snapshot(job, capsule.lend("h2", 17), Pages()) > ALL
    capsule.returned()


def test_one_snapshot_at_a_time_has_the_tracker(job: Subject, capsule: CapsuleTracker) -> None:
    tracker = capsule.lend("h2", 0)
    with pytest.raises(Refused, match=r"memory of gpt/1 is followed for a snapshot to h2, which"):
        capsule.lend("h3", 0)
    capsule.returned()
    assert capsule.lend("h3", 0) is tracker
    capsule.returned()


def test_a_snapshot_has_no_hold_on_a_tracker_that_it_has_returned(
    job: Subject, capsule: CapsuleTracker
) -> None:
    tracker = capsule.lend("h2", 0)
    tracker.stopped = lambda: True
    with pytest.raises(PullStopped):
        tracker.round(Pages())
    capsule.returned()
    assert snapshot(job, capsule.lend("h2", 0), Pages()) > ALL
    capsule.returned()


def test_the_store_is_not_given_an_incarnation_that_it_would_drop(
    job: Subject, capsule: CapsuleTracker
) -> None:
    pages = Pages()
    snapshot(job, capsule.lend("h2", 12, 5), pages)
    assert pages.incarnations == {job.pid: 5}
    capsule.returned(13)
    snapshot(job, capsule.lend("h2", 13, 5), pages)
    assert pages.incarnations == {job.pid: 5}
    capsule.returned()


def tracked_mappings(job: Subject) -> int:
    return job.number("open('/proc/self/smaps').read().count(' uw ')")


def test_after_its_end_another_tracker_can_follow_the_capsule(
    job: Subject, capsule: CapsuleTracker
) -> None:
    snapshot(job, capsule.lend("h2", 0), Pages())
    capsule.returned(16)
    assert tracked_mappings(job) > 0, "it goes on between two snapshots"
    capsule.close()
    capsule.close()
    assert tracked_mappings(job) == 0
    assert snapshot(job, capsule.lend("h2", 16), Pages()) > ALL, "a new one knows nothing"
    capsule.returned()


def test_its_end_waits_for_the_snapshot_that_has_it(job: Subject, capsule: CapsuleTracker) -> None:
    capsule.lend("h2", 0).round(Pages())
    with pytest.raises(StepFailed, match=r"memory: the snapshot of gpt/1 to h2 still follows"):
        capsule.close(0.01)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(capsule.close)
        assert not closing.done()
        assert tracked_mappings(job) > 0
        capsule.returned()
        closing.result(10)
    assert tracked_mappings(job) == 0
