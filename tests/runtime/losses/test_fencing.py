# SPDX-License-Identifier: Apache-2.0
"""The command that switches a silent host off: when it is run, and what follows from its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fleet_scene import a_fleet

from liveshift.errors import Unreachable
from liveshift.runtime.losses.fencing import KIND, Fencing
from liveshift.runtime.losses.link_votes import MOST_VOTERS
from liveshift.runtime.messages import HostsReached, Message, TryHosts
from liveshift.runtime.model.jobs import Job

PROGRAM = """#!/bin/sh
echo "$LIVESHIFT_HOST $LIVESHIFT_ADDRESS $LIVESHIFT_JOB" >> {place}/ran
while [ -e {place}/wait ]; do sleep 0.02; done
echo "the controller is busy" >&2
exit "$(cat {place}/$LIVESHIFT_HOST 2>/dev/null || echo 0)"
"""
RETRY_S = 0.3
LIMIT_S = 20.0
AFTER_S = 1.0


class Scene:
    """The job a on h0 and h1. ``since``: when each was last heard; None if it, or its kernel, may
    answer. ``reach``: by host that is heard, what it says that it reaches; None: it says nothing.
    ``dead``: who was called dead for which job, and by whom."""

    def __init__(self, place: Path, fence: bool = True) -> None:
        (place / "state").mkdir()
        self.place = place
        self.program = str(place / "power-off")
        Path(self.program).write_text(PROGRAM.format(place=place))
        Path(self.program).chmod(0o755)
        brisk = "[timeouts]\nsuspicion = 0.6\nheartbeat = 0.05\n"
        settings = f'[snapshots]\nfence = ["{self.program}"]\nfence_after = {AFTER_S}\n'
        fleet = a_fleet(place / "state", brisk + (settings if fence else ""))
        self.cluster = fleet.cluster
        self.job = fleet.jobs["a"]
        self.since: dict[str, float | None] = {"h0": 1.0, "h1": 1.0}
        self.reach: dict[str, list[str] | None] = {"h2": []}
        self.others = {"h0": 0, "h1": 0}
        self.objections = ["", ""]  # against taking the job back, and about its images
        self.asked: list[str] = []
        self.dead: list[tuple[str, str, str]] = []
        self.history: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None  # is called while the others are asked
        self.fencing = Fencing(self, LIMIT_S, RETRY_S)

    # ---- FencingContext ----

    async def request(self, host: str, message: Message, _limit: float) -> Message | None:
        assert isinstance(message, TryHosts)
        assert message.hosts == ["h0", "h1"]
        self.asked.append(host)
        self.meanwhile()
        said = self.reach[host]
        if said is None:
            raise Unreachable(f"{host} does not answer")
        return HostsReached(said)

    def unproven(self, job: Job) -> tuple[str, ...]:
        called = any(name == job.name for name, *_ in self.dead)
        return () if called or None in self.since.values() else ("h0", "h1")

    def silent_since(self, host: str) -> float | None:
        return self.since[host]

    def why_not(self, _job: Job, hosts: Sequence[str]) -> str:
        assert hosts == ("h0", "h1")
        return self.objections[0]

    async def images_missing(self, _job: Job, _hosts: Sequence[str]) -> str:
        return self.objections[1]

    def voters(self) -> list[str]:
        return list(self.reach)

    def others_on(self, host: str, _job: Job) -> int:
        return self.others[host]

    def call_dead(self, job: Job, host: str, by: str) -> None:
        self.dead.append((job.name, host, by))

    def note(self, job: Job, kind: str, text: str) -> None:
        assert kind == KIND
        self.history.append(text)

    # ---- what a test does ----

    def ends_with(self, **codes: int) -> None:
        for host, code in codes.items():
            (self.place / host).write_text(str(code))

    @property
    def ran(self) -> list[str]:
        """The hosts for which the command was run."""
        path = self.place / "ran"
        return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []

    def play(self, until: Callable[[], object], jobs: Sequence[Job] = ()) -> None:
        """Look as often as the orchestrator does, until then."""

        async def work() -> None:
            async with asyncio.timeout(60):
                while not until():
                    for job in jobs or [self.job]:
                        self.fencing.look(job)
                    await asyncio.sleep(0.01)

        asyncio.run(work())

    def play_asking(self, times: int) -> None:
        """The same until the others have been asked so often, and the answers are in."""
        self.play(lambda: len(self.asked) >= times and not self.fencing.busy)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_one_host_is_switched_off_and_counts_as_dead(scene: Scene) -> None:
    scene.play(lambda: scene.dead)
    assert scene.dead == [("a", "h0", scene.program)]
    assert (scene.place / "ran").read_text() == "h0 10.88.0.10 a\n"
    begun, ended = scene.history
    assert begun == f"no host of a is heard: runs {scene.program} for h0"
    assert ended.startswith(f"{scene.program}, for h0, has ended with code 0 after ")
    assert not scene.fencing.busy


def test_without_a_command_nothing_is_done(tmp_path: Path) -> None:
    scene = Scene(tmp_path, fence=False)
    looks = iter(range(50))
    scene.play(lambda: next(looks, None) is None)
    assert not scene.asked
    assert not scene.history


def test_all_hosts_must_have_been_silent_for_long(scene: Scene) -> None:
    began = time.monotonic()
    scene.since["h1"] = began
    scene.play(lambda: scene.dead)
    assert time.monotonic() - began >= AFTER_S
    assert scene.asked == ["h2"]


def test_a_host_that_another_one_reaches_is_left_alone(scene: Scene) -> None:
    scene.reach |= {"h2": [], "h3": ["h1"], "h4": ["h0", "h1"]}
    scene.play_asking(6)
    assert not scene.ran
    assert set(scene.history) <= {
        "h0, h1: not fenced, as other hosts reach h1, so the job may be well",
        "h0, h1: not fenced, as other hosts reach h0, so the job may be well",
    }
    scene.reach |= {"h3": [], "h4": []}
    scene.play(lambda: scene.dead)
    assert scene.ran == ["h0"]


@pytest.mark.parametrize("heard", [True, False])
def test_an_orchestrator_that_is_cut_off_itself_switches_nothing_off(
    scene: Scene, heard: bool
) -> None:
    scene.reach = {"h2": None} if heard else {}
    scene.play(lambda: scene.history)
    why = "no other host answers, so perhaps the orchestrator is cut off"
    assert scene.history == [f"h0, h1: not fenced, as {why}"]
    assert scene.asked == (["h2"] if heard else [])
    assert not scene.ran


def test_no_more_hosts_than_needed_are_asked(scene: Scene) -> None:
    scene.reach |= {f"h{number}": [] for number in range(3, 9)}
    scene.play(lambda: scene.dead)
    assert len(scene.asked) == MOST_VOTERS


@pytest.mark.parametrize("which", [0, 1])
def test_a_job_that_could_not_be_taken_back_costs_no_host(scene: Scene, which: int) -> None:
    scene.objections[which] = "no host has room for a/0"
    scene.play(lambda: scene.history)
    assert scene.history == ["h0, h1: not fenced, as no host has room for a/0"]
    assert not scene.asked
    scene.objections[which] = ""
    scene.play(lambda: scene.dead)


def test_what_changes_while_the_others_are_asked_counts(scene: Scene) -> None:
    def heard() -> None:
        scene.since["h1"] = None

    def moved() -> None:
        scene.objections[0] = "m3 is under way and may save it"

    scene.meanwhile = heard
    scene.play_asking(1)
    assert not scene.history
    scene.since["h1"], scene.meanwhile = 1.0, moved
    scene.play(lambda: scene.history)
    assert scene.history == ["h0, h1: not fenced, as m3 is under way and may save it"]
    assert not scene.ran


def test_the_host_on_which_other_jobs_lose_least_is_switched_off(scene: Scene) -> None:
    scene.others["h0"] = 2
    scene.play(lambda: scene.dead)
    assert scene.ran == ["h1"]


def test_after_a_failure_another_host_is_tried_and_then_the_first_again(scene: Scene) -> None:
    scene.ends_with(h0=3, h1=3)
    scene.play(lambda: any("for h1, has ended" in text for text in scene.history))
    assert scene.ran == ["h0", "h1"]
    scene.ends_with(h0=0)
    scene.play(lambda: scene.dead)
    assert scene.dead == [("a", "h0", scene.program)]
    assert scene.ran[:2] == ["h0", "h1"]
    failed = next(text for text in scene.history if "for h1, has ended" in text)
    assert "with code 3" in failed
    assert failed.endswith(": the controller is busy")


def test_a_command_that_keeps_failing_is_run_less_and_less_often(scene: Scene) -> None:
    scene.ends_with(h0=1, h1=1)
    scene.play(lambda: len(scene.ran) >= 2)
    began = time.monotonic()
    scene.play(lambda: scene.ran.count("h0") >= 3)
    assert time.monotonic() - began >= 2 * RETRY_S


def test_a_host_that_is_heard_while_the_command_runs_is_not_dead(scene: Scene) -> None:
    (scene.place / "wait").touch()

    def look() -> bool:
        if scene.ran and (scene.place / "wait").exists():
            scene.since["h0"] = time.monotonic()
            (scene.place / "wait").unlink()
        return any("was heard meanwhile" in text for text in scene.history)

    scene.play(look)
    assert not scene.dead


def test_two_jobs_on_a_host_switch_it_off_once(scene: Scene) -> None:
    other = Job("b", scene.job.overlay, scene.job.request, 0, 0.0, scene.job.capsules)
    scene.play(lambda: len(scene.dead) == 2, [scene.job, other])
    assert set(scene.dead) == {("a", "h0", scene.program), ("b", "h0", scene.program)}
    assert scene.ran == ["h0"]


def test_a_command_that_hangs_is_killed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.fencing, "_limit_s", 0.3)
    (scene.place / "wait").touch()
    scene.play(lambda: [text for text in scene.history if "was killed" in text])
    assert not scene.dead
