# SPDX-License-Identifier: Apache-2.0
"""The timeouts: all from one number, and what is said when numbers do not fit."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from cluster_files import SMALL, mistakes, quick
from hypothesis import given
from hypothesis import strategies as st

from liveshift.errors import ConfigError
from liveshift.runtime.config.cluster import parse
from liveshift.runtime.config.timeouts import (
    DERIVATIONS,
    LONGEST_STANDSTILL_S,
    RULES,
    TCP_GIVES_UP_S,
    Timeouts,
    breaches,
    effective,
)
from liveshift.runtime.config.values import LONGEST_S, SHORTEST_S


def told(**given: float) -> list[str]:
    """What a cluster file with these numbers, from line 12 on, is answered."""
    lines = "".join(f"{name} = {value}\n" for name, value in given.items())
    return mistakes(f"{SMALL}[timeouts]\n{lines}")


@pytest.mark.parametrize(
    ("collective", "standstill", "freeze", "suspicion", "heartbeat", "prepare"),
    [
        (30, 15, 6, 1, 0.2, 60),
        (120, 60, 24, 1, 0.2, 60),
        (600, 300, 120, 5, 1, 60),
        (1200, 600, 240, 10, 2, 120),
        (1800, 600, 240, 10, 2, 180),
        (86400, 600, 240, 10, 2, 600),
    ],
)
def test_everything_follows_from_one_number(
    collective: float,
    standstill: float,
    freeze: float,
    suspicion: float,
    heartbeat: float,
    prepare: float,
) -> None:
    made = Timeouts(collective=collective)
    assert (made.standstill, made.freeze, made.restore) == (standstill, freeze, freeze)
    assert (made.suspicion, made.heartbeat) == (suspicion, heartbeat)
    assert made.gpu_lock == min(30, freeze / 6)
    assert (made.prepare, made.precopy, made.grace) == (prepare, 10 * prepare, 10)
    assert made.given == {"collective": collective}


def test_the_default_is_torchs_for_nccl_and_nothing_is_given() -> None:
    assert Timeouts().collective == 600
    assert Timeouts().given == {}
    assert Timeouts() == Timeouts(collective=600) == Timeouts(**Timeouts().values)
    assert hash(Timeouts()) == hash(Timeouts(collective=600))
    assert {f.name for f in fields(Timeouts)} == {*DERIVATIONS, "given"}


@given(st.floats(30, LONGEST_S))
@quick
def test_what_is_derived_keeps_every_rule(collective: float) -> None:
    assert breaches({"collective": collective}) == []
    made = Timeouts(collective=collective)
    assert made.heartbeat < made.suspicion < min(made.prepare, made.freeze, made.restore)
    assert made.freeze + made.restore < made.standstill < made.collective
    # Peers' kernels may be the first to give up: a move is undone before that too.
    assert LONGEST_STANDSTILL_S + 4 * made.suspicion < TCP_GIVES_UP_S


@given(st.floats(SHORTEST_S, 29.9))
@quick
def test_less_than_30_seconds_cannot_be_divided(collective: float) -> None:
    for breach in breaches({"collective": collective}):
        assert (breach.name, breach.at_least) == ("collective", True)
        assert breach.limit is not None
        assert collective < breach.limit <= 30
    assert max(b.limit or 0 for b in breaches({"collective": collective})) == 30


def test_a_quicker_suspicion_makes_a_shorter_collective_possible() -> None:
    assert breaches({"collective": 10, "suspicion": 0.3}) == []


BROKEN = [  # what is given, which of it is blamed, what would do, and the sum that is told
    (
        {"heartbeat": 2},
        "12: timeouts.heartbeat: found 2.0, expected at most 1.66 (or"
        " timeouts.collective at least 720)",
        "3 × heartbeat 2 (timeouts.heartbeat, line 12) = 6 must fit into suspicion 5",
    ),
    (
        {"heartbeat": 2, "suspicion": 4},
        "13: timeouts.suspicion: found 4.0, expected at least 6",
        "= 6 must fit into suspicion 4 (timeouts.suspicion, line 13)",
    ),
    (
        {"prepare": 9},
        "12: timeouts.prepare: found 9.0, expected at least 10",
        "2 × suspicion 5 (collective / 120, from 1 to 10) = 10 must fit into prepare 9",
    ),
    ({"precopy": 9}, "12: timeouts.precopy: found 9.0, expected at least 10", "into precopy 9"),
    ({"freeze": 9}, "12: timeouts.freeze: found 9.0, expected at least 10", "into freeze 9"),
    ({"restore": 9}, "12: timeouts.restore: found 9.0, expected at least 10", "into restore 9"),
    ({"gpu_lock": 61}, "12: timeouts.gpu_lock: found 61.0, expected at most 60", "into freeze 120"),
    (
        {"freeze": 200},
        "12: timeouts.freeze: found 200.0, expected at most 165 (or"
        " timeouts.collective at least 728)",
        "freeze 200 (timeouts.freeze, line 12) + restore 120 (2/5 of standstill) + 3 × suspicion 5"
        " (collective / 120, from 1 to 10) = 335 must fit into standstill 300 (collective / 2",
    ),
    (
        {"restore": 150, "freeze": 200},
        "13: timeouts.freeze: found 200.0, expected at most 135",
        "restore 150 (timeouts.restore, line 12)",
    ),
    (
        {"standstill": 100, "freeze": 60},
        "12: timeouts.standstill: found 100.0, expected at least 125",
        "restore 40 (2/5 of standstill)",
    ),
    (
        {"suspicion": 25},
        "12: timeouts.suspicion: found 25.0, expected at most 20 (or"
        " timeouts.collective at least 750)",
        "= 315 must fit into standstill 300",
    ),
    (
        {"standstill": 590},
        "12: timeouts.standstill: found 590.0, expected at most 552 (or"
        " timeouts.collective at least 641)",
        "standstill 590 (timeouts.standstill, line 12) + 4 × suspicion 5 (collective / 120, "
        "from 1 to"
        " 10) = 639.5 must fit into collective 600 (default)",
    ),
    (
        {"collective": 60, "standstill": 59},
        "12: timeouts.collective: found 60.0, expected at least 66",
        "standstill 59 (timeouts.standstill, line 13)",
    ),
    (
        {"collective": 20},
        "12: timeouts.collective: found 20.0, expected at least 30:",
        "freeze 4 (2/5 of standstill) + restore 4 (2/5 of standstill) + 3 × suspicion 1 "
        "(collective /"
        " 120, from 1 to 10) = 11 must fit into standstill 10 (collective / 2, at most 600)",
    ),
    (
        {"freeze": 300, "restore": 300},
        "12: timeouts.freeze: found 300.0, expected less, or left"
        " out: then freeze is 120, restore is 120:",
        "= 615 must fit into standstill 300",
    ),
]


@pytest.mark.parametrize(("numbers", "start", "part"), BROKEN, ids=lambda part: str(part)[:50])
def test_a_contradiction_names_both_with_lines_and_says_what_would_do(
    numbers: dict[str, float], start: str, part: str
) -> None:
    (answer,) = told(**numbers)
    assert answer.startswith(f"cluster.toml:{start}")
    assert part in answer
    assert ", since " in answer


def test_every_rule_is_broken_by_one_of_these() -> None:
    for rule in RULES:
        assert any(not rule.holds(effective(numbers)) for numbers, _, _ in BROKEN), rule


def test_what_is_said_to_do_does() -> None:
    """Each limit is good, and a little beyond it is not."""
    tried = 0
    for numbers, _, _ in BROKEN:
        for breach in breaches(numbers):
            if breach.limit is None:
                continue
            beyond = 0.98 if breach.at_least else 1.02
            assert not breaches({**numbers, breach.name: breach.limit}), numbers
            assert breaches({**numbers, breach.name: breach.limit * beyond}), numbers
            tried += 1
            if breach.collective is not None and breach.name != "collective":
                assert not breaches({**numbers, "collective": breach.collective}), numbers
    assert tried > 10


def test_of_several_reasons_the_one_that_asks_for_most_is_told() -> None:
    (answer,) = told(suspicion=100)
    assert "expected at most 20:" in answer
    answers = told(suspicion=100, freeze=20)
    assert [re.findall(r"timeouts\.(\w+): found", a) for a in answers] == [
        ["suspicion"],
        ["freeze"],
    ]


def test_a_number_that_cannot_be_read_breaks_no_rule() -> None:
    (answer,) = mistakes(f'{SMALL}[timeouts]\ncollective = "long"\nstandstill = 590\n')
    assert answer.startswith('cluster.toml:12: timeouts.collective: found "long"')
    (answer,) = mistakes(f'{SMALL}[timeouts]\nsuspicion = "long"\nheartbeat = 600\n')
    assert answer.startswith('cluster.toml:12: timeouts.suspicion: found "long"')
    (answer,) = mistakes(f"{SMALL}[timeouts]\nsuspicion = 0\nfreeze = 9\n")
    assert answer.startswith("cluster.toml:12: timeouts.suspicion: found 0, expected a number")


def test_a_standstill_that_no_connection_outlives_is_refused() -> None:
    (answer,) = told(collective=3600, standstill=700)
    assert answer.endswith("found 700, expected a number of seconds from 0.01 to 600")


def test_timeouts_made_in_code_are_held_to_the_same_rules() -> None:

    cluster = parse(SMALL).cluster
    with pytest.raises(
        ConfigError, match=r"^timeouts\.collective: found 20.0, expected at least 30"
    ):
        replace(cluster, timeouts=Timeouts(collective=20))


def test_another_patience_keeps_what_is_given_and_how_hosts_beat() -> None:
    cluster = Timeouts(collective=1800, freeze=50, prepare=90)
    job = cluster.under(300)
    assert (job.collective, job.standstill, job.freeze, job.restore) == (300, 150, 50, 60)
    assert (job.suspicion, job.heartbeat) == (cluster.suspicion, cluster.heartbeat) == (10, 2)
    assert (job.prepare, job.precopy, job.grace) == (90, 900, 10)


def test_an_answer_is_waited_for_one_suspicion_longer_than_the_step() -> None:
    assert Timeouts().answer(120) == 125
