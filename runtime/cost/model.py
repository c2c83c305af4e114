# SPDX-License-Identifier: Apache-2.0
"""The cost of a move in seconds of training, for each way that its memory may take.

There are three ways. *stop* sends all memory while the job is paused. *round* sends it once while
the job trains; what was written meanwhile goes during the pause. *rounds* repeats the round as long
as the next one saves more than it costs. Nothing here has a clock or sends a byte.

During the pause all cores are free for the copy, so a byte costs 1 / ``pause_rate()`` seconds of
pause and nothing else. A byte that is read while the job trains costs CPU time of the job, unless
cores are idle. With ``per_byte`` seconds lost per byte, a round over D bytes loses
D x ``per_byte``, at any speed. Slow reading helps only if the idle cores then suffice. Even then a
byte may cost something, since two threads of one core, and all cores of a socket, share caches and
memory bandwidth: earlier moves show how much (``idle_byte``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ... import units
from ..config.choices import Way
from ..config.tables import PrecopySettings as Settings
from ..config.timeouts import Timeouts
from ..messages.predictions import Chosen, Cores, Estimate, Situation, Writing
from ..messages.records import MigrationRow
from ..model.link_rates import PAUSE_RATE
from ..model.steps import MigrationStep

FAULT_BYTE_S = 0.1e-9
"""Write faults cost the job this many seconds per byte: a round protects the page, and the next
write to it faults."""
BETWEEN_S = 0.25
"""This many seconds pass from the end of a round to the pause. In this time the ranks come to their
boundary, and the tracker looks."""
BESIDES_S = 1.5
"""A move takes this many seconds in addition to copying files and memory and to the pause (survey,
sandbox, end), until earlier moves have shown another value."""
LOOK_S = 0.2
"""A short look at a capsule's writes takes this many seconds. ``Writing.rate`` comes from such
looks."""
LEAST_IDLE = 0.5
"""Fewer idle cores count as none. They are idle only between the job's steps, and a copy on them
delays the next step. With 0.15 idle cores of two, `make demo` read at 36 MB/s for 13 s, and the job
lost 2.8 s of these."""
LEAST_SPEED = 25e6
"""The model plans no round below this many bytes per second."""
DOUBT, DOUBT_S = 2.0, 0.5
"""A host counts as empty in time only if it is so even where everything takes DOUBT times as long
as predicted, and DOUBT_S seconds more. The first drains of a lab, of which nothing was learnt yet,
took up to 1.6 times as long (`make bench-move DRAINS=3`)."""
SIMPLER = 1.25
"""The model chooses the stop unless another way loses less by this factor. Its error is some 30 %,
and after a stop the host is empty soonest."""
ROUNDS_MOST = 30
SEEN_BUSY = 0.1
"""A move teaches the cost of a byte only if no core was idle for at least this share of its
reading."""
NEVER_FREE = 0.1
"""A byte always costs at least this share of its CPU time, because single moves may measure too
little by chance."""
TEACHES_S = 1.0
"""Rounds shorter than this many seconds teach no cost of a byte: they last only a few steps."""
LAST = 9
"""The model uses at most this many earlier moves, the newest ones."""
COLD = Writing(0.0, 0, 1.0)


@dataclass(frozen=True)
class Learnt:
    """What earlier moves have shown; a value is None where none has shown it.

    ``per_byte``: seconds of training lost for each byte that a round reads while no core is idle;
    ``idle_byte``: the same on idle cores.
    ``reach``: bytes per second of a round without a limit. ``besides_s``: as :data:`BESIDES_S`.
    """

    per_byte: float | None = None
    reach: float | None = None
    besides_s: float | None = None
    idle_byte: float | None = None


def situation(
    size: int,
    written: Writing | None,
    link: float | None,
    fixed_s: float,
    source: Cores | None,
    destination: Cores | None,
    learnt: Learnt,
    slow_down: float | None = None,
    slower_stop: float = 1.0,
    refill_s: float = 0.0,
    first_fill_s: float = 0.0,
    files_s: float = 0.0,
) -> Situation:
    """Build the model's input from what is known.

    ``link``: None where no rate is known. ``slower_stop``: the factor by which sending in earlier
    pauses took longer than the link's rate says. ``refill_s``: seconds to put an arrived byte in
    its place, where its page went ahead. ``first_fill_s``: the same where no memory went ahead.
    ``files_s``: seconds for the files that go ahead of the memory.
    """
    rate = min(link or PAUSE_RATE, PAUSE_RATE)
    here, there = source or Cores(1.0, 0.0), destination or Cores(1.0, 0.0)
    shared = bool(here.boot) and here.boot == there.boot
    cpu = here.per_byte + there.per_byte if shared else max(here.per_byte, there.per_byte)
    return Situation(
        size=size,
        written=written,
        link=rate,
        extra_s=max(-0.5 / rate, (slower_stop - 1) / rate + refill_s),
        reach=min(rate, learnt.reach or PAUSE_RATE),
        fixed_s=fixed_s,
        besides_s=besides(learnt, files_s),
        per_byte=cpu if learnt.per_byte is None else max(learnt.per_byte, NEVER_FREE * cpu),
        idle=_free_rate(here, there, shared),
        slow_down=slow_down,
        first_fill_s=max(0.0, first_fill_s - refill_s),
        idle_byte=learnt.idle_byte or 0.0,
        cores=min(here.usable, there.usable) / (2 if shared else 1),
    )


def besides(learnt: Learnt, files_s: float) -> float:
    """Seconds that a move takes in addition to copying memory and pause."""
    return (BESIDES_S if learnt.besides_s is None else learnt.besides_s) + files_s


def pause_rate(given: Situation) -> float:
    """Bytes per second of memory in the pause, if the other memory went ahead."""
    return 1 / (1 / given.link + given.extra_s)


def memory_s(given: Situation, left: float) -> float:
    """Seconds of pause for ``left`` bytes of memory. If that is all memory, none went ahead."""
    return left / pause_rate(given) + (left * given.first_fill_s if left >= given.size else 0.0)


def weigh(given: Situation) -> list[Estimate]:
    """The estimates of every way, each at every speed that may be worth it."""
    found = [_estimate(given, Way.STOP, pause_rate(given))]
    for speed in _speeds(given):
        found += [_estimate(given, way, speed) for way in (Way.ROUND, Way.ROUNDS)]
    return found


def choose(
    given: Situation, max_pause: float, within: float | None = None, way: Way = Way.AUTO
) -> Chosen:
    """The way with the least lost training, of those that keep the deadline (``within`` seconds)
    and pause the job for at most ``max_pause``.

    ``way``: if it is not auto, this way is taken in any case, as fast as ``slow_down`` allows.
    """
    all_ways = weigh(given)
    fastest = max(e.speed for e in all_ways if e.way != Way.STOP)
    forced = [e for e in all_ways if e.way == way and e.speed in (fastest, pause_rate(given))]
    estimates = all_ways if way is Way.AUTO else forced
    best, needs = _best(estimates, max_pause, within)
    # Without a look the model assumes that the capsule writes nothing. If it chooses the stop even
    # then, a look cannot change the choice.
    undecided = given.written is None and way is Way.AUTO and best.way != Way.STOP
    because = _because(best, estimates, way, max_pause, within)
    return Chosen(best, because, all_ways, given, undecided, needs)


def at_most(seconds: float) -> float:
    """Seconds that something may take that is predicted to take ``seconds``; see DOUBT."""
    return DOUBT * seconds + DOUBT_S


def max_pause(settings: Settings, timeouts: Timeouts) -> float:
    """The longest pause in seconds: the cluster file's value. Without one it is a tenth of
    timeouts.collective, but at most half of timeouts.freeze."""
    if settings.max_pause is not None:
        return settings.max_pause
    return min(timeouts.collective / 10, timeouts.freeze / 2)


def pays(found: int, next_finds: float, per_byte: float, stop_rate: float) -> bool:
    """Whether a round over ``found`` bytes saves more pause than it costs."""
    return found * per_byte < (found - next_finds) / stop_rate


def lost_per_byte(given: Situation, speed: float) -> float:
    """Seconds that the job loses for each byte that is read at this speed."""
    busy = uncovered(given, speed)
    return given.per_byte * busy + given.idle_byte * (1 - busy)


def limit(given: Situation, chosen: Estimate) -> float:
    """Bytes per second that the rounds may reach; infinite if they have no limit."""
    return chosen.speed if chosen.speed < given.reach else float("inf")


def uncovered(given: Situation, speed: float) -> float:
    """The share of the reading for which no core is idle."""
    return max(0.0, 1 - given.idle / speed)


def learn(rows: Iterable[MigrationRow], job: str, pair: frozenset[str]) -> Learnt:
    """Learn from earlier moves, newest first. Moves of this job between these hosts come first. If
    they do not show a value, other moves of the job or between the hosts may show it."""
    done = [row for row in rows if row.state == MigrationStep.DONE.value and row.kind == "move"]
    here = [row for row in done if {row.source, row.destination} == pair]
    own, both = (
        [row for row in group if row.capsule.partition("/")[0] == job] for group in (done, here)
    )
    per_byte = _first(map(_per_byte, each) for each in (both, own, here))
    reach = _first(map(_reach, each) for each in (both, here))
    besides = _first(map(_besides, each) for each in (both, own, here, done))
    return Learnt(per_byte, reach, besides, _first(map(_idle_byte, each) for each in (both, own)))


# ---- the model ---------------------------------------------------------------------------------


def _estimate(given: Situation, way: Way, speed: float) -> Estimate:
    rounds = {Way.STOP: 0, Way.ROUND: 1}.get(way, ROUNDS_MOST)
    each, left, slower, copying = lost_per_byte(given, speed), float(given.size), 0.0, 0.0
    for number in range(rounds):
        took = left / speed
        again = written_in(given, took + BETWEEN_S)
        if number and not pays(int(left), again, each, pause_rate(given)):
            break
        slower += left * each + FAULT_BYTE_S * again
        copying += took
        left = again
    pause = given.fixed_s + memory_s(given, left)
    return Estimate(
        way.value,
        speed,
        slower + pause,
        pause,
        given.besides_s + copying + pause,
        slower,
        uncovered(given, speed) if rounds else 1.0,
        int(left),
    )


def written_in(given: Situation, seconds: float) -> float:
    """Bytes that differ after ``seconds``.

    The model: the capsule writes to random places of a set of fixed size, and a place that is
    written again counts once. A short and a long look together give the size of the set.
    """
    seen = given.written or COLD
    most, short = float(given.size), seen.rate * LOOK_S
    if not short or not seen.set or seen.seconds <= LOOK_S:
        return min(most, seen.rate * seconds)
    ratio = min(seen.set / short, seen.seconds / LOOK_S * 0.999)
    slow, fast = 1e-6, 100.0  # share of the set per second
    for _ in range(40):
        middle = math.sqrt(slow * fast)
        if math.expm1(-middle * seen.seconds) / math.expm1(-middle * LOOK_S) > ratio:
            slow = middle
        else:
            fast = middle
    whole = seen.set / -math.expm1(-slow * seen.seconds)
    return min(most, seen.rate * seconds, whole * -math.expm1(-slow * seconds))


def _speeds(given: Situation) -> list[float]:
    """The speeds to weigh: full speed, and what idle cores allow; ``slow_down`` limits both."""
    most = given.reach
    if given.slow_down is not None and given.per_byte > 0:
        most = min(most, max(given.idle, given.slow_down / given.per_byte, LEAST_SPEED))
    speeds = [most]
    if LEAST_SPEED <= given.idle < most:
        speeds.append(given.idle)
    return speeds


def _free_rate(here: Cores, there: Cores, shared: bool) -> float:
    """Bytes per second for which the idle cores of both hosts suffice; 0.0 without idle cores."""
    if min(here.idle, there.idle) < LEAST_IDLE:
        return 0.0
    if shared:
        return min(here.idle, there.idle) / (here.per_byte + there.per_byte)
    return min(here.idle / here.per_byte, there.idle / there.per_byte)


# ---- the choice --------------------------------------------------------------------------------


def _best(
    estimates: Sequence[Estimate], max_pause: float, within: float | None
) -> tuple[Estimate, float | None]:
    """The best estimate, and the time that the quickest way may take if none is sure to empty the
    host ``within`` so many seconds."""
    pool = [e for e in estimates if within is None or at_most(e.empty_s) <= within]
    if not pool:
        soonest = min(estimates, key=lambda e: (e.empty_s, e.lost_s))
        return soonest, at_most(soonest.empty_s)
    pool = [e for e in pool if e.pause_s <= max_pause] or [min(pool, key=lambda e: e.pause_s)]
    best = min(pool, key=lambda e: (round(e.lost_s, 2), e.empty_s))
    for each in pool:
        if each.way == Way.STOP and each.lost_s <= SIMPLER * best.lost_s:
            return each, None
    return best, None


def _because(
    best: Estimate,
    estimates: Sequence[Estimate],
    way: Way,
    max_pause: float,
    within: float | None,
) -> str:
    if way is not Way.AUTO:
        return "asked for"
    others = [e for e in estimates if e.way != best.way]
    least = min(others, key=lambda e: e.lost_s)
    text = f"{least.way} would cost {units.pause(least.lost_s)}"
    if least.lost_s < best.lost_s / SIMPLER:
        if within is not None and at_most(least.empty_s) > within:
            return f"{text}, but may empty the host after {units.pause(at_most(least.empty_s))}"
        if least.pause_s > max_pause:
            return f"{text}, but pause for {units.pause(least.pause_s)} (precopy.max_pause)"
    return text


# ---- what earlier moves teach ------------------------------------------------------------------


def _first(groups: Iterable[Iterable[float | None]]) -> float | None:
    for group in groups:
        if known := [value for value in group if value is not None][:LAST]:
            return median(known)
    return None


def _copying_s(row: MigrationRow) -> float:
    return sum(p.seconds for p in row.phases if p.name == "pre-copy")


def _per_byte(row: MigrationRow) -> float | None:
    """Seconds lost per byte of the rounds, for a move with busy cores; None if it shows none."""
    seen = row.precopy
    if seen is None or seen.slow_down is None or not seen.bytes or not seen.round:
        return None
    share = row.predicted.uncovered if row.predicted is not None else 1.0
    if share < SEEN_BUSY or _copying_s(row) < TEACHES_S:
        return None
    return max(0.0, seen.slow_down) * _copying_s(row) / seen.bytes / share


def _idle_byte(row: MigrationRow) -> float | None:
    """Seconds lost per byte of the rounds, for a move on idle cores; None if it shows none."""
    seen, cost = row.precopy, row.cost
    if seen is None or not seen.bytes or cost is None or cost.slower_s is None:
        return None
    if row.predicted is None or row.predicted.uncovered >= SEEN_BUSY:
        return None
    return max(0.0, cost.slower_s) / seen.bytes


def _reach(row: MigrationRow) -> float | None:
    """Bytes per second of a move's rounds that nothing limited; None if it shows none."""
    seen, planned = row.precopy, row.predicted
    took = _copying_s(row)
    if seen is None or not seen.round or not took or planned is None or planned.limited:
        return None
    return seen.bytes / took


def _besides(row: MigrationRow) -> float | None:
    if row.predicted is None or not row.predicted.how:
        return None
    files_s = sum(p.seconds for p in row.phases if p.name == "files ahead")
    return max(0.0, row.seconds - files_s - _copying_s(row) - row.frozen_s)
