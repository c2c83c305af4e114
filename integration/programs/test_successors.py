# SPDX-License-Identifier: Apache-2.0
"""The watch over copies and their successors sees what must not be. What runs is played here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_matrix.successors import Copy, Successors
from fault_matrix.watcher import Sandbox


class Played(Successors):
    """``runs``: the copies that run, as indices; ``counts``: what each has finished."""

    def __init__(self, directory: Path) -> None:
        lab: Any = SimpleNamespace(directory=directory, machines=[])
        super().__init__(lambda: lab, "gpt/1", [1001], 1.0)
        self.made = [Copy(Sandbox(host, number, number > 0)) for number, host in enumerate(HOSTS)]
        self.counts = [0, 0, 0]
        self.runs: list[int] = []

    def _running(self) -> list[Copy]:
        for copy in (self.made[number] for number in self.runs):
            if copy not in self._copies:
                self._copies.append(copy)
        return [copy for copy in self._copies if self.made.index(copy) in self.runs]

    def _finished(self, copy: Copy) -> int:
        return self.counts[self.made.index(copy)]

    def look(self, *runs: int, counts: tuple[int, int, int]) -> list[str]:
        self.runs, self.counts = list(runs), list(counts)
        self._look()
        return self.broken


HOSTS = ("h0", "h2", "h3")


@pytest.fixture
def watch(tmp_path: Path) -> Played:
    return Played(tmp_path)


def test_one_after_the_other_is_right(watch: Played) -> None:
    watch.look(0, counts=(5, 0, 0))
    watch.look(counts=(5, 0, 0))
    watch.look(1, counts=(5, 3, 0))
    assert watch.look(2, counts=(5, 9, 4)) == []
    assert not watch.overlapped
    assert "h3 running (copy 3)" in watch.story()


def test_two_that_run_are_wrong_unless_the_earlier_one_is_cut_off(watch: Played) -> None:
    watch.look(0, counts=(5, 0, 0))
    watch.cut_off("h0")
    assert watch.look(0, 1, counts=(5, 3, 0)) == []
    assert watch.overlapped
    watch.heard_again()
    (told,) = watch.look(0, 1, counts=(5, 4, 0))
    assert told.startswith("TWO RUN: the copy on h0")
    assert watch.look(0, 1, counts=(5, 5, 0)) == [told], "it is told once"


def test_the_later_one_may_not_run_beside_a_third_because_the_first_is_cut_off(
    watch: Played,
) -> None:
    watch.cut_off("h0")
    for runs in ((0,), (0, 1)):
        watch.look(*runs, counts=(5, 3, 0))
    (told,) = watch.look(0, 1, 2, counts=(5, 3, 1))
    assert told.startswith("TWO RUN: the copy on h2")


def test_a_fenced_copy_may_end_its_collective_and_no_more(watch: Played) -> None:
    watch.cut_off("h0")
    watch.look(0, counts=(5, 0, 0))
    watch.look(0, 1, counts=(6, 3, 0))
    assert watch.look(0, 1, counts=(7, 4, 0)) == []
    (told,) = watch.look(0, 1, counts=(8, 5, 0))
    assert told.startswith("A FENCED COPY MAKES PROGRESS: the copy on h0")


def test_a_fenced_copy_makes_no_progress_once_its_successor_is_gone_either(watch: Played) -> None:
    watch.cut_off("h0")
    watch.look(0, counts=(5, 0, 0))
    watch.look(0, 1, counts=(5, 3, 0))
    (told,) = watch.look(0, counts=(7, 3, 0))
    assert told.startswith("A FENCED COPY MAKES PROGRESS")
