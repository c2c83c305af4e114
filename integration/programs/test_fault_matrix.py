# SPDX-License-Identifier: Apache-2.0
"""The short form of the matrix's tables of moves and of forced ways (`make fault-matrix` plays all
tables as a whole), and their watcher. `test_snapshot_harms.py` plays the table of snapshots.

The short form meets every fault and every point at least once. `make test` plays EACH_TIME of it,
`make test-long` the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fault_matrix import cell as playing
from fault_matrix import forced_ways, held, table, verdict
from fault_matrix.cell import play
from fault_matrix.scene import Scene
from fault_matrix.table import Cell
from fault_matrix.watcher import COMING, FROZEN, IMAGE, OLD, RUNNING, Watcher
from lab_session import LabSession, NewLab, eventually
from machine_needs import needs_fact
from reference_runs import References

from liveshift.launcher import lab as labs
from liveshift.runtime.daemon.faultpoints import POINTS

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

EACH_TIME = {
    "orchestrator.committed/orchestrator-killed",
    "source.dumped/source-agent-killed",
    "source.dumped/dump-killed",
    "source.locked/capsule-killed-at-source",
    "orchestrator.frozen/cut-source-orchestrator",
    "destination.claiming/destination-cut-off",
    "source.dumped/source-power-lost",
    "source.promised/state-full",
    "source.locked/out-of-memory",
    "source.dumped/bits-flipped",
    "destination.granted/destination-agent-stalled",
    "stop:source.dumped/bits-flipped",
}
"""Each kind of harm once, where most depends on what is done about it; and one where all memory
goes while the job is paused."""

STALL_S = 4.0
"""Longer than the lab's hosts are waited for; the full matrix stalls daemons for 30 s."""


def test_the_table_is_large_and_its_short_form_meets_everything() -> None:
    whole, short = table.cells(), table.cells(short=True)
    assert len(whole) >= 100
    assert len(short) >= 20
    for cells in (whole, short):
        assert {cell.point for cell in cells} == set(POINTS)
        assert {cell.fault for cell in cells} == set(table.FAULTS)
    assert all(cell.reason for cell in whole if cell.expected == table.EITHER)
    forced = forced_ways.cells(short=True)
    assert {cell.name for cell in [*short, *forced]} > EACH_TIME


def test_ways_are_forced_at_each_point_and_change_no_outcome() -> None:
    usual = {(cell.held_at, cell.fault): cell.expected for cell in table.cells()}
    whole = forced_ways.cells()
    assert len(whole) >= 100
    assert {cell.point for cell in whole} == set(forced_ways.POINTS)
    assert {cell.fault for cell in whole} == set(forced_ways.FAULTS)
    assert all(cell.expected == usual[cell.held_at, cell.fault] for cell in whole)
    assert {cell.name for cell in forced_ways.cells(short=True)} == forced_ways.SHORT


def short_form() -> Iterator[Any]:
    for cell in [*table.cells(short=True), *forced_ways.cells(short=True)]:
        marks = () if cell.name in EACH_TIME else (pytest.mark.long,)
        yield pytest.param(cell, marks=marks, id=cell.name)


@pytest.fixture(scope="module")
def scene(place: Path, references: References) -> Iterator[Scene]:
    made = Scene(place, references, STALL_S)
    yield made
    made.strike()
    os.environ.pop(held.VARIABLE)


@pytest.mark.parametrize("cell", list(short_form()))
def test_cell(scene: Scene, cell: Cell) -> None:
    if cell.fault == "out-of-memory":
        needs_fact("cgroup with a memory controller")
    assert not table.unavailable(cell)
    found = play(cell, scene)
    assert found.passed, f"{found.outcome}: {found.error}\n{found.trace}"


def test_a_cell_that_nothing_was_seen_of_is_played_again_and_never_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played, said = [], [NOTHING_SEEN, "", NOTHING_SEEN, NOTHING_SEEN, NOTHING_SEEN]

    class Play:
        def __init__(self, *_: object) -> None:
            played.append(1)

        def run(self) -> str:
            return said.pop(0)

    monkeypatch.setattr(playing, "_Play", Play)
    scene = cast(Scene, SimpleNamespace(prepare=lambda: None))
    cell = table.cells()[0]
    assert play(cell, scene).passed
    assert len(played) == 2
    found = play(cell, scene)
    assert len(played) == 2 + verdict.TRIES
    assert (found.passed, found.outcome) == (False, verdict.NOT_SHOWN)
    assert found.error == NOTHING_SEEN


