# SPDX-License-Identifier: Apache-2.0
"""How a capsule's memory comes to the destination, most of it while the job trains.

Order: ``choose_way`` picks the way (cost/model.py). ``run`` makes the rounds of that way; with the
way auto, it makes a further one only if that saves more than it costs. If rounds shrink,
``iterate_until_freeze`` makes more until the orchestrator asks for the freeze. When CRIU holds the
tree, ``FinalDirtySet`` sends the rest and the table of all pages, and the page filter hides them
from CRIU.

What one round did not send, the next round sends; what no round sent, the final dirty set has. So
any round may be interrupted, and with no round at all the final dirty set is all memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from .... import units
from ....criu_glue.memory.source.pulling import PullStopped
from ....criu_glue.memory.source.tracker import MemoryTracker
from ....errors import LiveshiftError, StepFailed
from ...config.choices import Way
from ...config.cluster import PrecopySettings as Settings
from ...cost import model as cost
from ...messages import Chosen, Situation, StartPrecopy
from ...model.link_rates import PAUSE_RATE
from ...wire import Lanes, Wants
from ..host.running_capsule import RunningCapsule
from .capsule_tracker import follow
from .forecast import measure_writing
from .progress import RoundsReporter
from .throttle import Throttle

log = logging.getLogger("liveshift.precopy")

ENOUGH_S = 0.02
"""Memory that takes fewer seconds than this during the freeze is not worth a round."""

SHRINKS = 0.9
STALE = 2
"""Rounds end after ``STALE`` rounds in a row that each found more than ``SHRINKS`` of what the one
before had found: this is the job's working set. After the first round, which found all memory, one
such round is enough: a job that writes all its memory pays for each round and gains nothing."""

BETWEEN_ROUNDS_S = 0.2
"""``iterate_until_freeze`` waits this many seconds before each round. A round costs the job a fault
for each page that it writes again. The pause avoids a round just before the freeze, which brings
little."""

SHORT_LOOK_S = 0.6
"""Seconds of the long look at what a capsule writes, if the choice of a way waits for it."""


@dataclass
class CopiedAhead:
    """The result of the rounds; sizes in bytes."""

    rounds: int = 0
    sent: int = 0
    dirty: int = 0
    """Bytes that the last round found rewritten."""
    wanted: int = 0
    """Bytes sent because the destination lacked a page that the source had only named."""
    lost: float | None = None
    """The share of its speed that the job lost; None: not known."""
    untracked: dict[int, str] = field(default_factory=dict)
    """Processes (inner pids) that the final dirty set must read in full, and why."""


class PrecopyRounds:
    """The pre-copy of one capsule; it reports its progress to ``reporter``."""

    def __init__(
        self,
        resident: RunningCapsule,
        lanes: Lanes,
        settings: Settings,
        reporter: RoundsReporter,
        wants: Callable[[], Wants],
        rate: float = 0.0,
        tracker: MemoryTracker | None = None,
        way: Way | None = None,
    ) -> None:
        """``wants`` asks the destination which of the pages that were only named it lacks.
        ``rate``: measured bytes per second of the lanes, 0.0 if not measured. Rounds are throttled,
        so they show less than that. ``tracker``: one that was lent, which goes on when the rounds
        are closed; None: the rounds have their own. ``way``: where ``choose_way`` is not called;
        None: rounds."""
        self._stop = threading.Event()  # no round for now
        self._pausing = threading.Lock()
        self._paused = False  # whether a capsule of the job will soon be frozen
        self._over = threading.Event()  # no round any more
        self._until = float("inf")  # no round continues after this (monotonic seconds)
        self._sooner = float("inf")  # no round except the first continues after this
        self._must_end = False  # whether a deadline may need more than the throttle allows
        self._stopped = self._no_more_rounds
        self._lent = tracker is not None
        self.tracker = tracker or follow(resident)
        self.tracker.stopped = lambda: self._stopped()
        self.lanes = lanes
        self._wants = wants
        by_collectives = resident.rate.usual() > 0
        usual = resident.rate if by_collectives else resident.computes
        self._throttle = Throttle(
            resident.collectives if by_collectives else resident.run_time.progress,
            usual.usual(),
            settings.slow_down,
            sleep=self._sleep,
            gap=usual.gap(),
            sees_all=by_collectives,
            least=self._speed_needed,
        )
        self._limit = settings.rounds
        self._way, self._forced = way or Way.ROUNDS, True
        self.chosen: Chosen | None = None
        self._listed = 0  # bytes that this round must send
        self._sent = 0  # bytes that the lanes had sent before this round
        self._not_worth = False  # whether a further round costs more than it saves
        self._before = 0  # bytes that the round before had to send
        self._reporter = reporter
        self._iterating: threading.Thread | None = None
        self._broken: LiveshiftError | None = None  # what ended iterate_until_freeze
        self._ahead = CopiedAhead()
        self.began = False
        """Whether a round has begun. None does if all memory goes while the job is paused."""
        self._under_way = False  # whether a round is made now
        self._rate = rate

    def choose_way(self, plan: Situation, max_pause: float, within: float, way: Way) -> Chosen:
        """Choose the way. ``within``: seconds until the host must be empty, 0 without a
        deadline."""
        rate = min(self._rate or PAUSE_RATE, PAUSE_RATE)
        given = msgspec.structs.replace(plan, link=rate, reach=min(rate, plan.reach))
        self.chosen = cost.choose(given, max_pause, within or None, way)
        self._way, self._forced = Way(self.chosen.estimate.way), way is not Way.AUTO
        self._throttle.set_limit(cost.limit(given, self.chosen.estimate))
        self._must_end = self._must_end or within > 0
        return self.chosen

    @property
    def on_idle_cores(self) -> bool:
        """Whether the idle cores suffice for the chosen rounds, and no deadline presses."""
        if self.chosen is None or self._way is Way.STOP or self._must_end:
            return False
        return self.chosen.estimate.uncovered == 0.0

    def run(self, until: float) -> CopiedAhead:
        """Send memory in the chosen way, until ``until`` (monotonic seconds) at the latest.
        Raises StepFailed if the destination refuses."""
        self._until = until
        if self._way is Way.STOP:
            self._reporter.stopping(self.chosen.given.size if self.chosen else 0)
        elif self._way is Way.ROUND:
            self._round()
        else:
            self._until_they_shrink_no_more()
        self._reporter.done()
        return replace(self._ahead, lost=self._throttle.lost())

    def _until_they_shrink_no_more(self) -> None:
        before, stale = float("inf"), 0
        while self._ahead.rounds < self._limit and stale < STALE and self._round():
            dirty = self._ahead.dirty
            if dirty <= ENOUGH_S * self._rate:
                break
            if self._ahead.rounds == 2 and SHRINKS * before < dirty < before / SHRINKS:
                break
            stale = stale + 1 if dirty > SHRINKS * before else 0
            before = dirty

    def iterate_until_freeze(self) -> None:
        """Make further rounds in a thread, so that little is left for the freeze. Does nothing
        if the chosen way has no further rounds."""
        if self._way is not Way.ROUNDS:
            return
        self._until = float("inf")
        with self._pausing:
            if self._paused:
                self._stop.set()
            self._iterating = threading.Thread(target=self._iterate, name="pre-copy", daemon=True)
            self._iterating.start()

    def end_sooner(self, seconds: float) -> None:
        """End the rounds in ``seconds``, and read as fast as that needs: the host must soon be
        empty. The first round always ends: without it, the job would be paused while the rest is
        sent, and the host would be empty no sooner. Any thread may call this."""
        self._sooner = min(self._sooner, time.monotonic() + seconds)
        self._must_end = True

    def cancel(self) -> None:
        """Begin no further round, and interrupt one that is under way."""
        self._over.set()
        self._stop.set()

    def pause(self) -> None:
        """A capsule of the job will soon be frozen, perhaps this one: pause the rounds of
        ``iterate_until_freeze``, also if they begin only later. Other rounds go on."""
        with self._pausing:
            self._paused = True
            if self._iterating is not None:
                self._stop.set()

    def resume(self) -> None:
        """This capsule is not frozen now after all: resume the rounds, unless they are over."""
        with self._pausing:
            self._paused = False
            self._stop.clear()

    def stop(self) -> bool:
        """As :meth:`cancel`, and return when all that the rounds sent has arrived. Returns whether
        a round was under way. Raises the error that ended them: the freeze would fail too. A second
        call does no harm."""
        interrupted = self._under_way
        self.cancel()
        if self._iterating is not None:
            self._iterating.join()
            self._iterating = None
        if self._broken is not None:
            raise self._broken
        return interrupted

    def _no_more_rounds(self) -> bool:
        stopped = self._over.is_set() or self._stop.is_set()
        until = min(self._until, self._sooner) if self._ahead.rounds else self._until
        return stopped or time.monotonic() > until

    def _sleep(self, seconds: float) -> None:
        """Sleep for the throttle; end at once when rounds are stopped, because the freeze does not
        wait."""
        left = min(self._until, self._sooner) - time.monotonic()
        self._stop.wait(max(0.0, min(seconds, left)))

    def _iterate(self) -> None:
        try:
            while not self._over.wait(BETWEEN_ROUNDS_S):
                if not self._stop.is_set() and not self._round() and self._not_worth:
                    break
        except LiveshiftError as error:
            log.warning("rounds that keep memory fresh have ended: %s", error)
            self._broken = error
        except Exception:  # the final dirty set has what these rounds would have sent
            log.exception("rounds that keep memory fresh have ended")
            try:
                self.lanes.finish()  # it must not be overtaken by what was on its way
            except Exception as error:
                self._broken = StepFailed("precopy", f"the lanes of memory failed: {error}")

    def _decide_on_list(self, dirty: int) -> None:
        """A round has listed ``dirty`` bytes and not sent them yet. Raises PullStopped if sending
        them costs the job more than it shortens the pause."""
        before, self._before = self._before, dirty
        self._listed = dirty
        if self.chosen is not None and not self._forced and self._ahead.rounds:
            given, speed = self.chosen.given, self.chosen.estimate.speed
            each = self._throttle.per_byte
            if each is None:
                each = cost.lost_per_byte(given, speed)
            then = cost.written_in(given, dirty / speed + cost.BETWEEN_S)
            if before:
                then = max(then, dirty * min(1.0, dirty / before))
            if not cost.pays(dirty, then, each, cost.pause_rate(given)):
                self._not_worth = True
                self._reporter.stopping(dirty)
                raise PullStopped
        self._reporter.listed(dirty)

    def _speed_needed(self) -> float:
        """Bytes per second that this round needs to end before its deadline; 0 without one."""
        if not self._must_end:
            return 0.0
        left = min(self._until, self._sooner) - time.monotonic()
        sent = self.lanes.bytes - self._sent
        return max(0, self._listed - sent) / left if left > 0 else float("inf")

    def _round(self) -> bool:
        """Make one round; False if it was interrupted: the next round then sends the rest."""
        self.began = self._under_way = True
        try:
            return self._make_round()
        finally:
            self._under_way = False

    def _make_round(self) -> bool:
        self._sent = self.lanes.bytes

        def sink(chunk: memoryview, release: Callable[[], None]) -> None:
            size = len(chunk)
            self.lanes.pages(chunk, release)
            self._reporter.moved(size)

        ahead = self._ahead
        self._reporter.round_began(ahead.rounds + 1)
        try:
            done = self.tracker.round(sink, self._throttle.account, self._decide_on_list)
            self.lanes.finish()
            wanted = self._send_wanted()
        except PullStopped:
            # Chunks on several lanes overtake each other. These must arrive before the next round
            # reads and sends the same pages again.
            self.lanes.finish()
            return False
        ahead.rounds += 1
        ahead.sent += done.sent_bytes + wanted
        ahead.dirty = done.dirty_bytes
        ahead.wanted += wanted
        ahead.untracked = done.untracked
        self._reporter.round_ended(done.dirty_bytes, self._throttle.lost())
        return True

    def _send_wanted(self) -> int:
        """Ask once for wanted pages and send those that still exist; return their bytes."""
        wanted = self._wants()
        sent = self.tracker.again(wanted, self.lanes.pages) if wanted else 0
        if sent:
            self.lanes.finish()
        return sent

    def complete(self) -> None:
        """Return when the destination has all pages, also those that were only named."""
        self.lanes.finish()
        while self._send_wanted():
            pass

    def interrupt_on(self, stopped: Callable[[], bool]) -> None:
        """From now on only ``stopped`` interrupts the tracker; what stopped the rounds no longer
        does."""
        self._stopped = stopped

    def close(self) -> None:
        """End the rounds, and the tracking of the job's writes if the tracker was not lent. A
        second call does no harm."""
        with contextlib.suppress(LiveshiftError):
            self.stop()
        self.lanes.close()
        if not self._lent:
            self.tracker.close()


def choose_way(
    rounds: PrecopyRounds, request: StartPrecopy, resident: RunningCapsule, asked: float
) -> None:
    """Choose the way for a request that came at ``asked`` (monotonic seconds). Look at what the
    capsule writes only if that can matter."""

    def choose(situation: Situation) -> Chosen:
        left = max(0.01, request.within - (time.monotonic() - asked)) if request.within else 0.0
        return rounds.choose_way(situation, request.max_pause, left, Way(request.way))

    if (plan := request.plan) is None or not choose(plan).undecided:
        return
    written = measure_writing(resident, 1, SHORT_LOOK_S)
    if written is not None:
        choose(msgspec.structs.replace(plan, written=written))


def describe_rounds(done: CopiedAhead) -> str:
    """A text such as "3 rounds, 12.0 MB rewritten in the last, the job 5 % slower"."""
    if not done.rounds and not done.sent:
        return "no round: all memory goes while the job is paused"
    many = f"{done.rounds} round{'s' if done.rounds != 1 else ''}"
    words = f"{many}, {units.size(done.dirty)} rewritten in the last"
    if done.lost is not None:
        words += f", the job {done.lost:.0%} slower"
    if done.wanted:
        words += f", {units.size(done.wanted)} sent that the destination no longer had"
    if done.untracked:
        pids, why = units.some(done.untracked, 1), next(iter(done.untracked.values()))
        words += f"; read in full while the job is paused: process {pids} ({why})"
    return words
