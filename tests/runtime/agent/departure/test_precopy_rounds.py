# SPDX-License-Identifier: Apache-2.0
"""How many rounds there are, and when those that keep memory fresh, until the freeze."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from waits import until

from liveshift.criu_glue.memory.source.pulling import PullStopped
from liveshift.criu_glue.memory.source.tracker import FrozenSet
from liveshift.errors import StepFailed
from liveshift.runtime.agent.departure import precopy
from liveshift.runtime.agent.departure.final_dirty_set import FinalDirtySet
from liveshift.runtime.agent.departure.precopy import PrecopyRounds
from liveshift.runtime.agent.host.usual_rate import UsualRate
from liveshift.runtime.config.choices import Way
from liveshift.runtime.config.cluster import PrecopySettings as Settings
from liveshift.runtime.messages import Situation, Writing
from liveshift.runtime.wire.wants import Wants


class Counted(PrecopyRounds):
    """Whose rounds send nothing and are counted."""

    def __init__(self, tracker: Any = None, way: Way | None = None) -> None:
        self.stops: list[int] = []
        resident: Any = SimpleNamespace(
            collectives=lambda: 0,
            rate=UsualRate(),
            computes=UsualRate(),
            run_time=SimpleNamespace(progress=lambda: 0),
        )
        lanes: Any = SimpleNamespace(finish=lambda: None, close=lambda: None, pages=None, bytes=0)
        reporter: Any = SimpleNamespace(
            done=lambda: None, stopping=self.stops.append, listed=lambda _: None
        )
        super().__init__(resident, lanes, Settings(), reporter, list, 0.0, tracker, way)
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

    def goes_on(self) -> None:
        before = self.count
        until(lambda: self.count > before)

    def rests(self) -> None:
        """None is made any more but for one that was about to begin. A busy machine may make none
        for a while either, so a moment without one would not show it."""
        most = self.count + 1
        for _ in range(3):
            self.go_round()
        assert self.count <= most

    def go_round(self) -> bool:
        before, later = self.count, threading.Event()
        later.wait(0.1)
        return self.count > before


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    monkeypatch.setattr(precopy, "BETWEEN_ROUNDS_S", 0.002)
    made = Counted()
    yield made
    made.close()


def test_they_rest_while_gates_are_closed_and_go_on_when_it_was_for_another(
    rounds: Counted,
) -> None:
    rounds.iterate_until_freeze()
    rounds.goes_on()
    for _ in range(2):
        rounds.pause()
        rounds.rests()
        rounds.resume()
        rounds.goes_on()


def test_what_is_on_its_way_arrives_before_the_freeze_also_after_an_error(rounds: Counted) -> None:
    """An older chunk could come after the final dirty set otherwise, on another lane."""
    arrived: list[bool] = []
    lanes: Any = rounds.lanes
    lanes.finish = lambda: arrived.append(True)
    rounds.fails = OSError("too many open files")
    rounds.iterate_until_freeze()
    until(lambda: rounds.count == 1)
    rounds.stop()
    assert arrived == [True]


@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_they_do_not_go_on_for_one_that_is_frozen_or_given_up(rounds: Counted, how: str) -> None:
    rounds.iterate_until_freeze()
    getattr(rounds, how)()
    rounds.resume()
    rounds.rests()


def test_no_gate_interrupts_the_rounds_of_the_precopy_itself(rounds: Counted) -> None:
    rounds.pause()
    assert not rounds._no_more_rounds()


def test_rounds_that_begin_while_gates_are_closed_wait_for_them_to_open(rounds: Counted) -> None:
    rounds.pause()
    rounds.iterate_until_freeze()
    assert not rounds.go_round()
    rounds.resume()
    rounds.goes_on()


def test_a_freeze_hears_whether_it_has_interrupted_a_round(rounds: Counted) -> None:
    began = threading.Event()

    def make() -> bool:
        began.set()
        until(rounds._no_more_rounds)
        return False

    cast(Any, rounds)._round = lambda: PrecopyRounds._round(rounds)
    cast(Any, rounds)._make_round = make
    rounds.iterate_until_freeze()
    assert began.wait(10)
    assert rounds.stop(), "it was under way"
    assert not rounds.stop(), "none is under way any more"


def test_what_ends_them_is_raised_before_anything_is_frozen(rounds: Counted) -> None:
    rounds.fails = StepFailed("ship", "the destination takes no more")
    rounds.iterate_until_freeze()
    until(lambda: rounds.count == 1)
    with pytest.raises(StepFailed, match="takes no more"):
        rounds.stop()
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
    assert rounds.run(float("inf")).rounds == made


class Named(Counted):
    """Whose destination lacks pages that were only named, each time others."""

    def __init__(self, *lacks: Wants) -> None:
        super().__init__()
        self.lacks = list(lacks)
        self.sent: list[Wants] = []
        self.arrived = 0
        self.lanes.finish = self._arrive  # type: ignore[method-assign]
        self._wants = self._ask
        tracker: Any = SimpleNamespace(
            again=self._send,
            wait_frozen=lambda *_: None,
            close=lambda: None,
            send_final_set=lambda *_: FrozenSet(0, 0, {}, {}, 0.0),
        )
        self.tracker = tracker

    def _ask(self) -> Wants:
        assert self.arrived == len(self.sent) + 1, "asked before what was sent had arrived"
        return self.lacks.pop(0) if self.lacks else []

    def _arrive(self, mark: object = None) -> None:
        self.arrived = len(self.sent) + 1

    def _send(self, wanted: Wants, _sink: object) -> int:
        self.sent.append(wanted)
        return 4096 * sum(pages for _, _, pages in wanted)


LACKS: list[Wants] = [[(1, 0x1000, 2)], [(1, 0x5000, 1), (2, 0x1000, 1)], [(2, 0x9000, 3)]]
"""Of each asking; an answer holds not all, and what comes may name others."""


def test_named_pages_are_asked_for_until_the_destination_lacks_none() -> None:
    made = Named(*LACKS)
    made.complete()
    assert made.sent == LACKS
    assert made.lacks == []
    made.close()


def test_so_they_are_at_the_freeze_before_the_table_goes() -> None:
    made, table = Named(*LACKS), list[int]()
    wire: Any = SimpleNamespace(send=lambda *_: table.append(len(made.sent)))
    page_filter: Any = SimpleNamespace(asked=None, hide=None)
    final_set = FinalDirtySet(made, wire, page_filter, float("inf"))
    final_set.finish()
    assert table == [3, 3]
    assert final_set.describe() == "0 B in all, found within 0 ms", "no round was made before"
    made.began = True
    assert final_set.describe() == "0 B rewritten, found within 0 ms"
    made.close()


def test_a_round_asks_once() -> None:
    """What is named and has gone meanwhile would else be asked for while the job writes on."""
    made = Named(*LACKS)
    made._arrive()
    assert made._send_wanted() == 2 * 4096
    assert made.sent == LACKS[:1]
    made.close()


@pytest.mark.parametrize("lent", [True, False])
def test_a_tracker_that_was_lent_outlives_the_rounds(
    monkeypatch: pytest.MonkeyPatch, lent: bool
) -> None:
    closed: list[str] = []
    tracker: Any = SimpleNamespace(stopped=None, close=lambda: closed.append("closed"))
    monkeypatch.setattr(precopy, "follow", lambda _: tracker)
    made = Counted(tracker if lent else None)
    assert not tracker.stopped(), "it asks these rounds whether it must stop"
    made.close()
    assert tracker.stopped()
    assert closed == ([] if lent else ["closed"])


def test_a_way_that_was_given_needs_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precopy, "BETWEEN_ROUNDS_S", 0.002)
    made = Counted(way=Way.ROUND)
    made.finds = [1000, 500, 250]
    assert made.run(float("inf")).rounds == 1
    made.iterate_until_freeze()
    assert not made.go_round()
    assert made.run(float("inf")).rounds == 2, "a further one is made if it is asked for"
    made.close()


SLOW = Situation(
    size=1_000_000_000,
    written=Writing(2e6, 2_000_000, 1.0),
    link=0.125e9,
    extra_s=0.0,
    reach=0.125e9,
    fixed_s=0.3,
    besides_s=1.0,
    per_byte=1e-9,
    idle=0.0,
)
"""A link of 1 Gbit/s, cold memory."""


def test_a_job_that_is_simply_stopped_has_no_round_before_or_after(rounds: Counted) -> None:
    rounds._rate = 20e9
    found = rounds.choose_way(SLOW, 60.0, 0.0, Way.AUTO)
    assert found.estimate.way == "stop", "the link was found to be faster than it seemed"
    ahead = rounds.run(float("inf"))
    rounds.iterate_until_freeze()
    assert (ahead.rounds, ahead.sent, rounds.stops) == (0, 0, [SLOW.size])
    assert not rounds.go_round()


def test_one_round_is_one_and_none_keeps_it_fresh(rounds: Counted) -> None:
    rounds.finds = [1000, 500, 250]
    assert rounds.choose_way(SLOW, 60.0, 0.0, Way.ROUND).because == "asked for"
    assert rounds.run(float("inf")).rounds == 1
    rounds.iterate_until_freeze()
    assert not rounds.go_round()


def test_a_round_that_costs_more_than_it_saves_is_not_sent(rounds: Counted) -> None:
    rounds._rate = 0.125e9
    assert rounds.choose_way(SLOW, 60.0, 0.0, Way.AUTO).estimate.way == "rounds"
    rounds._decide_on_list(SLOW.size)
    rounds._ahead.rounds = 1
    rounds._decide_on_list(SLOW.size // 10)
    rounds._ahead.rounds = 2
    with pytest.raises(PullStopped):  # of what the round before found all is written again
        rounds._decide_on_list(SLOW.size // 10)
    assert rounds.stops == [SLOW.size // 10], "it is left for the stop, which is reckoned with it"


def test_rounds_that_were_asked_for_do_not_end_for_what_they_cost(rounds: Counted) -> None:
    rounds.choose_way(SLOW, 60.0, 0.0, Way.ROUNDS)
    rounds._ahead.rounds = 2
    for _ in range(3):
        rounds._decide_on_list(SLOW.size)
    assert not rounds.stops


def test_rounds_run_in_the_background_if_idle_cores_suffice(rounds: Counted) -> None:
    rounds._rate = 0.125e9
    seen = [rounds.on_idle_cores]  # nothing was chosen yet
    rounds.choose_way(SLOW, 60.0, 0.0, Way.AUTO)
    seen.append(rounds.on_idle_cores)
    idle = msgspec.structs.replace(SLOW, idle=0.2e9)  # faster than the link
    assert rounds.choose_way(idle, 60.0, 0.0, Way.AUTO).estimate.way == "rounds"
    seen.append(rounds.on_idle_cores)
    rounds.end_sooner(60.0)
    seen.append(rounds.on_idle_cores)
    assert seen == [False, False, True, False]


def test_a_deadline_keeps_rounds_in_the_foreground(rounds: Counted) -> None:
    idle = msgspec.structs.replace(SLOW, idle=0.2e9)
    rounds._rate = 0.125e9
    rounds.choose_way(idle, 60.0, 30.0, Way.AUTO)
    assert not rounds.on_idle_cores


def test_what_is_sent_during_the_pause_is_not_in_the_background(rounds: Counted) -> None:
    idle = msgspec.structs.replace(SLOW, idle=0.2e9)
    rounds._rate = 0.125e9
    rounds.choose_way(idle, 60.0, 0.0, Way.STOP)
    assert not rounds.on_idle_cores


def test_no_further_round_begins_after_a_deadline_that_comes_meanwhile(rounds: Counted) -> None:
    """The first is finished, as fast as can be: the rest of it would be sent during the pause."""
    rounds.finds = [1 << 30 >> n for n in range(20)]
    assert rounds._throttle._least() == 0
    rounds.end_sooner(0.0)
    rounds.end_sooner(60.0)  # a later word gives no time back
    assert rounds._throttle._least() == float("inf")
    assert not rounds._no_more_rounds()
    assert rounds.run(float("inf")).rounds == 1
    assert rounds._no_more_rounds()
