# SPDX-License-Identifier: Apache-2.0
"""Each harm at each point of a snapshot, of a rewind and of a suspension: the job loses nothing.

Rank 1 is the one that is harmed: the *owner* runs it, the *holder* has its image. A daemon is held
at a point (runtime/daemon/faultpoints.py), the harm is done, the daemon goes on, and the harm is
healed. Then the job must train, protected by a later snapshot, each step as if nothing had been.

Meanwhile each capsule is watched from outside: an earlier copy may run beside its successor only on
a host that is cut off, and makes no progress there (fault_matrix/successors.py).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_matrix import held
from fault_matrix.held import Held
from fault_matrix.successors import Successors
from lab_session import LONG, LabSession, NewLab, eventually
from moving_job import Job
from protected_job import events, wait_protected
from reference_runs import References
from whereabouts import GONE, every_pid, spaces

from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SUSPICION_S = 1.5
TIMEOUTS = f"collective=120,heartbeat=0.3,suspicion={SUSPICION_S},grace=1"
STEPS, MOST_OF_A_CELL = 2000, 900
"""A job makes ten steps a second, and a cell takes at most a minute and a half."""
ARGV = tuple(str(STEPS) if word == "6000" else word for word in LONG)
FURTHER = 10
HARMED = 1

Harm = Callable[[LabSession, str, str], AbstractContextManager[None]]
"""Of a lab, the owner and the holder of the rank that is harmed."""


# ---- the harms -------------------------------------------------------------------------------


def killed(who: str) -> Harm:
    """A daemon, which is started again when the point goes on."""

    @contextmanager
    def harm(lab: LabSession, owner: str, holder: str) -> Iterator[None]:
        host = {"owner": owner, "holder": holder}.get(who, who)
        labs.stop_daemon(lab.lab, host)
        yield
        labs.start_daemon(lab.lab, host)

    return harm


def power_lost(who: str) -> Harm:
    @contextmanager
    def harm(lab: LabSession, owner: str, holder: str) -> Iterator[None]:
        host = {"owner": owner, "holder": holder}[who]
        labs.kill_host(lab.lab, host)
        yield
        time.sleep(2 * SUSPICION_S)
        lab.boot(host)

    return harm


def cut_off(who: str) -> Harm:
    @contextmanager
    def harm(lab: LabSession, owner: str, holder: str) -> Iterator[None]:
        host = {"owner": owner, "holder": holder}[who]
        labs.link(lab.lab, host, cut=True)
        try:
            yield
            time.sleep(3 * SUSPICION_S)
        finally:
            labs.link(lab.lab, host, cut=False)

    return harm


@contextmanager
def orchestrator_stalled(lab: LabSession, _owner: str, _holder: str) -> Iterator[None]:
    daemon = lab.lab.machine("ctl").daemon
    assert daemon is not None
    daemon.send(signal.SIGSTOP)
    try:
        yield
        time.sleep(3 * SUSPICION_S)
    finally:
        daemon.send(signal.SIGCONT)


@contextmanager
def rank_killed(lab: LabSession, owner: str, _holder: str) -> Iterator[None]:
    for pid in ranks_on(lab.lab, owner):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    yield


HARMS: dict[str, Harm] = {
    "orchestrator-killed": killed("ctl"),
    "orchestrator-stalled": orchestrator_stalled,
    "owner-agent-killed": killed("owner"),
    "owner-cut-off": cut_off("owner"),
    "owner-power-lost": power_lost("owner"),
    "holder-agent-killed": killed("holder"),
    "holder-cut-off": cut_off("holder"),
    "holder-power-lost": power_lost("holder"),
    "rank-killed": rank_killed,
}

GOES_ON, LOST, EITHER = "g", "l", "?"

#        snapshot: locked dumped complete   rewind: committed ended forwarded
#                                           suspension: dumped complete ended
_GRID = """
orchestrator-killed   g g g   G g g   g G g
orchestrator-stalled  g g g   g g g   g g g
owner-agent-killed    g G g   g g g   g g g
owner-cut-off         g g g   g g g   g g g
owner-power-lost      g g g   g g G   g g g
holder-agent-killed   g g g   g g g   g g g
holder-cut-off        g g g   g g g   g g g
holder-power-lost     g g g   l l ?   . . .
rank-killed           g G g   . . .   . . .
"""
"""g: the job goes on. l: it is lost, as the rank that was killed and its only image are gone. ?:
either, as the image may have been sent on already. A capital letter is played each time."""

COLUMNS = (
    *(("snapshot", point) for point in ("snapshot.locked", "snapshot.dumped", "snapshot.complete")),
    *(("rewind", point) for point in ("rewind.committed", "rewind.ended", "rewind.forwarded")),
    *(("suspend", point) for point in ("snapshot.dumped", "snapshot.complete", "rewind.ended")),
)


@dataclass(frozen=True)
class Cell:
    """``during``: snapshot, rewind or suspend."""

    during: str
    point: str
    harm: str
    expected: str
    short: bool


def cells() -> Iterator[Cell]:
    for line in _GRID.strip().splitlines():
        harm, *marks = line.split()
        for (during, point), mark in zip(COLUMNS, marks, strict=True):
            if mark != ".":
                yield Cell(during, point, harm, mark.lower(), mark.isupper())


def parameters() -> Iterator[Any]:
    for cell in cells():
        marks = () if cell.short else (pytest.mark.long,)
        yield pytest.param(cell, marks=marks, id=f"{cell.during}-{cell.point}-{cell.harm}")


# ---- the scene -------------------------------------------------------------------------------


class Scene:
    """A lab, and a job of two that is replaced when it is lost or has few steps left."""

    def __init__(self, lab: LabSession, held: Held, reference: list[list[dict[str, Any]]]) -> None:
        self.lab = lab
        self.held = held
        self.reference = reference
        self._numbers = itertools.count()
        self._job: Job | None = None

    def job(self) -> Job:
        self.held.clear()
        if self._job is not None and (
            self._job.code() is not None or len(self._job.steps()) > STEPS - MOST_OF_A_CELL
        ):
            if self._job.code() is None:
                self._job.stop()
            self._job = None
        if self._job is None:
            name = f"harmed{next(self._numbers)}"
            often = ("--max-rewinds", "1000")
            self._job = self.lab.start(name, ARGV, nnodes=2, options=often)
            self._job.wait_step(10)
        wait_protected(self._job)
        return self._job

    def drop_job(self) -> None:
        """The next cell gets another one: a cell that fails may leave it in any state."""
        job, self._job = self._job, None
        if job is not None:
            self.lab.cli("stop", job.name, code=None)

    def assert_right(self, job: Job) -> None:
        """The job trains on. Each step equals that of an untouched run, bit for bit."""
        for rank in range(2):
            job.go_on(FURTHER, rank)
            for at, step in enumerate(job.steps(rank)):
                for what in ("step", "loss_hex", "sha256"):
                    found, wanted = step[what], self.reference[rank][at][what]
                    assert found == wanted, f"rank {rank}, step {at + 1}: {what} is {found}"


@pytest.fixture(scope="module")
def scene(new_lab: NewLab, place: Path, references: References) -> Iterator[Scene]:
    points = Held(place / "harm-points")
    directory = references.directory(ARGV, 2)
    texts = ((directory / f"rank{rank}.jsonl").read_text() for rank in range(2))
    reference = [[json.loads(line) for line in text.splitlines()] for text in texts]
    lab = new_lab("--hosts", "4", "--snapshots", "every=1", "--timeouts", TIMEOUTS)
    yield Scene(lab, points, reference)
    points.clear()
    os.environ.pop(held.VARIABLE)


def ranks_on(lab: Lab, host: str) -> list[int]:
    """The processes of a rank on a host that train: none but a job's."""
    found = []
    init = lab.machine(host).init
    assert init is not None
    home = os.stat(f"/proc/{init.pid}/ns/pid").st_ino
    for pid in every_pid():
        with suppress(*GONE):
            if home in spaces(pid) and b"tiny.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


