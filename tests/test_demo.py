# SPDX-License-Identifier: Apache-2.0
"""`make demo` keeps off another one, and tells of what went wrong first."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

from liveshift.errors import LiveshiftError
from liveshift.launcher import demo


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The commands that a demo would have run, from a checkout of its own."""
    said: list[tuple[str, ...]] = []
    (tmp_path / demo.SCRIPT).parent.mkdir()
    (tmp_path / demo.SCRIPT).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "RUNNING", tmp_path / "running")
    monkeypatch.setattr(demo, "_command", lambda *words, quiet=False: said.append(words))
    monkeypatch.setattr(sys, "argv", ["demo"])
    return said


def test_a_second_demo_leaves_the_first_ones_lab_alone(
    commands: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    with demo.RUNNING.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert demo.main() == 5
    assert commands == []
    assert not demo.OUT.exists()
    assert "a demo runs on this machine already" in capsys.readouterr().err


def test_help_runs_nothing(
    commands: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--help"])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 0
    assert "train twice on virtual hosts" in capsys.readouterr().out
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
    assert commands == [("lab", "down", "demo"), ("lab", "up", "demo", "--hosts", "3"),
                        ("lab", "down", "demo")]  # fmt: skip
