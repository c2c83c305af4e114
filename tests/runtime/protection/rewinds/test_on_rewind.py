# SPDX-License-Identifier: Apache-2.0
"""The cluster file's command after rewinds: once for each, and in the history, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from rewinds_scene import BRISK, RewindsScene

from liveshift.runtime.fleet.fleet import Fleet
from liveshift.runtime.journal.snapshot_tables import RewindKind, RewindRow
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.snapshot.on_rewind import RewindCommands, variables

WRITES = """#!/bin/sh
env | grep ^LIVESHIFT_ | sort >> {out}.new
echo end >> {out}.new
while [ -e {out}.wait ]; do sleep 0.05; done
cp {out}.new {out}
echo "something is odd" >&2
exit $(cat {out}.code)
"""


class Scene(RewindsScene):
    """``out``: what the command writes when it is about to end. ``code``: what it ends with."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self.out = place / "out"
        self.program = place / "notify"
        self.program.write_text(WRITES.format(out=self.out))
        self.program.chmod(0o755)
        self.ends_with(0)
        command = json.dumps([str(self.program)])
        for name in [name for name in os.environ if name.startswith("LIVESHIFT_")]:
            monkeypatch.delenv(name)  # those of the test run itself
        self.settings = f"{BRISK}[snapshots]\non_rewind = {command}\n"
        super().__init__(place / "state", monkeypatch)

    def ends_with(self, code: int) -> None:
        Path(f"{self.out}.code").write_text(str(code))

    def hold(self) -> None:
        """The command does not end until it is let go."""
        Path(f"{self.out}.wait").touch()

    def let_go(self) -> None:
        Path(f"{self.out}.wait").unlink()

    @property
    def told(self) -> list[dict[str, str]]:
        """The variables of each time that the command ended."""
        if not self.out.exists():
            return []
        parts = self.out.read_text().split("end\n")[:-1]
        return [dict(line.split("=", 1) for line in part.splitlines()) for part in parts]

    @property
    def began(self) -> bool:
        return "end\n" in Path(f"{self.out}.new").read_text() if self.begun.exists() else False

    @property
    def begun(self) -> Path:
        return Path(f"{self.out}.new")

    async def lose_h1(self) -> None:
        self.cut("h1")
        await self.until(lambda: bool(self.history("rewound")))

    async def outcome(self) -> str:
        await self.until(lambda: bool(self.history("on_rewind")))
        (text,) = self.history("on_rewind")
        return text.removeprefix(f"{self.program}, for the rewind to s1, ")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    (tmp_path / "state").mkdir()
    return Scene(tmp_path, monkeypatch)


def test_it_is_told_of_the_rewind(scene: Scene) -> None:
    async def play() -> str:
        async with scene.at_work():
            await scene.lose_h1()
            return await scene.outcome()

    assert asyncio.run(play()).startswith("has ended with code 0 after ")
    (told,) = scene.told
    (row,) = scene.fleet.journal.snapshots.history("a")
    newest = scene.job.newest
    assert newest is not None
    assert told == {
        "LIVESHIFT_JOB": "a",
        "LIVESHIFT_KIND": "rewind",
        "LIVESHIFT_SNAPSHOT": "s1",
        "LIVESHIFT_BOUNDARY": "step 9",
        "LIVESHIFT_REPEATED_S": f"{row.time - newest.time:.3f}",
        "LIVESHIFT_LOST_HOSTS": "h1",
    }
    kinds = [event.kind for event in scene.fleet.journal.events("a", 0)]
    assert kinds.index("rewound") < kinds.index("on_rewind")


def test_a_failure_is_said_with_its_code_and_last_line(scene: Scene) -> None:
    scene.ends_with(7)

    async def play() -> str:
        async with scene.at_work():
            await scene.lose_h1()
            return await scene.outcome()

    text = asyncio.run(play())
    assert text.startswith("has ended with code 7 after ")
    assert text.endswith(" s: something is odd")


def test_what_cannot_be_started_is_said(scene: Scene) -> None:
    scene.program.unlink()

    async def play() -> str:
        async with scene.at_work():
            await scene.lose_h1()
            return await scene.outcome()

    assert asyncio.run(play()) == "could not be started: No such file or directory"


