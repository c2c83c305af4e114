# SPDX-License-Identifier: Apache-2.0
"""A host's part of the quiesce: works the gates of a job's processes through their pages.

This is the agent's counterpart of collective_clock.py. Nothing here waits; the caller calls again.
The job's user can write the interposer pages. A page that can't be read or written makes the
attempt fail, and ``obstacles`` says so; the gates of the other processes still open again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...interposer.layout import MISSING_CLOCKS, CommunicatorState, WantedState
from ...interposer.orders import OrderedPage
from ...interposer.page import Clock, Communicator, PageError, Waiting
from ..model.collective_clock import ClockReport, Pair
from .services import who
from .thread_places import places

THREADS = 3
"""So many threads of a process are named: a torch process has hundreds, most asleep in a pool."""
_READINGS = 3  # tries to read a page that changes meanwhile; after them the caller looks again


@dataclass(frozen=True, slots=True)
class GateObstacle:
    """A reason, in words, why there is no boundary. ``fatal``: this attempt can't succeed."""

    pid: int
    rank: int | None
    text: str
    fatal: bool

    def __str__(self) -> str:
        return f"{who(self.rank, self.pid)}: {self.text}"


@dataclass(slots=True, eq=False)
class _Process:
    page: OrderedPage
    begun: dict[int, int] | None = None  # numbers by clock id; None: not armed, or a group open
    missing_clocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Clocks that the process must make: clock id → (target, row of the communicator)."""
    unidentified: int | None = None  # count of unidentified operations when it was armed
    aimed: int = -1  # version of the order that it has
    problem: str = ""  # why its page can't be used; then it is never at its targets


class HostGate:
    """The gates of a job's processes on this host, closed for one attempt. It owns the pages and
    closes them.

    ``attempt`` must differ from every earlier attempt on these pages. The gates open by themselves
    after ``lease_ms`` without a :meth:`heartbeat`. ``alive`` says whether a page's process still
    exists; an ended process is dropped with its page.
    """

    def __init__(
        self,
        attempt: int,
        lease_ms: int,
        limit_ms: int,
        alive: Callable[[OrderedPage], bool] = lambda _: True,
    ) -> None:
        self._attempt, self._lease_ms, self._limit_ms = attempt, lease_ms, limit_ms
        self._alive = alive
        self._processes: list[_Process] = []
        self._want = WantedState.ARMED
        self._version = 0
        self._targets: dict[int, int] = {}
        self._pairs: dict[int, Pair] = {}  # by id of a clock that a process may have to make
        self._reported: set[int] = set()  # clocks that the orchestrator knows from us

    @property
    def want(self) -> WantedState:
        """The order that the gates were given last."""
        return self._want

    @property
    def pages(self) -> list[OrderedPage]:
        """The pages of the processes that still exist."""
        return [process.page for process in self._living()]

    def admit(self, page: OrderedPage) -> None:
        """Add a process and close its gate at once."""
        process = _Process(page)
        self._processes.append(process)
        with self._guarded(process):
            process.unidentified = int(page.answer()["unidentified"])
            page.arm(self._attempt, self._lease_ms, self._limit_ms)

    def adopt(self, page: OrderedPage) -> None:
        """Add a process whose gate was closed elsewhere, only to give it signs of life."""
        self._processes.append(_Process(page))

    def announced(self) -> ClockReport | None:
        """Return the report with version 0, what has begun here; None while a group is being begun.

        The report is exact: operations that are announced later wait for targets.
        """
        numbers: dict[int, int] = {}
        pairs: dict[int, Pair] = {}
        for process in self._living():
            if process.begun is None and not self._read_begun(process):
                return None
            self._note_begun(numbers, process)
        for process in self._living():
            with self._guarded(process):
                clocks = [clock for clock in process.page.clocks() if clock.id in numbers]
                self._note_pairs(pairs, clocks, process)
        self._reported |= numbers.keys()
        return ClockReport(0, numbers, False, pairs)

    def aim(
        self, version: int, targets: Mapping[int, int], pairs: Mapping[int, Pair] | None = None
    ) -> None:
        """Let operations up to the targets pass; ignore a version that is not newer than the last.

        ``pairs``: clocks among the targets that a process here may have to make first.
        """
        if version <= self._version:
            return
        self._version, self._want = version, WantedState.TARGET
        self._targets.update(targets)
        self._pairs.update(pairs or {})
        for process in self._living():
            if process.begun is not None or self._read_begun(process):
                self._give_targets(process)

    def report(self) -> ClockReport:
        """Return the ClockReport for the orchestrator. Call this after :meth:`announced`.

        If a process has made a clock that other processes here have already, it gets the target at
        once, even if the gates were closed; then this is no boundary yet.
        """
        reached = True
        numbers: dict[int, int] = {}
        pairs: dict[int, Pair] = {}
        for process in self._living():
            if process.begun is None:
                reached = self._read_begun(process) and self._want != WantedState.ARMED and reached
                self._note_begun(numbers, process)
            if process.begun is not None and process.aimed < 0 and self._want >= WantedState.TARGET:
                # This process appeared after the others got their targets.
                reached, self._want = False, WantedState.TARGET
                self._give_targets(process)
            with self._guarded(process):
                reached = self._read_numbers(process, numbers, pairs) and reached
            reached = reached and not process.problem
        self._reported |= numbers.keys()
        beyond = any(number > self._targets.get(clock, 0) for clock, number in numbers.items())
        return ClockReport(
            self._version, numbers, reached and not beyond and self._version > 0, pairs
        )

    def close(self) -> None:
        """Let nothing pass any more; if all targets were reached, they are the boundary.

        A process stays armed if we don't know what it has begun: :meth:`report` asks it first.
        """
        self._want = WantedState.CLOSED
        for process in self._living():
            if process.begun is None:
                continue
            with self._guarded(process):
                process.page.give(WantedState.CLOSED, self._attempt, self._version)
                process.aimed = self._version

    def heartbeat(self) -> None:
        """Renew the lease of the gates; the caller must do so several times within the lease."""
        for process in self._living():
            with self._guarded(process):
                process.page.heartbeat()

    def release(self) -> None:
        """Close our access to the pages; the gates stay as they are."""
        for process in self._processes:
            with suppress(OSError):
                process.page.close()
        self._processes = []

    def pending_returns(self, host_pid: Callable[[OrderedPage], int | None]) -> list[str]:
        """Say in words from which operations the processes must still return. ``host_pid`` returns
        the pid of a page's process in our pid namespace, or None if it is not known."""
        found: list[str] = []
        for process in self._living():
            with self._guarded(process):
                page = process.page
                missing = self._missing_clocks(page, {clock.id for clock in page.clocks()})
                unmade = [(self._pairs[clock], target) for clock, (target, _) in missing.items()]
                found += _pending_returns(page, self._targets, unmade, host_pid(page))
        return found

    def obstacles(self) -> list[GateObstacle]:
        """List what prevents a boundary, apart from pending operations."""
        found = []
        for process in self._living():
            notes: list[tuple[str, bool]] = []
            with self._guarded(process):
                notes = _notes(process, self._attempt)
            if process.problem:
                notes = [(process.problem, True)]
            page = process.page
            found += [GateObstacle(page.pid, page.rank, text, fatal) for text, fatal in notes]
        return found

    def _living(self) -> Iterator[_Process]:
        for process in list(self._processes):
            if self._alive(process.page):
                yield process
                continue
            self._processes.remove(process)
            with suppress(OSError):
                process.page.close()

    @contextmanager
    def _guarded(self, process: _Process) -> Iterator[None]:
        """Record a page's first PageError as its process's problem."""
        try:
            yield
        except PageError as error:
            process.problem = process.problem or error.message

    def _read_begun(self, process: _Process) -> bool:
        with self._guarded(process):
            if process.page.answer()["groups"] != 0:
                return False
            process.begun = {clock.id: clock.announced for clock in process.page.clocks()}
        return True

    def _give_targets(self, process: _Process) -> None:
        with self._guarded(process):
            clocks = process.page.clocks()
            wanted = [(clock, self._targets.get(clock.id, 0)) for clock in clocks]
            process.page.set_targets({c.row: t for c, t in wanted if c.target != t})
            process.missing_clocks = self._missing_clocks(
                process.page, {clock.id for clock in clocks}
            )
            process.page.set_missing_clocks(
                (clock, *missing) for clock, missing in process.missing_clocks.items()
            )
            process.page.give(WantedState.TARGET, self._attempt, self._version)
            process.aimed = self._version

    def _missing_clocks(self, page: OrderedPage, made: set[int]) -> dict[int, tuple[int, int]]:
        """Return the clocks that a process must make: its ends of pairs that began elsewhere."""
        if self._pairs.keys() <= made:
            return {}
        living = {c.id: c for c in page.communicators() if c.state != CommunicatorState.ENDED}
        return {
            clock: (self._targets[clock], living[communicator].row)
            for clock, (communicator, *ends) in self._pairs.items()
            if clock not in made
            and communicator in living
            and living[communicator].rank in ends
            and self._targets.get(clock)
        }

    def _read_numbers(
        self, process: _Process, numbers: dict[int, int], pairs: dict[int, Pair]
    ) -> bool:
        """Add what the orchestrator doesn't know; return whether the targets are reached."""
        page = process.page
        before = page.answer()
        for _ in range(_READINGS):
            clocks, after = page.clocks(), page.answer()
            if before["changes"] == after["changes"]:
                break
            before = after
        else:
            clocks, after = page.clocks(), page.answer()
        reached = (
            before["changes"] == after["changes"]
            and before["groups"] == after["groups"] == 0
            and before["untracked"] == after["untracked"] == 0
            and after["reopened"] != self._attempt
            and process.aimed == self._version
        )
        behind = False
        self._note_pairs(pairs, clocks, process)
        for clock in clocks:
            target = self._targets.get(clock.id, 0)
            behind = behind or (process.aimed >= 0 and clock.target != target)
            number = max(clock.raised, clock.returned)
            if clock.id not in self._reported:
                self._note(numbers, clock.id, 0)
            if number > target:
                self._note(numbers, clock.id, number)
            reached = reached and clock.returned == target >= clock.raised
        if process.missing_clocks:
            missing = process.missing_clocks.keys() - {clock.id for clock in clocks}
            reached = reached and not missing
            # The page has room for MISSING_CLOCKS clocks at a time; the next ones may fit in now.
            behind = behind or MISSING_CLOCKS < len(process.missing_clocks) > len(missing)
        if behind:
            self._want = WantedState.TARGET
            self._give_targets(process)
        return reached and not behind

    def _note_begun(self, numbers: dict[int, int], process: _Process) -> None:
        if process.begun is not None:
            for clock, number in process.begun.items():
                self._note(numbers, clock, number)

    def _note_pairs(
        self, pairs: dict[int, Pair], clocks: Iterable[Clock], process: _Process
    ) -> None:
        """Add the pairs of clocks that were not reported yet and have only one end here."""
        new = [c for c in clocks if c.sender >= 0 and c.id not in self._reported]
        ids = {made.row: made.id for made in process.page.communicators()} if new else {}
        for clock in new:
            if pairs.pop(clock.id, None) is None and clock.communicator in ids:
                pairs[clock.id] = (ids[clock.communicator], clock.sender, clock.receiver)
            # Otherwise both ends are here, and the orchestrator needs no pair.

    def _note(self, numbers: dict[int, int], clock: int, number: int) -> None:
        numbers[clock] = max(number, numbers.get(clock, 0))


