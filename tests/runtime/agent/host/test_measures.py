# SPDX-License-Identifier: Apache-2.0
"""What an agent notes of a capsule that leaves or comes, for what the move costs; the time of both
is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from liveshift.errors import NotFound
from liveshift.runtime.agent.host import measures
from liveshift.runtime.agent.host.measures import Measures
from liveshift.runtime.agent.host.usual_rate import UsualRate
from liveshift.runtime.cost.lost_time import COLLECTIVES, RUN_TIME
from liveshift.runtime.messages import EndMeasure, StartMeasure, Worked

T = TypeVar("T")
RATE = 200.0
START, END = StartMeasure("m1", "gpt/1"), EndMeasure("m1", "gpt/1")


class Clock:
    """Stands in for ``time`` and ``asyncio`` in the module: time passes only where it is slept."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def to_thread(self, read: Callable[[], T]) -> T:
        return read()


CLOCK = Clock()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("time", "asyncio"):
        monkeypatch.setattr(measures, name, CLOCK)
    for name, seconds in {
        "AFTER_S": 0.1,
        "WATCH_S": 0.3,
        "WATCH_MOST_S": 0.4,
        "LOOK_S": 0.01,
    }.items():
        monkeypatch.setattr(measures, name, seconds)


@dataclass
class Capsule:
    """One that makes RATE collectives a second, or as much run time, since a while."""

    clock: str = COLLECTIVES
    trained_s: float = 20.0
    spec: Any = field(default_factory=lambda: SimpleNamespace(name="gpt/1"))
    code: int | None = None
    finished: dict[int, int] = field(default_factory=dict)
    stands_since: float | None = None

    def __post_init__(self) -> None:
        self.began = CLOCK.now - self.trained_s
        self.rate, self.computes = UsualRate(), UsualRate()
        self.run_time = SimpleNamespace(progress=lambda at_once=False: self.count())
        usual = self.rate if self.clock == COLLECTIVES else self.computes
        for n in range(int(self.trained_s / 0.4)):
            usual.heartbeat(self.began + 0.4 * n, int(0.4 * n * RATE))

    def count(self) -> int:
        return int(((self.stands_since or CLOCK.now) - self.began) * RATE)

    def collectives(self) -> int:
        return self.count() if self.clock == COLLECTIVES else 0


def agent(*here: Capsule) -> tuple[Measures, dict[str, Capsule]]:
    capsules = {capsule.spec.name: capsule for capsule in here}

    def resident(name: str) -> Capsule:
        if name not in capsules:
            raise NotFound(f"{name} is not here")
        return capsules[name]

    capsule_table: Any = SimpleNamespace(host="h1", capsules=capsules, resident=resident)
    return Measures(capsule_table), capsules


def leaves(capsule: Capsule, then: Callable[[Measures, dict[str, Capsule]], None]) -> Worked:
    measured, capsules = agent(capsule)

    async def act() -> Worked:
        await measured.start_measure(START)
        then(measured, capsules)
        return await measured.end_measure(END)

    return asyncio.run(act())


def test_one_that_has_left_is_asked_for_what_it_had_made() -> None:
    def gone(measured: Measures, capsules: dict[str, Capsule]) -> None:
        measured.stops("m1")
        measured.sent("m1", 246)
        capsules.clear()

    began = CLOCK.now
    said = leaves(Capsule(), gone)
    assert CLOCK.now == began, "nobody waits for a host that has nothing to watch"
    assert (said.clock, said.end, said.seconds, said.sent, said.why_not) == (
        COLLECTIVES,
        None,
        0.0,
        246,
        "",
    )
    assert said.rate == pytest.approx(RATE, rel=0.02)
    assert said.begin == pytest.approx(20 * RATE, abs=1)
    assert said.counted == pytest.approx(20 * RATE, abs=1)
    assert said.cpu_s >= 0


def test_run_time_ends_where_it_was_stopped() -> None:
    capsule = Capsule(RUN_TIME)

    def gone(measured: Measures, capsules: dict[str, Capsule]) -> None:
        CLOCK.now += 0.2
        measured.stops("m1")
        capsules.clear()

    said = leaves(capsule, gone)
    assert said.clock == RUN_TIME
    assert said.end is not None
    assert said.end - said.begin == pytest.approx(0.2 * RATE, abs=1)


def test_one_that_stays_is_watched() -> None:
    said = leaves(Capsule(), lambda *_: None)
    assert said.end is not None
    # As many as it makes until the moment that this belongs to.
    assert said.end - said.begin == pytest.approx(said.seconds * RATE, abs=2)
    assert 0.1 < said.seconds < 0.5


def test_one_that_comes_counts_from_where_it_was() -> None:
    capsule = Capsule(trained_s=5.0)
    capsule.finished = {7: 900, 8: 1000}
    measured, capsules = agent()
    measured.arriving("m1")
    capsules["gpt/1"] = capsule
    measured.runs("m1", capsule)  # type: ignore[arg-type]
    said = asyncio.run(measured.end_measure(EndMeasure("m1", "gpt/1", COLLECTIVES)))
    assert (said.begin, said.counted, said.seconds > 0, said.why_not) == (1000, 1000, True, "")
    assert said.end is not None
    assert said.end > said.begin
    assert said.rate == pytest.approx(RATE, rel=0.1), "seen here"


@pytest.mark.parametrize(
    ("made", "then", "why"),
    [
        (lambda: Capsule(trained_s=1.0), lambda *_: None, "had not trained long enough"),
        (lambda: Capsule(code=0), lambda *_: None, "the job ended, or moved on"),
        (
            lambda: Capsule(stands_since=CLOCK.now),
            lambda *_: None,
            "the job made no progress in",
        ),
        (
            lambda: Capsule(RUN_TIME),
            lambda measured, _: measured.stops("m1"),
            "was frozen and then went on where it was",
        ),
    ],
    ids=["young", "ended", "stands", "thawed"],
)
def test_what_cannot_be_counted_says_why(
    made: Callable[[], Capsule], then: Callable[[Measures, dict[str, Capsule]], None], why: str
) -> None:
    assert why in leaves(made(), then).why_not


def test_nobody_watches_one_of_which_it_is_known_that_it_cannot_be_counted() -> None:
    began = CLOCK.now
    said = leaves(Capsule(RUN_TIME), lambda measured, _: measured.stops("m1"))
    assert CLOCK.now == began
    assert (said.seconds, said.why_not != "") == (0.0, True)


def test_an_agent_that_was_started_anew_knows_nothing() -> None:
    said = asyncio.run(agent()[0].end_measure(END))
    assert said.why_not == "the agent on h1 was restarted meanwhile"
    assert said.seconds == 0.0


def test_moves_that_nobody_asks_about_are_forgotten() -> None:
    measured, _ = agent(Capsule())
    for number in range(measures.KEPT + 5):
        measured.arriving(f"m{number}")
    assert len(measured._parts) == measures.KEPT
    assert "m4" not in measured._parts