def test_the_job_is_rewound_again_while_the_command_hangs(scene: Scene) -> None:
    scene.hold()

    async def play() -> None:
        async with scene.at_work():
            await scene.lose_h1()
            await scene.until(lambda: scene.began)
            assert scene.rewinds.under_way(), "no restart for a changed cluster file meanwhile"
            scene.rewinds.lacks(scene.job.capsules["a/0"], "h0 came back without a/0")
            await scene.until(lambda: len(scene.history("rewound")) == 2)
            assert scene.history("on_rewind") == [], "the second one waits for the first"
            scene.let_go()
            await scene.until(lambda: len(scene.history("on_rewind")) == 2)
            await scene.until(lambda: not scene.rewinds.under_way())

    asyncio.run(play())
    assert [told["LIVESHIFT_LOST_HOSTS"] for told in scene.told] == ["h1", "h0"]


def test_hosts_that_are_lost_one_after_the_other_are_all_named(scene: Scene) -> None:
    """The second one while the job is being taken back: that rewind replaces the first one."""
    scene.stuck = {"Reserve"}

    async def play() -> str:
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)
            scene.stuck = set()
            scene.rewinds.lacks(scene.job.capsules["a/0"], "h0 came back without a/0")
            return await scene.outcome()

    asyncio.run(play())
    assert len(scene.fleet.journal.snapshots.history("a")) == 2
    assert [told["LIVESHIFT_LOST_HOSTS"] for told in scene.told] == ["h0 h1"]


def test_its_time_is_limited(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.hold()
    commands = RewindCommands(scene.fleet.cluster, scene.fleet.journal, limit_s=0.5)
    monkeypatch.setattr(scene.rewinds, "_commands", commands)

    async def play() -> str:
        async with scene.at_work():
            await scene.lose_h1()
            return await scene.outcome()

    assert asyncio.run(play()) == "was killed, as it had not ended after 0.5 s"


def test_a_restarted_orchestrator_runs_what_was_only_due(scene: Scene) -> None:
    """As if the first one had died between the write and the start."""
    scene.fleet.journal.commands.add(4, "a", dict.fromkeys(variables(*AN_END), "x"))
    scene.begin(Fleet(scene.fleet.cluster))

    async def play() -> str:
        async with scene.at_work():
            return await scene.outcome()

    asyncio.run(play())
    assert len(scene.told) == 1
    assert scene.fleet.journal.commands.rows() == []


def test_a_restarted_orchestrator_does_not_run_it_again(scene: Scene) -> None:
    scene.hold()

    async def dies() -> None:
        async with scene.at_work():
            await scene.lose_h1()
            await scene.until(lambda: scene.began)

    async def goes_on() -> str:
        async with scene.at_work():
            return await scene.outcome()

    asyncio.run(dies())
    assert scene.history("on_rewind") == []
    scene.begin(Fleet(scene.fleet.cluster))
    said = asyncio.run(goes_on())
    assert said == "was running when the orchestrator was restarted: its end is not known"
    assert scene.begun.read_text().count("end\n") == 1, "it has begun once"


def test_a_journal_that_was_put_back_runs_nothing_again(scene: Scene) -> None:
    scene.fleet.journal.commands.add(4, "a", variables(*AN_END))
    scene.fleet.journal.commands.begin_all()
    scene.begin(Fleet(scene.fleet.cluster))

    async def play() -> None:
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("on_rewind")))

    asyncio.run(play())
    assert scene.told == []


OWNERS = {"a/0": ("h0", 3)}
ROW = RewindRow(4, "a", 7, 1, OWNERS, [], "", 112.5, lost=["h1", "h2"])
AN_END = ROW, Generation(7, "a", "step 9", 100.0, 0, OWNERS, {})


@pytest.mark.parametrize(("saved", "repeated"), [("", "0.000"), ("s3", "12.500")])
def test_a_resumption_repeats_nothing_unless_the_job_was_adopted(saved: str, repeated: str) -> None:
    row = RewindRow(5, "a", 7, 2, OWNERS, [], "", 112.5, kind=RewindKind.RESUMPTION)
    generation = Generation(7, "a", "step 9", 100.0, 0, OWNERS, {}, saved=saved)
    told = variables(row, generation)
    assert told["LIVESHIFT_KIND"] == "resumption"
    assert told["LIVESHIFT_REPEATED_S"] == repeated
    assert told["LIVESHIFT_LOST_HOSTS"] == ""
    assert variables(*AN_END)["LIVESHIFT_LOST_HOSTS"] == "h1 h2"
