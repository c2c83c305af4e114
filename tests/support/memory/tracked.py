# SPDX-License-Identifier: Apache-2.0
"""A process that is followed by a tracker, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memory_subject import Subject, family, subject
from page_chunks import Pages

from liveshift.criu_glue.memory.source.tracker import FrozenSet, MemoryTracker


@pytest.fixture
def job() -> Iterator[Subject]:
    with subject() as started:
        yield started


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def tracker(job: Subject) -> Iterator[MemoryTracker]:
    made = MemoryTracker(family(job.pid))
    assert made.probe() == ""
    yield made
    made.close()


def finish(job: Subject, tracker: MemoryTracker, pages: Pages, *others: int) -> FrozenSet:
    """The last pass; all there is must have come as it is."""
    with job.standing(*others):
        found = tracker.send_final_set(pages)
        for pid in (job.pid, *others):
            assert pages.differences(pid, pid, found.table) == []
    return found
