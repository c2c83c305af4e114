# SPDX-License-Identifier: Apache-2.0
"""One cell of the table of moves: a healthy job, a migration held at a point, and harm."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

from lab_session import eventually
from moving_job import OVER, Seen

from liveshift.launcher import lab as labs
from liveshift.launcher.client.client import Client
from liveshift.runtime.messages import Event, Events, GetEvents

from . import table
from .scene import Scene
from .stage import HARMED, RANKS
from .table import EITHER, ENDED, MOVED, STAYED, Cell
from .verdict import LONGEST_GAP_S, Verdict, judge
from .watcher import RUNNING, Watcher

SETTLE_S = 60.0
CLEAN_S = 15.0
FURTHER = 5
"""Steps that every rank must make after all is over."""

KILLED = 137

TOO_BUSY = ("did not answer the request", "has not acknowledged")
"""A migration can fail with one of these texts before the cell does any harm: the machine was too
busy for the lab's short timeouts. The cell then checks that the job is unharmed."""


def play(cell: Cell, scene: Scene) -> Verdict:
    """As verdict.judge."""
    return judge(cell, scene, lambda verdict: _Play(cell, scene, verdict).run())


class _Play:
    def __init__(self, cell: Cell, scene: Scene, verdict: Verdict) -> None:
        self.cell = cell
        self.scene = scene
        self.verdict = verdict
        self.before: Seen = scene.job.seen(HARMED)
        self.began = time.time()
        self.made = [len(scene.job.steps(rank)) for rank in range(RANKS)]

    def run(self) -> str:
        """Why nothing was shown although nothing was wrong, or ""; raises what was wrong."""
        scene, cell = self.scene, self.cell
        tasks, missed = self.before.tasks, ""
        with Watcher(lambda: scene.lab, scene.capsule, tasks, LONGEST_GAP_S) as watcher:
            try:
                missed = self._come_to_the_point()
                if not missed:
                    self._harm(watcher)
                self._settle(watcher)
                watcher.mark(self.verdict.outcome)
            finally:
                self.verdict.trace = f"what was seen:\n{watcher.story()}\n"
        assert not watcher.broken, "; ".join(watcher.broken)
        expected = STAYED if missed else cell.expected
        assert self.verdict.outcome == expected or (
            expected == EITHER and self.verdict.outcome in (MOVED, STAYED)
        ), f"it {self.verdict.outcome}, which is not what is expected: {expected}"
        self._assert_told()
        if self.verdict.outcome == ENDED:
            self._assert_ended()
        else:
            self._assert_goes_on()
        self._assert_nothing_remains()
        if missed:
            return missed
        assert self.scene.held.names() == []
        return watcher.starved

    def _come_to_the_point(self) -> str:
        """Ask for the migration and wait until a daemon is held. Returns why that cannot be, if the
        machine was too busy, else ""."""
        self.scene.held.arm(self.cell.held_at)
        self.scene.migrate(self.cell.order)
        missed = ""

        def held() -> bool:
            nonlocal missed
            if self.scene.held.reached(self.cell.held_at):
                return True
            if self.scene.is_over():
                error = str(self.scene.row().error)
                text = f"{self.cell.held_at} was not reached: {error}"
                if any(words in error for words in TOO_BUSY):
                    missed = text
                    return True
                # The source of the cell before has yet to hear that it may forget that migration.
                assert "is held by" in error, text
                self.scene.migrate(self.cell.order)
            return False

        eventually(held, f"{self.cell.held_at} to be reached", 30)
        if not missed:
            self._assert_as_asked()
        return missed

    def _assert_as_asked(self) -> None:
        """Memory goes in the way that the cell forces, or in haste where it has a deadline."""
        order, predicted = self.cell.order, self.scene.row().predicted
        if order.within:
            needs = predicted.needs_s if predicted is not None else None
            assert needs is not None, f"{order.within} s are time enough: nothing is forced"
        elif order.way:
            how = predicted.how if predicted is not None else "in an unknown way"
            assert how == order.way, f"memory goes {how}, not {order.way}"

    def _harm(self, watcher: Watcher) -> None:
        """Do the harm while a daemon is held at the point, then let that go on."""
        scene, cell = self.scene, self.cell
        if cell.expected == ENDED:
            watcher.may_vanish()
        watcher.mark(f"held at {cell.held_at}")
        if cell.held_at in table.DEAF:
            opened = watcher.open_networks()
            assert opened == [], f"the capsule's network is open at {cell.held_at}: {opened}"
        with cell.harm(scene):
            watcher.mark(f"{cell.fault}; {cell.held_at} goes on")
            scene.held.release(cell.held_at)
        watcher.mark("healed")

    # ---- until all has come to rest ----

    def _settle(self, watcher: Watcher) -> None:
        def settled() -> bool:
            self._assert_daemons_run()
            if not self.scene.all_up() or not self.scene.is_over():
                return False
            if (outcome := self._outcome(watcher)) is not None:
                self.verdict.outcome = outcome
                return True
            return False

        eventually(settled, "all to have settled", SETTLE_S)

    def _outcome(self, watcher: Watcher) -> str | None:
        """What the orchestrator says of the capsule, if that is what is to be seen."""
        if self.scene.job.code() is not None:
            return ENDED
        row = self.scene.job.capsule(HARMED)
        if row.state != "running" or watcher.now != ((row.host, RUNNING),):
            return None
        return MOVED if row.host == self.scene.destination else STAYED

    def _assert_daemons_run(self) -> None:
        for machine in self.scene.lab.machines:
            assert machine.running, f"{machine.name} does not run"
            alive = machine.daemon is not None and machine.daemon.alive
            assert alive, f"the daemon of {machine.name} has ended by itself"

    # ---- what must be true then ----

    def _assert_told(self) -> None:
        """The history says how the migration ended."""
        told = [event for event in self._events() if event.kind in ("moved", "not moved")]
        ends = [e for e in told if e.migration and e.migration.name == self.scene.migration]
        states = [e.migration.state for e in ends if e.migration]
        assert states, f"no event tells of the end of {self.scene.migration}"
        assert states[-1] in OVER, f"the history leaves {self.scene.migration} {states[-1]}"

    def _events(self) -> list[Event]:
        with Client(self.scene.lab.socket) as client:
            return client.get(Events, GetEvents(self.scene.job.name, 0)).events

    def _assert_ended(self) -> None:
        code = self.scene.job.code()
        assert code == KILLED, f"the job ended with code {code}, not {KILLED}"
        self.scene.assert_steps_are_right(self.made)
        self.scene.end_job(by_itself=True)

    def _assert_goes_on(self) -> None:
        job = self.scene.job
        for rank in range(RANKS):
            job.go_on(FURTHER, rank)
        after = job.seen(HARMED)
        assert after.tasks.keys() == self.before.tasks.keys(), "other pids than before"
        assert after.users == self.before.users
        self.scene.assert_steps_are_right(self.made)
        self.verdict.gap_s = self.scene.longest_gap(self.began)

    def _assert_nothing_remains(self) -> None:
        left: dict[str, list[str]] = {}

        def clean() -> bool:
            found = {host: remains(self.scene, host) for host in self.scene.lab.hosts}
            left.clear()
            left.update({host: what for host, what in found.items() if what})
            return not left

        with suppress(AssertionError):
            eventually(clean, "all hosts to be clean", CLEAN_S)
        assert not left, f"there is still {left}"