def coming_to_the_point(error: str) -> str:
    """What a cell says whose migration has ended with this error before any harm was done."""
    held_ = SimpleNamespace(arm=lambda _: None, reached=lambda _: False)
    scene = SimpleNamespace(
        held=held_,
        migrate=lambda _: None,
        is_over=lambda: True,
        row=lambda: SimpleNamespace(error=error),
    )
    play = playing._Play.__new__(playing._Play)
    play.scene, play.cell = cast(Scene, scene), table.cells()[0]
    return play._come_to_the_point()


def test_a_machine_that_was_too_busy_for_a_migration_has_shown_nothing() -> None:
    busy = "h1 did not answer the request to say how far a move is within 1.5 s"
    assert coming_to_the_point(busy).endswith(f" was not reached: {busy}")
    with pytest.raises(AssertionError, match="was not reached: CRIU cannot dump it"):
        coming_to_the_point("CRIU cannot dump it")


NOTHING_SEEN = "the watcher was starved"


class Watched(Watcher):
    """A watcher that can be held up as by a busy machine."""

    _pauses: Iterator[float] = iter(())

    def hold_up(self, *seconds: float) -> None:
        """Sleep for so long before the next look, and before those that follow it."""
        self._pauses = iter(seconds)

    def _look(self) -> None:
        time.sleep(next(self._pauses, 0.0))
        super()._look()


class TestWatcher:
    """It sees what it is there for; sandboxes made by hand stand in for an agent's."""

    def test_one_that_runs_stops_and_ends(self, twins: Twins) -> None:
        with twins.watch() as watcher:
            assert watcher.broken, "it began with nothing"
        twins.start("h0")
        with twins.watch() as watcher:
            assert watcher.now == (("h0", RUNNING),)
            twins.signal("h0", "STOP")
            until(watcher, ("h0", FROZEN))
            twins.signal("h0", "CONT")
            until(watcher, ("h0", RUNNING))
            assert watcher.broken == []
            twins.end("h0")
            until(watcher)
        assert [line.split(":")[0] for line in watcher.broken] == ["NOTHING IS LEFT"]

    def test_a_watcher_that_did_not_look_for_a_while_says_so(self, twins: Twins) -> None:
        twins.start("h0")
        with twins.watch() as watcher:
            eventually(lambda: watcher.samples > 20, "samples", 10)
        assert watcher.starved == "", "nothing held it up"
        with twins.watch(longest_gap_s=0.2) as watcher:
            until(watcher, ("h0", RUNNING))
            watcher.hold_up(0.3)
            eventually(lambda: watcher.longest_gap > 0.3, "the gap", 10)
        assert watcher.broken == []
        assert "the watcher was starved" in watcher.starved
        watcher = twins.watch()
        watcher.hold_up(0.0, 0.9)  # not the look with which it begins
        with watcher:
            pass
        assert re.search(r"the watcher was starved: [23] samples in \d+\.\d s", watcher.starved)

    def test_two_that_run(self, twins: Twins) -> None:
        twins.start("h0")
        with twins.watch() as watcher:
            twins.start("h1")
            until(watcher, ("h0", RUNNING), ("h1", RUNNING))
            twins.end("h0")
            until(watcher, ("h1", RUNNING))
        assert [line.split(":")[0] for line in watcher.broken] == ["TWO RUN"]

    def test_one_that_is_restored_comes_until_its_network_is_open(self, twins: Twins) -> None:
        twins.start("h0")
        twins.signal("h0", "STOP")
        twins.restore("h1")
        with twins.watch() as watcher:
            assert watcher.now == (("h0", FROZEN), ("h1", COMING))
            twins.unlock("h1")
            until(watcher, ("h0", FROZEN), ("h1", RUNNING))
            twins.lock("h1")  # as for its next departure: it runs until it is frozen
            twins.end("h0")
            until(watcher, ("h1", RUNNING))
            assert watcher.broken == []

    def test_one_that_was_frozen_while_another_ran_must_not_run_again(self, twins: Twins) -> None:
        twins.start("h0")
        twins.signal("h0", "STOP")
        twins.start("h1")
        with twins.watch() as watcher:
            twins.end("h1")
            until(watcher, ("h0", FROZEN))
            assert watcher.broken == []
            twins.signal("h0", "CONT")
            until(watcher, ("h0", OLD))
        assert [line.split(":")[0] for line in watcher.broken] == ["AN OLD COPY RUNS"]

    def test_an_image_is_as_good_as_a_copy_once_it_is_complete(self, twins: Twins) -> None:
        twins.start("h0")
        with twins.watch() as watcher:
            twins.inside("h1", "mkdir /run/liveshift/images/m1")
            twins.inside("h1", "touch /run/liveshift/images/m1/manifest")
            until(watcher, ("h0", RUNNING), ("h1", IMAGE))
            twins.end("h0")
            until(watcher, ("h1", IMAGE))
            assert watcher.broken == []

    def test_a_capsule_that_is_killed_for_good_may_vanish(self, twins: Twins) -> None:
        twins.start("h0")
        with twins.watch() as watcher:
            watcher.may_vanish()
            twins.end("h0")
            until(watcher)
        assert watcher.broken == []


