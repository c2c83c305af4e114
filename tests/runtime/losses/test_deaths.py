# SPDX-License-Identifier: Apache-2.0
"""Which ends of a command are the work of a fault, and when a job is to blame for them itself."""

from __future__ import annotations

import signal

import pytest

from liveshift.runtime.journal.snapshot_tables import RewindRow
from liveshift.runtime.losses.deaths import HOUR_S, killed_by, own_fault, words
from liveshift.runtime.messages import CapsuleEnded

NOW = 1_000_000.0


def end(code: int = 1, signum: int = 0, collectives: int = 40) -> CapsuleEnded:
    return CapsuleEnded("gpt/1", 3, code, signum, collectives)


def rewind(died: dict[str, int], ago: float = 60.0, generation: int = 7) -> RewindRow:
    return RewindRow(1, "gpt", generation, 1, {}, [], "", NOW - ago, died)


def blame(
    ended: CapsuleEnded,
    *earlier: RewindRow,
    newest: int = 9,
    most: int = 5,
    back: bool = False,
) -> str:
    return own_fault(ended, newest, earlier, most, lambda row: NOW - row.time, going_back=back)


@pytest.mark.parametrize(
    ("ended", "killed"),
    [
        (end(137), signal.SIGKILL),
        (end(139), signal.SIGSEGV),
        (end(135), signal.SIGBUS),
        (end(134), signal.SIGABRT),
        (end(1, signal.SIGKILL), signal.SIGKILL),  # torchrun
        (end(0), None),
        (end(1), None),
        (end(255), None),
        (end(128), None),
        (end(130), None),  # SIGINT: a person wanted it
        (end(143), None),  # SIGTERM
        (end(1, signal.SIGTERM), None),
    ],
)
def test_a_fault_is_a_signal_that_nobody_asks_with(
    ended: CapsuleEnded, killed: signal.Signals | None
) -> None:
    assert killed_by(ended) == killed


def test_the_words_say_who_died_of_what() -> None:
    assert words(end(137)) == "gpt/1 was ended by SIGKILL"
    assert words(end(1, signal.SIGBUS)) == "a rank of gpt/1 was ended by SIGBUS"
    assert words(end(3)) == "gpt/1 ended with code 3"


def test_a_first_death_is_not_the_job_s_fault() -> None:
    assert blame(end(137)) == ""
    assert blame(end(137), rewind({})) == "", "a host was lost before"


def test_a_second_death_at_the_same_collective_is() -> None:
    before = rewind({"gpt/1": 40})
    assert blame(end(139), before) == (
        "gpt/1 was ended by SIGSEGV twice in a row after collective 40: the job does that by"
        " itself, and is not taken back again"
    )
    assert blame(end(139), rewind({}), before, rewind({})), "lost hosts between do not matter"
    assert blame(end(139, collectives=41), before) == ""
    assert blame(end(139), before, rewind({"gpt/1": 41})) == "", "not twice in a row"
    assert blame(end(139), rewind({"gpt/0": 41})) == "", "another rank, later"


def test_any_rank_may_be_the_first_that_dies_of_it() -> None:
    assert blame(end(139), rewind({"gpt/0": 40})) == (
        "gpt/1 was ended by SIGSEGV after collective 40, after which gpt/0 had failed before: the"
        " job does that by itself, and is not taken back again"
    )
    assert blame(end(139, collectives=0), rewind({"gpt/0": 0})) == "", "nothing is counted"
    assert blame(end(139, collectives=0), rewind({"gpt/0": 0}, generation=9)) == ""


def test_one_that_fails_while_the_others_are_not_back_yet_is_not_to_blame() -> None:
    """All stand at the collective of the snapshot then."""
    assert blame(end(1), rewind({"gpt/0": 40}), back=True) == ""
    assert "twice in a row" in blame(end(1), rewind({"gpt/1": 40}), back=True)


def test_without_a_count_it_is_a_second_death_before_the_next_snapshot() -> None:
    before = rewind({"gpt/1": 0}, generation=9)
    assert "twice in a row within one interval, before a snapshot later than s9" in blame(
        end(139, collectives=0), before
    )
    assert blame(end(139, collectives=0), rewind({"gpt/1": 0}, generation=8)) == ""
    assert blame(end(139, collectives=40), before), "one count alone says nothing"


def test_deaths_take_a_job_back_so_often_in_an_hour_only() -> None:
    deaths = [rewind({"gpt/0": n}, ago=n) for n in range(5, 0, -1)]
    assert blame(end(137), *deaths[1:]) == ""
    assert "taken back 5 times" in blame(end(137), *deaths)
    assert blame(end(137), *deaths, most=6) == ""
    assert blame(end(137), rewind({"gpt/0": 1}, ago=HOUR_S), *deaths[1:]) == "", "an hour ago"
    assert blame(end(137), *[rewind({})] * 9) == "", "lost hosts do not count"
    assert "max_rewinds is 0" in blame(end(137), most=0)
