# SPDX-License-Identifier: Apache-2.0
"""The way that is chosen costs a job about what the cheapest one does, and what is predicted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import journal_rows
import msgspec
import pytest
from played_migration import COPY, FIXED_S, Played

from liveshift.runtime.config.choices import Way
from liveshift.runtime.config.cluster import PrecopySettings, Timeouts
from liveshift.runtime.cost import model as cost
from liveshift.runtime.messages import (
    Chosen,
    Cores,
    Cost,
    Estimate,
    MigrationRow,
    Phase,
    Prediction,
    Rounds,
    Situation,
    Writing,
)

GB = 1e9
LINKS = {"unlimited": 20e9, "10G": 1.25e9, "1G": 0.125e9}
CASES = list(
    itertools.product((0.25, 1.0, 2.0, 4.0, 8.0), ("cold", "hot"), LINKS, ("busy", "half", "idle"))
)


def played(gb: float, heat: str, link: str, cores: str, cpu: float = 2e-9) -> Played:
    hot = (0.7 if heat == "hot" else 0.02) * gb * GB
    idle = {"busy": 0.0, "half": 0.5, "idle": 8.0}[cores]
    return Played(gb * GB, hot, 2 * hot, LINKS[link], idle, cpu)


def chosen(move: Played, learnt: cost.Learnt | None = None, within: float | None = None) -> Chosen:
    """As a source chooses: it looks at what is written only where that matters."""
    given = cost.situation(
        int(move.size),
        None,
        min(move.link, COPY),
        FIXED_S,
        move.cores(),
        move.cores(),
        learnt or cost.Learnt(),
    )
    found = cost.choose(given, 120.0, within)
    if found.undecided:
        seen = msgspec.structs.replace(given, written=move.looked_at())
        found = cost.choose(seen, 120.0, within)
    return found


def row(found: Chosen, move: Played) -> MigrationRow:
    """The record of that move."""
    best, given = found.estimate, found.given
    lost, pause, empty = move.lost(best.way, best.speed)
    copying = empty - pause - 1.2
    rounds = Rounds(0, 0, 0, 0, 0.0)
    if best.way != Way.STOP and copying:
        share = (lost - pause) / copying
        rounds = Rounds(1, int(move.sent), 0, 0, 0.0, share, None, min(move.link, COPY))
    said = Prediction(
        "pre-copy",
        "",
        best.pause_s,
        [],
        int(move.size),
        how=best.way,
        because="",
        lost_s=best.lost_s,
        slower_s=best.slower_s,
        empty_s=best.empty_s,
        uncovered=best.uncovered,
        limited=best.speed < given.reach,
    )
    phases = [Phase("pre-copy", 0.0, copying)]
    return msgspec.structs.replace(
        journal_rows.row(1),
        seconds=empty,
        frozen_s=pause,
        phases=phases,
        precopy=rounds,
        predicted=said,
    )


@pytest.mark.parametrize(("gb", "heat", "link", "cores"), CASES)
@pytest.mark.parametrize("cpu", [0.4e-9, 1.5e-9, 5e-9])
def test_the_way_chosen_costs_about_the_least_after_three_moves_as_predicted(
    gb: float, heat: str, link: str, cores: str, cpu: float
) -> None:
    move, rows = played(gb, heat, link, cores, cpu), list[MigrationRow]()
    for _ in range(3):
        rows.insert(0, row(chosen(move, cost.learn(rows, "gpt", frozenset({"h1", "h2"}))), move))
    found = chosen(move, cost.learn(rows, "gpt", frozenset({"h1", "h2"})))
    best = found.estimate
    lost, pause, empty = move.lost(best.way, best.speed)
    assert lost <= 1.3 * move.cheapest() + 0.01, (best, found.weighed)
    assert lost <= move.lost("stop", COPY)[0] + 0.2, (best, found.weighed)
    assert best.lost_s == pytest.approx(lost, rel=0.3, abs=0.05), (best, lost, pause)
    assert best.empty_s == pytest.approx(empty, rel=0.3, abs=0.05)


@pytest.mark.parametrize(("gb", "heat", "link", "cores"), CASES)
def test_the_first_move_of_all_is_not_dear_either(
    gb: float, heat: str, link: str, cores: str
) -> None:
    move = played(gb, heat, link, cores)
    best = chosen(move).estimate
    assert move.lost(best.way, best.speed)[0] <= 1.3 * move.cheapest() + 0.01
    assert move.lost(best.way, best.speed)[0] <= move.lost("stop", COPY)[0] + 0.2


GIVEN = Situation(
    size=4_000_000_000,
    written=Writing(10e6, 10_000_000, 1.0),
    link=1.25e9,
    extra_s=0.0,
    reach=1.25e9,
    fixed_s=0.3,
    besides_s=1.0,
    per_byte=2e-9,
    idle=0.0,
)


def test_on_a_fast_link_and_busy_cores_a_job_is_stopped_and_on_a_slow_one_it_is_not() -> None:
    assert cost.choose(GIVEN, 60).estimate.way == "stop"
    slow = msgspec.structs.replace(GIVEN, link=0.125e9, reach=0.125e9)
    found = cost.choose(slow, 60)
    assert found.estimate.way in ("round", "rounds")
    assert found.estimate.lost_s < 10 < cost.choose(slow, 60, way=Way.STOP).estimate.lost_s


def test_idle_cores_read_for_nothing_at_the_speed_for_which_they_suffice() -> None:
    given = msgspec.structs.replace(GIVEN, idle=0.5e9)
    found = cost.choose(given, 60).estimate
    assert (found.way, found.speed, found.uncovered) == ("rounds", 0.5e9, 0.0)
    assert found.slower_s < 0.05


def test_a_pause_that_is_too_long_is_taken_only_where_there_is_no_other_way() -> None:
    assert cost.choose(GIVEN, 2.0).estimate.way != "stop"
    assert cost.choose(GIVEN, 2.0, way=Way.STOP).estimate.way == "stop"
    assert "max_pause" in cost.choose(GIVEN, 2.0).because
    hot = msgspec.structs.replace(GIVEN, written=Writing(9e9, 4_000_000_000, 1.0))
    assert cost.choose(hot, 0.1).estimate.pause_s > 0.1


def test_a_deadline_comes_before_the_cost_and_what_misses_it_is_said() -> None:
    slow = msgspec.structs.replace(GIVEN, link=0.25e9, reach=0.25e9, idle=0.1e9)
    at_leisure = cost.choose(slow, 60).estimate
    assert at_leisure.speed == 0.1e9, "idle cores read it"
    hurried = cost.choose(slow, 60, within=at_leisure.empty_s / 2)
    assert hurried.estimate.speed > 0.1e9
    assert hurried.estimate.empty_s <= at_leisure.empty_s / 2
    late = cost.choose(slow, 60, within=2.0)
    assert late.needs_s is not None
    assert late.needs_s == cost.at_most(min(e.empty_s for e in late.weighed))
    assert cost.at_most(late.estimate.empty_s) == late.needs_s, "as soon as can be"


def test_a_cap_bounds_the_speed_and_a_forced_way_is_taken() -> None:
    capped = msgspec.structs.replace(GIVEN, slow_down=0.2)
    assert cost.choose(capped, 60, way=Way.ROUNDS).estimate.speed == pytest.approx(0.1e9)
    for way in (Way.STOP, Way.ROUND, Way.ROUNDS):
        found = cost.choose(GIVEN, 60, way=way)
        assert (found.estimate.way, found.because) == (way, "asked for")


def test_what_it_writes_matters_only_where_rounds_could_be_better() -> None:
    unseen = msgspec.structs.replace(GIVEN, written=None)
    assert not cost.choose(unseen, 60).undecided, "stopped, whatever it writes"
    assert cost.choose(unseen, 2.0).undecided
    assert not cost.choose(unseen, 2.0, way=Way.ROUND).undecided


def test_a_further_round_must_save_more_than_it_costs() -> None:
    assert cost.pays(int(GB), 0.1 * GB, 1e-9, 0.125e9)
    assert not cost.pays(int(GB), 0.1 * GB, 1e-9, 1.25e9)
    assert not cost.pays(int(GB), GB, 0.0, 0.125e9), "it is written again as fast"


def test_on_one_machine_both_agents_share_the_idle_cores() -> None:
    here = Cores(2.0, 1.0, 1e-9, "b")
    learnt = cost.Learnt()
    lab = cost.situation(1, None, 1e9, 0.3, here, here, learnt)
    apart = cost.situation(1, None, 1e9, 0.3, here, msgspec.structs.replace(here, boot="c"), learnt)
    assert (lab.idle, apart.idle) == pytest.approx((0.5e9, 1e9))
    assert (lab.per_byte, apart.per_byte) == pytest.approx((2e-9, 1e-9))


def test_an_unlimited_pause_is_bounded_by_what_ranks_wait() -> None:
    assert cost.max_pause(PrecopySettings(), Timeouts(collective=600.0)) == 60
    assert cost.max_pause(PrecopySettings(), Timeouts(collective=100.0)) == 10
    assert cost.max_pause(PrecopySettings(max_pause=3.0), Timeouts()) == 3


def test_moves_of_idle_cores_teach_nothing_of_busy_ones() -> None:
    busy, idle = played(4, "cold", "1G", "busy"), played(4, "cold", "1G", "idle")
    pair = frozenset({"h1", "h2"})
    assert cost.learn([row(chosen(idle), idle)], "gpt", pair).per_byte is None
    learnt = cost.learn([row(chosen(busy), busy)], "gpt", pair).per_byte
    assert learnt == pytest.approx(2e-9, rel=0.1)
    other = replace(idle)
    assert cost.learn([row(chosen(other), other)], "x", frozenset({"h1", "h9"})).per_byte is None


def test_what_idle_cores_cost_is_learnt_and_may_make_a_stop_cheaper() -> None:
    """Two hardware threads of one core, and memory bandwidth, are shared though cores are idle."""
    idle, pair = played(4, "cold", "1G", "idle"), frozenset({"h1", "h2"})
    earlier = row(chosen(idle), idle)
    assert earlier.precopy is not None
    lost = Cost(3.4, 0.4, 3.0, 9.0, None, None, 0, 0)
    moved = msgspec.structs.replace(earlier, cost=lost)
    learnt = cost.learn([moved], "gpt", pair)
    assert learnt.idle_byte == pytest.approx(3.0 / earlier.precopy.bytes)
    assert cost.learn([earlier], "gpt", pair).idle_byte is None, "its cost is not measured yet"
    busy = played(4, "cold", "1G", "busy")
    other = msgspec.structs.replace(row(chosen(busy), busy), cost=lost)
    assert cost.learn([other], "gpt", pair).idle_byte is None

    free = msgspec.structs.replace(GIVEN, idle=0.5e9)
    assert cost.choose(free, 60).estimate.way == "rounds"
    dear = msgspec.structs.replace(free, idle_byte=1e-9)
    found = cost.choose(dear, 60)
    assert found.estimate.way == "stop"
    rounds = next(e for e in found.weighed if e.way == "round" and e.speed == 0.5e9)
    assert rounds.slower_s == pytest.approx(4.0, rel=0.1)


def test_the_way_and_why_are_told() -> None:
    found = cost.choose(GIVEN, 60)
    assert (found.estimate.way, found.because[:17]) == ("stop", "round would cost ")
    assert isinstance(found.weighed[0], Estimate)


def test_files_of_an_earlier_move_are_not_taken_for_those_of_the_next() -> None:
    move, pair = played(1.0, "cold", "10G", "busy"), frozenset({"h1", "h2"})
    earlier = row(chosen(move), move)
    besides = cost.learn([earlier], "gpt", pair).besides_s
    assert besides
    phases = [Phase("files ahead", 0.0, 66.0), *earlier.phases]
    dear = msgspec.structs.replace(earlier, seconds=earlier.seconds + 66.0, phases=phases)
    assert cost.learn([dear], "gpt", pair).besides_s == pytest.approx(besides)