def until(watcher: Watcher, *sight: tuple[str, str]) -> None:
    eventually(lambda: watcher.now == sight, f"{sight} to be seen", 10)


CAPSULE, ROOT = "twin/0", 1001

SANDBOX = """
import sys
from pathlib import Path
from liveshift.criu_glue.capsule import sandboxes
from liveshift.criu_glue.network import network_lock
plan = sandboxes.SandboxPlan(
    directory=Path("/var/tmp/twin"), netns=Path("/run/netns/ls-twin.0"), hostname="twin-0",
    hosts_file="", uid=0, gid=0, groups=(),
)
if sys.argv[1] == "start":
    made = sandboxes.start(plan, ["sleep", "1000"], {"PATH": "/usr/bin:/bin"}, "/")
else:
    made = sandboxes.build_empty(plan, 1001, 3000)
    network_lock.lock(made.init)
print(made.init)
"""


class Twins:
    """Copies of one capsule on the hosts of a lab, each a ``sleep`` in a sandbox."""

    def __init__(self, lab: LabSession) -> None:
        self._lab = lab
        self._inits: dict[str, str] = {}

    def watch(self, longest_gap_s: float = 1.0) -> Watched:
        return Watched(lambda: self._lab.lab, CAPSULE, [ROOT], longest_gap_s)

    def start(self, host: str) -> None:
        self._sandbox(host, "start")

    def restore(self, host: str) -> None:
        """Start a tree whose parent becomes process 1 of its sandbox, as CRIU does."""
        init = self._sandbox(host, "restore")
        born = "echo 1000 >/proc/sys/kernel/ns_last_pid; sleep 1000 >/dev/null 2>&1 &"
        self.inside(host, f"nsenter -t {init} -m -p -n sh -c '{born}'")

    def lock(self, host: str) -> None:
        self._network(host, "lock")

    def unlock(self, host: str) -> None:
        self._network(host, "unlock")

    def _network(self, host: str, what: str) -> None:
        code = (
            "from liveshift.criu_glue.network import network_lock;"
            f" network_lock.{what}({self._inits[host]})"
        )
        self.inside(host, f"{sys.executable} -c '{code}'")

    def signal(self, host: str, name: str) -> None:
        self.inside(host, f"nsenter -t {self._inits[host]} -m -p kill -{name} {ROOT}")

    def end(self, host: str) -> None:
        self.inside(host, f"kill -KILL {self._inits.pop(host)}; ip netns del ls-twin.0")

    def clear(self) -> None:
        for host in list(self._inits):
            self.end(host)
        for host in self._lab.lab.hosts:
            self.inside(host, "rm -rf /run/liveshift/images/*")

    def inside(self, host: str, script: str) -> str:
        command = [*labs.entry(self._lab.lab.machine(host)), "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _sandbox(self, host: str, how: str) -> str:
        self.inside(host, "ip netns add ls-twin.0; mkdir -p /var/tmp/twin")
        command = [*labs.entry(self._lab.lab.machine(host)), sys.executable, "-c", SANDBOX, how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        self._inits[host] = done.stdout.strip()
        return self._inits[host]


@pytest.fixture(scope="module")
def twins_lab(new_lab: NewLab) -> LabSession:
    return new_lab("--hosts", "2")


@pytest.fixture
def twins(twins_lab: LabSession) -> Iterator[Twins]:
    made = Twins(twins_lab)
    yield made
    made.clear()