# ---- the cells -------------------------------------------------------------------------------


def trigger(scene: Scene, job: Job, cell: Cell, owner: str) -> None:
    """Bring about what the cell harms; snapshots come by themselves."""
    if cell.during == "rewind":
        for pid in ranks_on(scene.lab.lab, owner):
            os.kill(pid, signal.SIGKILL)
    elif cell.during == "suspend":
        scene.lab.json("suspend", job.name, "--no-wait")


@pytest.mark.parametrize("cell", list(parameters()))
def test_cell(scene: Scene, cell: Cell) -> None:
    try:
        play(scene, cell)
    except BaseException:
        scene.held.clear()
        scene.drop_job()
        raise


def play(scene: Scene, cell: Cell) -> None:
    job = scene.job()
    owner, holder = job.seen(HARMED).host, job.protection().holders[-1]
    with watched(scene, job) as copies:
        if cell.during == "suspend":
            trigger(scene, job, cell, owner)  # the order waits for a snapshot that is under way
            eventually(lambda: events(job, "suspending"), "the order")
        scene.held.arm(cell.point)
        if cell.during != "suspend":
            trigger(scene, job, cell, owner)
        scene.held.wait(cell.point)
        if cell.harm in CUT_OFF:
            for each in copies:
                each.cut_off(owner if cell.harm == "owner-cut-off" else holder)
        with HARMS[cell.harm](scene.lab, owner, holder):
            scene.held.release(cell.point)
        scene.held.clear()
        eventually(lambda: all_up(scene), "all hosts to be up")
        eventually(lambda: at_rest(scene, job), "the job to have come to rest", 90)
        for each in copies:
            each.heard_again()
        if cell.expected == LOST or (cell.expected == EITHER and state(job) == "ended"):
            eventually(lambda: job.code() == 137, "the job to be lost")
            return
        wait_protected(job)
        assert state(job) == "running"
        scene.assert_right(job)


