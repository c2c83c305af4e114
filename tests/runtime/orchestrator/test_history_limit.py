# SPDX-License-Identifier: Apache-2.0
"""The orchestrator keeps its history short by itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from orchestrator_scene import brain

from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.orchestrator import orchestrator
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

__all__ = ["brain"]


def test_old_events_go_while_it_runs_also_after_a_write_has_failed(
    brain: Orchestrator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, failures = brain.fleet.journal, [JournalError("the disk is full")]
    remove = journal.old_events.remove

    def fails_once(keep: int) -> bool:
        if failures:
            raise failures.pop()
        return remove(keep)

    monkeypatch.setattr(journal.old_events, "remove", fails_once)
    monkeypatch.setattr(orchestrator, "LIMIT_S", 0.01)
    monkeypatch.setattr(orchestrator, "LIMIT_REST_S", 0.01)
    jobs = replace(brain.cluster.jobs, keep_events=1000)
    brain.cluster = replace(brain.cluster, jobs=jobs)
    brain._decided.set()

    async def play() -> None:
        work = asyncio.ensure_future(brain._once_decided(brain._limit_history))
        async with asyncio.timeout(20):
            while len(journal.events("", 0)) > 1000:
                await asyncio.sleep(0.01)
        work.cancel()

    with journal.together():
        for number in range(3000):
            journal.add_event("h1", "x", str(number))
    asyncio.run(play())
    assert [event.text for event in journal.events("", 0)] == [str(n) for n in range(2000, 3000)]
    assert "the history is not shortened: the disk is full" in caplog.text
