# SPDX-License-Identifier: Apache-2.0
"""How many rounds there are, and when those that keep memory fresh, until the freeze."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from captured import until

from liveshift.errors import StepFailed
from liveshift.runtime import precopy
from liveshift.runtime.config import Precopy as Settings
from liveshift.runtime.precopy import Precopy
from liveshift.runtime.usual_rate import UsualRate


class Counted(Precopy):
    """Whose rounds send nothing and are counted."""

    def __init__(self) -> None:
        resident: Any = SimpleNamespace(
            collectives=lambda: 0, rate=UsualRate(), computes=UsualRate(),
            run_time=SimpleNamespace(progress=lambda: 0),
        )  # fmt: skip
        lanes: Any = SimpleNamespace(finish=lambda: None, close=lambda: None)
        reporter: Any = SimpleNamespace(done=lambda: None)
        super().__init__(resident, lanes, Settings(), reporter, list)
        self.count = 0
        self.fails: Exception | None = None
        self.finds: list[int] = []

    def _round(self) -> bool:
        self.count += 1
        self._ahead.rounds = self.count
        if self.finds:
            self._ahead.dirty = self.finds.pop(0)
        if self.fails:
            raise self.fails
        return not self._no_more_rounds()

    def go_round(self) -> bool:
        before, later = self.count, threading.Event()
        later.wait(0.1)
        return self.count > before


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    monkeypatch.setattr(precopy, "NAP_S", 0.002)
    made = Counted()
    yield made
    made.close()


def test_they_rest_while_gates_are_closed_and_go_on_when_it_was_for_another(
    rounds: Counted,
) -> None:
    rounds.keep_fresh()
    assert rounds.go_round()
    for _ in range(2):
        rounds.rest()
        until(lambda: not rounds.go_round())
        rounds.go_on()
        assert rounds.go_round()


@pytest.mark.parametrize("how", ["hurry", "stop_rounds"])
def test_they_do_not_go_on_for_one_that_is_frozen_or_given_up(rounds: Counted, how: str) -> None:
    rounds.keep_fresh()
    getattr(rounds, how)()
    rounds.go_on()
    until(lambda: not rounds.go_round())


def test_no_gate_interrupts_the_rounds_of_the_precopy_itself(rounds: Counted) -> None:
    rounds.rest()
    assert not rounds._no_more_rounds()


def test_what_ends_them_is_raised_before_anything_is_frozen(rounds: Counted) -> None:
    rounds.fails = StepFailed("ship", "the destination takes no more")
    rounds.keep_fresh()
    until(lambda: rounds.count == 1)
    with pytest.raises(StepFailed, match="takes no more"):
        rounds.stop_rounds()
    rounds.close()
    assert rounds.count == 1


@pytest.mark.parametrize(
    ("finds", "made"),
    [
        ([1000, 0, 0], 2),
        ([1000, 500, 250, 240, 120, 119, 118, 117], 7),  # until it shrinks twice no longer
        ([1000, 500, 490, 480], 4),
        ([1000, 995, 990], 2),  # all of it is rewritten
        ([1000, 3000, 2000, 1900, 1890], 5),  # some of what came in the second is cold
    ],
)
def test_they_go_on_while_what_is_rewritten_shrinks(
    rounds: Counted, finds: list[int], made: int
) -> None:
    rounds.finds = finds
    assert rounds.rounds(float("inf")).rounds == made