def _notes(process: _Process, attempt: int) -> list[tuple[str, bool]]:
    page, notes = process.page, []
    answer = page.answer()
    if answer["reopened"] == attempt:
        notes.append(("its gate opened by itself: the agent had been silent for its lease", True))
    communicators = page.communicators()
    grown = answer["unidentified"] - (process.unidentified or 0)
    if process.unidentified is not None and grown > 0:
        notes.append(
            (
                f"it made {grown} operations on communicators whose members do not agree on an"
                " identity",
                True,
            )
        )
    for made in communicators:
        if made.state == CommunicatorState.LIVE and made.id == 0 and grown <= 0:
            # Fatal if operations were ever made on such a one: some may be in flight, unseen.
            text = f"the members of {_name(made)} do not agree on its identity; nothing counts it"
            notes.append((text, answer["unidentified"] > 0))
    if page.nccl_unseen():
        # Not fatal while a communicator may be in the making: then something is untracked.
        text = "NCCL is used on communicators whose members do not agree on an identity"
        notes.append((text, not answer["untracked"]))
    if answer["groups"]:
        notes.append(("a group of operations is being begun", False))
    if answer["untracked"]:
        text = f"{answer['untracked']} communications are in flight and no clock counts them"
        notes.append((text, False))
    return notes


