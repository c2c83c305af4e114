# SPDX-License-Identifier: Apache-2.0
"""When a snapshot ends by itself, and that its thaw is tried until it succeeds."""

from __future__ import annotations

import threading

import pytest
from waits import until

from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure import thaw_timer
from liveshift.runtime.agent.departure.thaw_timer import ThawTimer


class Thaws:
    """Counts the calls of its timer. The first ``fails`` of them fail."""

    def __init__(self, fails: int = 0) -> None:
        self.count = 0
        self.done = threading.Event()
        self.timer = ThawTimer("s99.1 of gpt/1", self._thaw)
        self._fails = fails

    def _thaw(self) -> None:
        self.count += 1
        if self.count <= self._fails:
            raise StepFailed("thaw", "CRIU did not release the tasks")
        self.done.set()

    def ended(self) -> bool:
        """Whether no thread of it is left."""
        return all("s99.1" not in thread.name for thread in threading.enumerate())


def test_it_thaws_once_when_its_time_is_over() -> None:
    thaws = Thaws()
    assert not thaws.timer.over
    thaws.timer.within(0.3)
    assert 0 < thaws.timer.left <= 0.3
    assert thaws.done.wait(5)
    until(thaws.ended)
    assert (thaws.count, thaws.timer.over, thaws.timer.left) == (1, True, 0.0)


def test_a_later_step_may_give_more_time_or_less() -> None:
    thaws = Thaws()
    thaws.timer.within(60.0)
    thaws.timer.within(120.0)
    assert thaws.timer.left > 60
    assert not thaws.done.is_set()
    thaws.timer.within(0.01)
    assert thaws.done.wait(5), "the thread that waits for an hour hears of it"


def test_time_that_is_over_stays_over() -> None:
    thaws = Thaws(fails=10**9)
    thaws.timer.end()
    thaws.timer.within(60.0)
    assert thaws.timer.over
    assert thaws.timer.left == 0.0
    thaws.timer.thawed()
    until(thaws.ended)


def test_it_can_end_before_any_step_has_begun() -> None:
    thaws = Thaws()
    thaws.timer.end()
    assert thaws.done.wait(5)


def test_one_that_was_thawed_in_time_is_not_thawed_again() -> None:
    thaws = Thaws()
    thaws.timer.within(60.0)
    thaws.timer.thawed()
    until(thaws.ended)
    thaws.timer.end()
    assert thaws.timer.over
    assert thaws.ended()
    assert thaws.count == 0


def test_a_thaw_that_fails_is_tried_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thaw_timer, "AGAIN_S", 0.002)
    thaws = Thaws(fails=5)
    thaws.timer.end()
    assert thaws.done.wait(5)
    until(thaws.ended)
    assert thaws.count == 6
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1, "the same fault fills no log"
    assert "s99.1 of gpt/1: the capsule does not go on yet: thaw: CRIU" in errors[0].getMessage()
