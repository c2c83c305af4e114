# SPDX-License-Identifier: Apache-2.0
"""One cell of the table of snapshots: a job that trains and is protected, a daemon held at a point
of its snapshot, rewind or suspension, and harm.

The daemon goes on while the harm lasts, and then the harm is healed. The job must train on then,
protected by a later snapshot, each step as if nothing had been. Meanwhile each capsule is watched
from outside (successors.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lab_session import eventually

from liveshift.launcher import lab as labs

from .snapshot_scene import SnapshotScene
from .snapshot_table import CUT_OFF, LOST, RESUMED, REWOUND, TELLS, TRAINED_ON, SnapshotCell
from .stage import RANKS, SUSPICION_S
from .successors import Successors
from .verdict import Verdict, judge

FURTHER = 10
"""Steps that every rank must make after all is over."""

REST_S = 90.0
ENDED_S = 5.0
"""A host that is heard again has ended its earlier copies after so long."""

KILLED = 137


def play(cell: SnapshotCell, scene: SnapshotScene) -> Verdict:
    """As verdict.judge."""
    return judge(cell, scene, lambda verdict: _Play(cell, scene, verdict).run())


class _Play:
    def __init__(self, cell: SnapshotCell, scene: SnapshotScene, verdict: Verdict) -> None:
        self.cell = cell
        self.scene = scene
        self.verdict = verdict
        self.began = time.time()
        self.told = self._kinds()

    def run(self) -> str:
        """Why nothing was shown although nothing was wrong, or ""; raises what was wrong."""
        scene, cell = self.scene, self.cell
        with self._watched() as copies:
            if cell.column.point:
                self._come_to_the_point()
                self._harm(copies)
            else:
                self._harm_at_rest()
            eventually(scene.all_up, "all hosts to be up")
            eventually(lambda: _one_runs(copies), "the earlier copies to be ended", ENDED_S)
            for each in copies:
                each.heard_again()
            scene.expect_later()
            eventually(self._is_at_rest, "the job to have come to rest", REST_S)
            self.verdict.outcome = self._outcome()
            if self.verdict.outcome == LOST:
                self._assert_lost()
            else:
                self._assert_goes_on()
                # A rank that has just been killed may not have been missed at the first look.
                self.verdict.outcome = self._outcome()
        for each in copies:
            assert not each.broken, "; ".join(each.broken)
        if words := TELLS.get(cell.name, ""):
            self._assert_told(words)
        assert self.verdict.outcome in cell.outcomes, (
            f"it {self.verdict.outcome}, which is none of {', '.join(sorted(cell.outcomes))}"
        )
        if self.verdict.outcome == LOST:
            scene.end_job(by_itself=True)
        return next((each.starved for each in copies if each.starved), "")

    @contextmanager
    def _watched(self) -> Iterator[list[Successors]]:
        """Watch the copies of all capsules."""
        job = self.scene.job
        with ExitStack() as stack:
            copies = [
                stack.enter_context(
                    Successors(
                        lambda: self.scene.lab,
                        f"{job.name}/{rank}",
                        job.seen(rank).tasks,
                        longest_gap_s=SUSPICION_S,
                    )
                )
                for rank in range(RANKS)
            ]
            try:
                yield copies
            finally:
                for rank, each in enumerate(copies):
                    both = f"copies of rank {rank}, two at once: {each.overlapped}"
                    self.verdict.trace += f"{both}\n{each.story()}\n"

    # ---- harm ----

    def _come_to_the_point(self) -> None:
        """Bring about what is harmed, and wait until a daemon is held. Snapshots come by
        themselves."""
        scene, column = self.scene, self.cell.column
        if column.during == "suspension":
            scene.session.json("suspend", scene.job.name, "--no-wait")
            # The order waits for a snapshot that is under way.
            eventually(lambda: self._has_told("suspending"), "the order")
        scene.held.arm(column.point)
        if column.during == "rewind":
            scene.kill_rank()
        elif column.during == "loss":
            labs.kill_host(scene.lab, scene.owner)
        scene.held.wait(column.point)

    def _harm(self, copies: list[Successors]) -> None:
        """Do the harm while a daemon is held at the point, then let that go on."""
        scene, cell = self.scene, self.cell
        if cell.fault in CUT_OFF:
            for each in copies:
                each.cut_off(CUT_OFF[cell.fault](scene))
        with cell.harm(scene):
            scene.held.release(cell.column.point)
        scene.held.clear()
        if cell.column.during == "loss":
            labs.boot_host(scene.lab, scene.owner)
            labs.start_daemon(scene.lab, scene.owner)

    def _harm_at_rest(self) -> None:
        """Do the harm, and heal it, while the job is suspended and nothing of it runs."""
        scene = self.scene
        scene.suspend()
        steps = [scene.job.steps(rank) for rank in range(RANKS)]
        with self.cell.harm(scene):
            pass
        assert scene.running() == [], "a suspended job has processes"
        assert [scene.job.steps(rank) for rank in range(RANKS)] == steps, "a suspended job trains"

    # ---- what must be true then ----

    def _kinds(self) -> Counter[str]:
        return Counter(event.kind for event in self.scene.session.history(self.scene.job.name))

    def _has_told(self, kind: str) -> bool:
        return self._kinds()[kind] > self.told[kind]

    def _is_at_rest(self) -> bool:
        """Also if a snapshot was complete just before the one of a suspension, which goes on."""
        return self.scene.at_rest() and not self._is_being_suspended()

    def _is_being_suspended(self) -> bool:
        if self.cell.column.during != "suspension" or self._outcome() in (RESUMED, LOST):
            return False
        return not self._has_told("not suspended")

    def _outcome(self) -> str:
        if self.scene.is_lost or self.scene.state() == "ended":
            return LOST
        if self._has_told("resumed"):
            return RESUMED
        return REWOUND if self._has_told("rewound") else TRAINED_ON

    def _assert_goes_on(self) -> None:
        scene = self.scene
        # The job may have come to rest before the end of a rank was noticed.
        eventually(lambda: scene.state() == "running", "the job to run", REST_S)
        for rank in range(RANKS):
            scene.job.go_on(FURTHER, rank)
        scene.assert_steps_are_right([0] * RANKS)
        self.verdict.gap_s = scene.longest_gap(self.began)

    def _assert_lost(self) -> None:
        """It ends, its steps are right as far as they go, and people are told why."""
        scene = self.scene
        if scene.state() == "suspended":
            scene.session.json("stop", scene.job.name)
        eventually(lambda: scene.job.code() == KILLED, "the job to be lost")
        scene.assert_steps_are_right([0] * RANKS)
        self._assert_told("image")

    def _assert_told(self, words: str) -> None:
        """People are told this since the cell began."""
        scene = self.scene
        told = [e.text for e in scene.session.history(scene.job.name) if e.time > self.began]
        found = [text for text in told + scene.refused if words in text]
        assert found, f"nobody is told: {words}"
        self.verdict.told = found[-1]


def _one_runs(copies: list[Successors]) -> bool:
    return all(len(each.now) < 2 for each in copies)