def _pending_returns(
    page: OrderedPage,
    targets: Mapping[int, int],
    unmade: Sequence[tuple[Pair, int]],
    host_pid: int | None,
) -> list[str]:
    """Texts such as "rank 1 owes operation 7 of 9 on gloo communicator 1, last gloo.allreduce
    (threads: python 1002: asleep in futex)". A process that "is inside" waits for its peers."""
    clocks = page.clocks()
    behind = [clock for clock in clocks if clock.returned < targets.get(clock.id, 0)]
    if not behind and not unmade:
        return []
    communicators = page.communicators()
    names = {made.row: _name(made) for made in communicators}
    by_id = {made.id: _name(made) for made in communicators}
    rows = {clock.row: clock for clock in clocks}
    at_gate = {w.tid: _at_gate(w, rows, names, page.kinds) for w in page.waiting()}
    threads = places(host_pid, at_gate, {clock.owner for clock in behind})[:THREADS]
    where = ", ".join(f"{p.name} {p.tid}: {p.where}" for p in threads) or "not known"

    def pending(what: str, first: int, target: int, on: str, pair: Sequence[int], last: str) -> str:
        sender, receiver = pair
        ends = f" {sender} → {receiver}" if sender >= 0 else ""  # -1 for collectives
        return (
            f"{who(page.rank, page.pid)} {what} operation {first} of {target} on {on}{ends},"
            f" last {last} (threads: {where})"
        )

    return [
        pending(
            "is inside" if _passed(clock, page.waiting()) > clock.returned else "owes",
            clock.returned + 1,
            targets[clock.id],
            names.get(clock.communicator, f"communicator {clock.id:016x}"),
            (clock.sender, clock.receiver),
            _kind(page.kinds, clock.kind),
        )
        for clock in behind
    ] + [
        pending("owes", 1, target, by_id.get(of, f"communicator {of:016x}"), ends, "none")
        for (of, *ends), target in unmade
    ]


def _passed(clock: Clock, waiting: Sequence[Waiting]) -> int:
    """Return how many operations are past the gate; threads at the gate have announced theirs."""
    return clock.announced - sum(w.clock == clock.row for w in waiting)


def _at_gate(
    thread: Waiting, clocks: Mapping[int, Clock], names: Mapping[int, str], kinds: Sequence[str]
) -> str:
    clock = clocks.get(thread.clock)
    on = names.get(clock.communicator, "?") if clock is not None else "?"
    more = f" and {thread.wants - 1} more" if thread.wants > 1 else ""
    return f"at the gate ({thread.state}) with {_kind(kinds, thread.kind)} on {on}{more}"


def _kind(kinds: Sequence[str], index: int) -> str:
    return kinds[index] if index < len(kinds) else f"operation {index}"


def _name(made: Communicator) -> str:
    return made.name or f"{made.library.name.lower()} communicator {made.ordinal}"


def page_problem(path: Path, error: PageError) -> GateObstacle:
    """Return the obstacle for a page that can't be opened (damaged, or of another layout)."""
    pid = int(path.name) if path.name.isascii() and path.name.isdecimal() else 0
    return GateObstacle(pid, None, error.message, True)
