# SPDX-License-Identifier: Apache-2.0
"""`make demo` trains on until its move is over, keeps off another demo, says what went wrong."""

from __future__ import annotations

import fcntl
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from liveshift.errors import LiveshiftError
from liveshift.launcher import alone, demo
from liveshift.launcher.report.evidence import doubts
from liveshift.launcher.report.record import (
    DowntimeReport,
    RankRun,
    ReportedMigration,
    ReportedStep,
)
from liveshift.runtime.messages import (
    CapsuleRow,
    Event,
    Events,
    GetEvents,
    GetInspection,
    GetMigration,
    Inspection,
    JobRow,
    Message,
    MigrationDetails,
    MigrationRow,
    Phase,
)
from liveshift.runtime.model.steps import MigrationStep


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The commands that a demo would have run, from a checkout of its own."""
    said: list[tuple[str, ...]] = []
    (tmp_path / demo.SCRIPT).parent.mkdir()
    (tmp_path / demo.SCRIPT).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(alone.HOLDER, raising=False)
    monkeypatch.setattr(alone, "LOCK", tmp_path / "running")
    monkeypatch.setattr(demo, "_command", lambda *words, quiet=False: said.append(words))
    monkeypatch.setattr(sys, "argv", ["demo"])
    return said


def test_a_second_demo_leaves_the_first_ones_lab_alone(
    commands: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    with alone.LOCK.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("make test (process 7)")
        other.flush()
        assert demo.main() == 5
    assert commands == []
    assert not demo.OUT.exists()
    said = capsys.readouterr().err
    assert "make demo cannot start: make test (process 7) runs on this machine" in said


def test_help_runs_nothing(
    commands: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--help"])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 0
    assert "empty a host while a job trains on it" in capsys.readouterr().out
    assert commands == []


def test_a_lab_that_cannot_be_removed_does_not_hide_why_the_demo_failed(
    commands: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**ignored: object) -> None:
        raise LiveshiftError("h1 fell over")

    monkeypatch.setattr(demo, "find_socket", fail)
    assert demo.main() == 1
    assert "h1 fell over" in capsys.readouterr().err
    assert commands == [
        ("lab", "down", "demo"),
        ("lab", "up", "demo", "--hosts", "3", "--snapshots", "every=off"),
        ("lab", "down", "demo"),
    ]


class Played:
    """Stands in for the cluster: a job whose steps and moves the test makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[MigrationRow] = []
        self.hosts = {"moved/0": "h0", "moved/1": "h1"}
        self.processes = 1
        self.asked: list[str] = []
        folder.mkdir(parents=True)

    def step(self, count: int) -> None:
        for rank in range(demo.RANKS):
            with (self.folder / f"rank{rank}.jsonl").open("a") as log:
                log.write("{}\n" * count)

    def get(self, kind: type[Message], ask: Message, timeout: float = 0.0) -> Message:
        if isinstance(ask, GetEvents):
            return Events(
                [Event(n, 0.0, "moved/1", "move", "", "", r) for n, r in enumerate(self.rows)]
            )
        if isinstance(ask, GetMigration):
            return MigrationDetails(next(row for row in self.rows if row.name == ask.name))
        assert isinstance(ask, GetInspection)
        self.asked.append(ask.capsule)
        states: list[Any] = [None] * (self.processes if ask.capsule == "moved/1" else 1)
        return Inspection(ask.capsule, self.hosts[ask.capsule], states)

    def job(self) -> JobRow:
        capsules = [
            CapsuleRow(f"moved/{n}", n, "running", f"h{n}", 1, "", [n], 1, 0, 0, 0.0, None, None)
            for n in range(demo.RANKS)
        ]
        return JobRow("moved", "running", "", 0, 0.0, 0.0, None, capsules)


def a_row(name: str, state: MigrationStep, error: str | None = None) -> MigrationRow:
    return MigrationRow(
        name,
        "moved/1",
        "h1",
        "h2",
        "",
        "",
        1,
        state.value,
        0.0,
        1.0,
        0.0,
        0,
        0,
        0,
        0.0,
        [],
        error,
        None,
    )


@pytest.fixture
def played(commands: list[tuple[str, ...]], tmp_path: Path) -> Played:
    return Played(tmp_path / demo.OUT / "moved")


def watched(played: Played) -> demo.Watched:
    client: Any = played
    return demo.Watched(client, "moved")