_LOOK = """
ip netns list | sed 's/ .*//; s/^ls-/netns /'
ip -o link | grep -o 'lsv[^:@]*' | sed 's/^/veth /'
ls /run/liveshift/images | sed 's/^/image /'
ls /var/lib/liveshift/capsules | sed 's/^/sandbox /'
nft list tables | grep lock | sed 's/^/lock /'
for each in $(ip netns list | sed 's/ .*//'); do
    ip netns exec $each nft list table inet liveshift_lock 2>/dev/null | grep -q dormant ||
        ip netns exec $each nft list tables | grep lock | sed "s/^/lock in $each /"
done
ps -A -o args | grep -E '[c]riu |^/proc/[0-9]+/f[d]/' | sed 's/^/process /'
true
"""


def remains(scene: Scene, host: str) -> list[str]:
    """Compare a host's sandboxes, networks, images, locks and CRIU processes with its capsules, and
    return what it has too much or lacks. The sandbox of an ended capsule stays, for its output."""
    status = scene.status()
    if status is None:
        return ["an orchestrator that does not answer"]
    here = [row for job in status.jobs for row in job.capsules if row.host == host]
    names = {row.name.replace("/", "."): row.state for row in here}
    running = [name for name, state in names.items() if state == "running"]
    wanted = {f"{what} {name}" for name in running for what in ("netns", "sandbox")}
    inside = labs.entry(scene.lab.machine(host))
    done = subprocess.run([*inside, "sh", "-c", _LOOK], capture_output=True, text=True, check=True)
    found = set(done.stdout.splitlines())
    veths = {line for line in found if line.startswith("veth ")}
    excused = {f"sandbox {name}" for name, state in names.items() if state == "ended"}
    wrong = [*(found - veths - wanted - excused), *(f"no {line}" for line in wanted - found)]
    wrong += veths if len(veths) != len(running) else []
    return sorted(wrong) + [f"{row.name} {row.state}" for row in here if row.state == "moving"]
