# SPDX-License-Identifier: Apache-2.0
"""A process that is told what to do: its answers, and what is said when it has ended."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured import PYTHON
from told_process import ToldProcess

EVALUATES = "import sys\nfor line in sys.stdin: print(eval(line), flush=True)"


@pytest.fixture
def told() -> Iterator[ToldProcess]:
    process = ToldProcess(
        subprocess.Popen([PYTHON, "-Sc", EVALUATES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    yield process
    process.end()


def test_answers_come_in_the_order_of_what_it_was_told(told: ToldProcess) -> None:
    told.begin("6 * 7")
    told.begin("'later'")
    assert told.line() == "42\n"
    assert told.line() == "later\n"


def test_what_ends_instead_of_answering_is_told_with_its_status(told: ToldProcess) -> None:
    told.begin("sys.exit(7)")
    with pytest.raises(AssertionError, match="it ended with 7"):
        told.line()
    assert told.wait() == 7


def test_it_may_be_ended_twice(told: ToldProcess) -> None:
    told.end()
    assert not Path(f"/proc/{told.pid}").exists()
    told.end()
    assert told.wait() == -9