def test_the_job_goes_on_until_enough_steps_were_made_after_the_move(
    played: Played, commands: list[tuple[str, ...]]
) -> None:
    move = watched(played)
    played.step(demo.TAINT_AT - 1)
    move.follow(played.job(), played.folder)
    assert commands == []
    played.step(1)
    move.follow(played.job(), played.folder)
    assert [words[:3] for words in commands] == [("taint", "host", "h1")]
    for state in (MigrationStep.PRECOPYING, MigrationStep.RESTORING):
        played.step(300)  # however long it takes
        played.rows = [a_row("m1", state)]
        move.follow(played.job(), played.folder)
        assert not demo.STOP.exists()
    played.rows, played.hosts["moved/1"] = [a_row("m1", MigrationStep.DONE)], "h2"
    move.follow(played.job(), played.folder)
    assert int(demo.STOP.read_text()) == demo.TAINT_AT + 600 + demo.MORE
    played.step(10)
    move.follow(played.job(), played.folder)
    assert int(demo.STOP.read_text()) == demo.TAINT_AT + 600 + demo.MORE, "said once"
    assert len(commands) == 1
    assert played.asked == ["moved/0", "moved/1"] * 2, "every rank, before the move and after it"
    with pytest.raises(LiveshiftError, match="no agent found the ranks in their last 20 steps"):
        move.done()
    played.step(10)
    for _ in range(2):
        move.follow(played.job(), played.folder)
    assert played.asked == ["moved/0", "moved/1"] * 3, "and once near the last step"
    assert move.done().name == "m1"
    assert move.found == [{0: "h0", 1: "h1"}, {0: "h0", 1: "h2"}, {0: "h0", 1: "h2"}]


@pytest.mark.parametrize(
    ("rank", "more", "fails"),
    [(0, 20, True), (1, 20, True), (1, 40, False)],
    ids=["the other one", "the moved one", "they have ended"],
)
def test_every_rank_must_still_be_found_near_the_last_step(
    played: Played, rank: int, more: int, fails: bool
) -> None:
    move = watched(played)
    played.step(demo.TAINT_AT)
    move.follow(played.job(), played.folder)
    played.rows, played.hosts["moved/1"] = [a_row("m1", MigrationStep.DONE)], "h2"
    move.follow(played.job(), played.folder)
    played.hosts[f"moved/{rank}"] = "h3"
    played.step(more)
    if fails:
        with pytest.raises(LiveshiftError, match=rf"moved/{rank} should train on h\d, but h3 has"):
            move.follow(played.job(), played.folder)
    else:
        move.follow(played.job(), played.folder)
    with pytest.raises(LiveshiftError, match="no agent found"):
        move.done()


