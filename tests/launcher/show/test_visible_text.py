# SPDX-License-Identifier: Apache-2.0
"""What is printed for a person contains nothing that the terminal would obey, but for our own
colours."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Group
from rich.live import Live
from rich.progress import Progress

from liveshift.launcher import demo
from liveshift.launcher.checks import doctor
from liveshift.launcher.checks.finding import Finding, Verdict
from liveshift.launcher.commands import events
from liveshift.launcher.show import render
from liveshift.runtime.messages import Event

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b5n\u202e\udcff bad"
CURSOR = re.compile(r"\x1b\[\?25[hl]|\r?\x1b\[2K|\x1b\[1A")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(monkeypatch: pytest.MonkeyPatch, made: type[io.StringIO]) -> str:
    """All that these functions print of a text, of an event of an old journal, and of an error."""
    out = made()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    table = render.table("what", "who")
    table.add_row(Group(EVIL, "second line"), EVIL)
    render.show(table)
    render.note(EVIL)
    render.failure(f"{EVIL}\nin two lines", EVIL)
    render.out().print(EVIL, soft_wrap=True)
    events._print([Event(1, 5.0, "gpt", "moving", EVIL, "root", None)], wide=True)
    return out.getvalue()


@pytest.mark.parametrize("made", [Terminal, io.StringIO])
def test_no_control_characters_but_our_own_are_printed(
    monkeypatch: pytest.MonkeyPatch, made: type[io.StringIO]
) -> None:
    found = told(monkeypatch, made)
    left = COLOURS.sub("", found)
    assert left.replace("\n", "").isprintable(), left
    assert left.count("owned") == 7
    assert "\nin two lines\n" in left
    if made is Terminal:
        assert found != left, "our own colours stay"


def test_nor_by_what_is_printed_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich moves the cursor itself then, and erases lines."""
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    with Live(EVIL, console=render.out(), auto_refresh=False) as live:
        live.update(Group(EVIL), refresh=True)
    with Progress("{task.description}", console=render.out(), auto_refresh=False) as bars:
        bars.add_task(EVIL)
    left = CURSOR.sub("", COLOURS.sub("", out.getvalue()))
    assert left.replace("\n", "").isprintable(), left
    assert left.count("owned") >= 3


@pytest.mark.parametrize("made", [Terminal, io.StringIO])
def test_nor_by_the_doctor_who_shows_what_programs_print(
    monkeypatch: pytest.MonkeyPatch, made: type[io.StringIO]
) -> None:
    out = made()
    monkeypatch.setattr(sys, "stdout", out)
    doctor._print([Finding("CRIU", EVIL, EVIL, Verdict.FAIL, EVIL)])
    left = COLOURS.sub("", out.getvalue())
    assert left.replace("\n", "").isprintable(), left
    assert left.count("owned") == 3


def test_nor_by_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)  # a file set to the console itself would stay set
    demo.console.print(EVIL, style="red", markup=False)
    left = COLOURS.sub("", out.getvalue())
    assert left.replace("\n", "").isprintable(), left
    assert "owned" in left