CUT_OFF = ("owner-cut-off", "holder-cut-off")


@contextmanager
def watched(scene: Scene, job: Job) -> Iterator[list[Successors]]:
    """Watch the copies of all capsules. At the end none may have run that must not."""
    with ExitStack() as stack:
        copies = [
            stack.enter_context(
                Successors(
                    lambda: scene.lab.lab,
                    f"{job.name}/{rank}",
                    job.seen(rank).tasks,
                    longest_gap_s=SUSPICION_S,
                )
            )
            for rank in range(2)
        ]
        try:
            yield copies
        finally:
            for rank, each in enumerate(copies):
                print(f"copies of rank {rank}, two at once: {each.overlapped}\n{each.story()}")
    for each in copies:
        assert not each.broken, "; ".join(each.broken)
        assert not each.starved, each.starved


def test_a_host_that_only_the_orchestrator_does_not_hear_leads_to_no_rewind(scene: Scene) -> None:
    """It falls silent in the middle of a snapshot, and the job trains on."""
    job = scene.job()
    before = len(events(job, "rewinding"))
    for rank in range(2):  # either host may be the one that is held
        wait_protected(job)
        host = job.seen(rank).host
        scene.held.arm("snapshot.dumped")
        scene.held.wait("snapshot.dumped")
        labs.separate(scene.lab.lab, host, "ctl")
        try:
            scene.held.clear()
            time.sleep(4 * SUSPICION_S)
            assert scene.lab.host(host).state == "lost"
            job.go_on(FURTHER)
        finally:
            labs.rejoin(scene.lab.lab, host, "ctl")
        eventually(lambda: all_up(scene), "all hosts to be up")
    wait_protected(job)
    assert len(events(job, "rewinding")) == before
    scene.assert_right(job)


def at_rest(scene: Scene, job: Job) -> bool:
    """Whether the job runs as the journal says, or has ended; a suspended one is resumed."""
    if (now := state(job)) == "suspended":
        scene.lab.cli("resume", job.name, code=None)  # not before its hosts answer
    return now == "ended" or (now == "running" and not job.protection().why_not)


def state(job: Job) -> str:
    with suppress(Exception):  # the orchestrator is away
        return next(row.state for row in job.session.status().jobs if row.name == job.name)
    return "unknown"


def all_up(scene: Scene) -> bool:
    with suppress(Exception):
        return all(row.state == "up" for row in scene.lab.status().hosts)
    return False