def test_a_host_that_does_not_become_empty_ends_the_demo(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job would train for hours."""
    move = watched(played)
    played.step(demo.TAINT_AT)
    move.follow(played.job(), played.folder)
    monkeypatch.setattr(demo, "EMPTY_WITHIN_S", 0.0)
    with pytest.raises(LiveshiftError, match="off h1 in 0 s: no migration began"):
        move.follow(played.job(), played.folder)
    played.rows = [a_row("m1", MigrationStep.PRECOPYING)]
    with pytest.raises(LiveshiftError, match="m1 is pre-copying"):
        move.follow(played.job(), played.folder)


def test_steps_are_ascribed_to_the_host_whose_agent_has_found_the_rank(
    commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to the one where the move says that it went."""
    steps = tuple(ReportedStep(n, 1.0, float(n)) for n in range(1, 9))
    monkeypatch.setattr(demo, "read_rank", lambda folder, rank: RankRun(rank, steps, "a"))
    monkeypatch.setattr(demo, "_environment", dict)
    phases = [Phase("commit", 4.5, 0.1, None, True, "")]
    row = msgspec.structs.replace(a_row("m1", MigrationStep.DONE), phases=phases)
    finished = demo._report(row, [{0: "h0", 1: "h1"}, {0: "h0", 1: "h2"}, {0: "h0", 1: "h3"}])
    zero, one = ([s.host for s in run.steps] for run in finished.moved)
    assert zero == ["h0"] * 8
    assert one == ["h1"] * 4 + ["h3"] * 4
    assert any("rank 1 made 4 steps on h3 after" in why for why in doubts(finished, 4))


def test_a_move_that_fails_is_told_and_the_next_one_counts(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    move = watched(played)
    played.step(demo.TAINT_AT)
    move.follow(played.job(), played.folder)
    played.rows = [a_row("m1", MigrationStep.FAILED, "no memory there")]
    for _ in range(2):
        move.follow(played.job(), played.folder)
    assert capsys.readouterr().err.count("moved/1 stays on h1: no memory there") == 1
    assert not demo.STOP.exists()
    played.rows.append(a_row("m2", MigrationStep.DONE))
    played.hosts["moved/1"] = "h2"
    move.follow(played.job(), played.folder)
    assert demo.STOP.exists()
    played.step(demo.MORE // 2)
    move.follow(played.job(), played.folder)
    assert move.done().name == "m2"


@pytest.mark.parametrize("processes", [0, 1])
def test_a_rank_that_its_hosts_agent_does_not_find_there_has_not_moved(
    played: Played, processes: int
) -> None:
    move = watched(played)
    played.step(demo.TAINT_AT)
    move.follow(played.job(), played.folder)
    played.rows, played.processes = [a_row("m1", MigrationStep.DONE)], processes
    played.hosts["moved/1"] = "h1" if processes else "h2"
    with pytest.raises(LiveshiftError, match="moved/1 should train on h2, but h"):
        move.follow(played.job(), played.folder)
    assert not demo.STOP.exists()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no migration began"),
        (
            [
                a_row(
                    "m1",
                    MigrationStep.JOB_ENDED,
                    "moved/1 ended with code 0 before it could move h1 → h2",
                )
            ],
            "moved/1 ended with code 0 before it could move h1 → h2",
        ),
        (
            [a_row("m1", MigrationStep.FAILED, "no memory there")],
            "moved/1 stays on h1: no memory there",
        ),
    ],
    ids=["none", "overtaken", "failed"],
)
def test_without_a_move_the_demo_says_why(
    played: Played, rows: list[MigrationRow], words: str
) -> None:
    played.rows = rows
    with pytest.raises(LiveshiftError) as raised:
        watched(played).done()
    assert str(raised.value) == f"nothing moved off h1: {words}"
    assert "None" not in str(raised.value)


def test_a_demo_whose_steps_do_not_bear_the_move_out_fails(
    commands: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every loss is equal, and the rank was moved after its last step."""
    steps = {n: tuple(ReportedStep(k, 1.0, 100.0 + k, f"h{n}") for k in range(50)) for n in (0, 1)}
    runs = tuple(RankRun(n, steps[n], "aa") for n in steps)
    phases = (Phase("dump", 0.0, 1.0, frozen=True),)
    move = ReportedMigration("moved/1", "h1", "h2", "", 2, 200.0, 200.0, phases, 0.0, 0, ranks=(1,))
    finished = DowntimeReport("demo", "", runs, runs, move)
    assert finished.bit_identical

    def nothing(*_ignored: object, **_more: object) -> None:
        return None

    monkeypatch.setattr(demo, "_lab", lambda: nullcontext())
    monkeypatch.setattr(demo, "_train", nothing)
    monkeypatch.setattr(demo.Watched, "done", nothing)
    monkeypatch.setattr(demo, "_report", lambda row, hosts: finished)
    assert demo.main() == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "error: the steps do not confirm the move: " in said
    assert "no gap between two steps holds the freeze" in said
    assert "paused for" not in said
    page = (demo.OUT / "report.html").read_text()
    assert "but the steps do not confirm that" in page
    assert '<p class="lead">The steps do not confirm the move: moved/1, rank 1: ' in page
    assert "while it trained: " not in page
    document = json.loads((demo.OUT / "report.json").read_text())
    assert document["downtime_s"] is None
    assert document["outcome"].startswith("The steps do not confirm the move: ")


def test_the_page_says_how_many_steps_were_made_where() -> None:
    steps = tuple(ReportedStep(n, 1.0, float(n), "h1" if n < 5 else "h2") for n in range(1, 9))
    phases = (Phase("dump", 0.0, 0.5, frozen=True),)
    move = ReportedMigration("moved/1", "h1", "h2", "", 2, 4.2, 4.2, phases, 0.0, 0, ranks=(1,))
    runs = (RankRun(1, steps, "aa"),)
    finished = DowntimeReport("demo", "", runs, runs, move)
    assert doubts(finished, 4) == []
    assert demo._outcome(finished, []) == (
        "Rank 1 made 4 steps on h1 before the freeze and 4 steps on h2 after it."
    )
