# SPDX-License-Identifier: Apache-2.0
"""Copies on idle cores have less weight than the job; copies that a job waits for do not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from liveshift.background import NICE, Background

IN_A_SESSION = """
from pathlib import Path
from liveshift import background

def weight():
    return Path("/proc/self/autogroup").read_text().split()[-1]

said = [weight()]
for change in (background.begin, background.leave, background.begin, background.end):
    change("m1")
    said.append(weight())
print(*said)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Background:
    """One that believes that this process leads its session; its file is an ordinary one."""
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid())
    (tmp_path / "autogroup").write_text("0")
    return Background(tmp_path / "autogroup")


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_it_is_low_only_while_all_copy_on_idle_cores(here: Background, tmp_path: Path) -> None:
    def weights() -> tuple[int, str]:
        return here._nice, (tmp_path / "autogroup").read_text()

    low, usual = (NICE, str(NICE)), (0, "0")
    assert weights() == usual
    here.begin("m1")
    assert weights() == low
    here.begin("m2")
    here.leave("m1")  # its capsule is frozen
    assert weights() == usual
    here.end("m1")
    assert weights() == low
    here.end("m2")
    assert weights() == usual
    here.end("m2")
    here.leave("m3")  # it never copied on idle cores
    here.end("m3")
    assert weights() == usual


def test_a_session_has_its_own_weight_again_afterwards(here: Background, tmp_path: Path) -> None:
    (tmp_path / "autogroup").write_text("/autogroup-7 nice -3\n")
    here.begin("m1")
    assert (tmp_path / "autogroup").read_text() == str(NICE)
    here.end("m1")
    assert (tmp_path / "autogroup").read_text() == "-3"


@pytest.mark.root
@pytest.mark.parametrize(("usual", "low"), [(0, NICE), (-5, NICE), (15, 15)])
def test_threads_that_copy_take_it_and_give_it_back(here: Background, usual: int, low: int) -> None:
    """An agent's unit may have a nice value of its own; it has that again afterwards."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def copy() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual)
        for change in (here.begin, here.leave, here.begin, here.end):
            change("m1")
            here.adopt()
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    in_a_thread(copy)
    assert seen == [low, usual, low, usual]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "this thread has not adopted it"


def test_without_the_right_to_return_no_thread_takes_it(
    here: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liveshift.background._may_raise_priority", lambda: False)
    here.begin("m1")
    in_a_thread(here.adopt)
    monkeypatch.setattr(os, "setpriority", lambda *_: pytest.fail("it could not go back"))
    in_a_thread(here.adopt)


def test_the_session_of_another_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who starts an agent in a terminal has a shell in the same session."""
    monkeypatch.setattr(os, "getsid", lambda pid: os.getppid())
    (tmp_path / "autogroup").write_text("0")
    here = Background(tmp_path / "autogroup")
    here.begin("m1")
    assert (tmp_path / "autogroup").read_text() == "0"


@pytest.mark.machine("autogroup")
def test_the_kernel_takes_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_SESSION],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    assert done.stdout.split() == ["0", "10", "0", "10", "0"]
