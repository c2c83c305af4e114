# SPDX-License-Identifier: Apache-2.0
"""Explores the migration protocol: never two running copies, never zero reachable images, and rest
once faults stop. With each thing that the protocol rests on taken away it finds what goes wrong.

What a state is, and what may happen in it: ownership_model.py.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from exploring import explore, follow, wander
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model_state import Budget, Protocol, initial
from ownership_model import Model

from liveshift.runtime.model.ownership import (
    BEFORE_COMMIT,
    BEFORE_RUNNING,
    Owner,
    Ruling,
    Side,
    may_pass,
    rule,
)
from liveshift.runtime.model.steps import ENDS, MigrationStep

FAULTS = ("orchestrator", "agents", "hosts", "doubles", "silences", "failures")
FOUND_AT_MOST = 60_000
"""States within which a mutation has to show."""

DEEP = os.environ.get("LIVESHIFT_MODEL_STATES", "50000")
"""How many states the deep run may visit (`make test-long STATES=…`)."""


def faults(*names: str) -> dict[str, int]:
    return {name: names.count(name) for name in names}


# Faults, and how many states that is at least: fewer, and it explores nothing. The other pairs
# take longer (test_the_other_pairs).
PAIRS = {
    ("failures",): 1_000,
    ("doubles",): 1_000,
    ("agents", "agents"): 2_000,
    ("agents", "hosts"): 1_500,
    ("doubles", "hosts"): 1_800,
    ("failures", "hosts"): 1_800,
    ("hosts", "hosts"): 300,
    ("hosts", "orchestrator"): 2_000,
    ("hosts", "silences"): 3_000,
    ("orchestrator", "orchestrator"): 5_000,
    ("silences", "silences"): 9_000,
}
OTHERS = (("agents", "silences"), ("doubles", "failures"), ("failures", "orchestrator"))
LONG_PAIRS = [
    pair
    for pair in itertools.combinations_with_replacement(sorted(FAULTS), 2)
    if pair not in PAIRS and pair not in OTHERS
]


@pytest.mark.parametrize(("pair", "least"), PAIRS.items(), ids=lambda v: str(v))
def test_faults(pair: tuple[str, ...], least: int) -> None:
    found = explore(Model(Protocol()), initial("AB", Budget(**faults(*pair))))
    assert found.violation is None, found
    assert found.whole
    assert found.states >= least


def test_a_spare_gets_the_image_that_cannot_be_restored() -> None:
    start = initial("ABC", Budget(failures=2))
    found = explore(Model(Protocol()), start, most=4_000)
    assert found.violation is None, found
    assert found.states >= 4_000


def test_without_faults_it_moves() -> None:
    """Every order of things: those that end ended well."""
    model, ends = Model(Protocol()), set()
    seen, todo = set(), [initial("AB", Budget())]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        todo += [after for _, after in model.changes(state)]
        ends.add(state.ends)
    assert len(seen) > 100
    assert ends == {(), (MigrationStep.DONE,)}


# ---- what it rests on ------------------------------------------------------------------------


MUTATIONS: list[tuple[str, Any, dict[str, int]]] = [
    ("promise_first", False, faults("agents")),
    ("note_first", False, faults("agents")),
    ("failed_epochs_end", False, faults("silences", "silences", "failures")),
    ("failed_epochs_end", False, faults("doubles", "failures")),
    ("nothing_is_gone", False, faults("hosts")),
    ("one_arrival", False, {"moves": 2, "silences": 1}),
    ("closing", False, faults("silences", "hosts")),
    ("matched", False, faults("silences", "silences")),
    ("asked_of_a_life", False, faults("doubles", "hosts")),
    ("granted_is_kept", False, faults("orchestrator", "silences")),
    ("committed_from", frozenset(), faults("orchestrator", "failures", "failures")),
    ("look_after_restart", False, faults("orchestrator", "hosts")),
    ("released_may_run", False, faults("silences", "silences", "silences")),
    ("perhaps_released", False, faults("orchestrator", "silences", "silences", "silences")),
    ("insist", False, faults("silences", "silences", "hosts")),
    ("lost_for_sure", False, faults("silences", "hosts")),
    ("granted_is_waited_for", False, faults("silences", "hosts")),
    ("return_goes_on", False, faults("orchestrator", "silences", "hosts")),
    ("may_pass", lambda owner, still: True, faults("silences")),
    ("may_pass", lambda owner, still: not owner.granted, faults()),
]


@pytest.mark.parametrize(
    ("part", "value", "budget"), MUTATIONS, ids=[f"{m[0]}{i}" for i, m in enumerate(MUTATIONS)]
)
def test_without_it_the_protocol_fails(part: str, value: Any, budget: dict[str, int]) -> None:
    found = explore(
        Model(Protocol(**{part: value})), initial("AB", Budget(**budget)), FOUND_AT_MOST
    )
    assert found.violation is not None, found
    assert found.trace


def test_a_commit_while_it_rolls_back_is_seen_after_a_restart() -> None:
    """Else the source's copy ends, though nothing is restored yet."""
    complete_and_silent = [
        "move to B",
        "B takes Reserve",
        "Reserved",
        "A takes Freeze",
        "A promises",
        "A ships",
        "B takes Manifest",
        "no answer to Freeze",
        "no answer to Progress",
        "no answer to Settle: is it complete?",
        "B takes Progress [5",
    ]
    start = initial("AB", Budget(silences=3, orchestrator=1, hosts=1))
    for seen, sound in ((BEFORE_COMMIT, False), (Protocol.committed_from, True)):
        model = Model(Protocol(committed_from=seen))
        found = explore(model, follow(model, start, complete_and_silent))
        assert (found.violation is None) is sound, found
        assert found.states > (1_000 if sound else 0)


When = Callable[[Side, bool, int, Owner, MigrationStep | None], bool]
L, C = Side.LEAVING, Side.COMING

OTHER_RULES: list[tuple[str, When, Ruling, dict[str, int]]] = [
    (
        "the source runs before the commit",
        lambda side, mine, _, __, step: side is L and mine and step in BEFORE_COMMIT,
        Ruling.RUN,
        faults("silences"),
    ),
    (
        "the source runs while it is restored",
        lambda side, mine, _, __, step: side is L and step is MigrationStep.RESTORING,
        Ruling.RUN,
        faults(),
    ),
    (
        "the source runs before it has it back",
        lambda side, mine, _, __, step: side is L and step is MigrationStep.RETURNING,
        Ruling.RUN,
        faults("silences"),
    ),
    (
        "the source ends before it runs at the destination",
        lambda side, mine, _, __, step: side is L and not mine and step in BEFORE_RUNNING,
        Ruling.END,
        faults("hosts"),
    ),
    (
        "the source never ends",
        lambda side, mine, _, __, step: (
            side is L and not mine and step in (MigrationStep.FINISHING, MigrationStep.DONE)
        ),
        Ruling.WAIT,
        faults(),
    ),
    (
        "the destination runs under any epoch",
        lambda side, mine, _, __, step: side is C and mine,
        Ruling.RUN,
        faults("silences", "silences", "agents"),
    ),
    (
        "the destination runs while it returns",
        lambda side, mine, _, __, step: side is C and not mine and step is MigrationStep.RETURNING,
        Ruling.RUN,
        faults("silences"),
    ),
    (
        "the image ends before the source has it back",
        lambda side, mine, _, __, step: side is C and not mine and step is MigrationStep.RETURNING,
        Ruling.END,
        faults("hosts", "silences"),
    ),
    (
        "the image ends before the commit",
        lambda side, mine, _, __, step: side is C and not mine and step in BEFORE_COMMIT,
        Ruling.END,
        faults("hosts", "silences"),
    ),
    (
        "the image ends before the order to restore it anew",
        lambda side, mine, epoch, owner, step: side is C and mine and epoch != owner.epoch,
        Ruling.END,
        faults("hosts", "failures"),
    ),
    (
        "the image never ends",
        lambda side, mine, epoch, owner, step: side is C and epoch != owner.epoch and step in ENDS,
        Ruling.WAIT,
        faults("silences"),
    ),
]


@pytest.mark.parametrize(
    ("when", "then", "budget"), [m[1:] for m in OTHER_RULES], ids=[m[0] for m in OTHER_RULES]
)
def test_with_another_rule_the_protocol_fails(
    when: When, then: Ruling, budget: dict[str, int]
) -> None:
    def other(
        side: Side, host: str, epoch: int, owner: Owner, step: MigrationStep | None
    ) -> Ruling:
        if when(side, owner.host == host, epoch, owner, step):
            return then
        return rule(side, host, epoch, owner, step)

    model = Model(Protocol(rule=other))
    found = explore(model, initial("AB", Budget(**budget)), FOUND_AT_MOST)
    assert found.violation is not None, found


# ---- deeper than can be explored -------------------------------------------------------------


@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.sampled_from(["AB", "ABC"]),
    st.fixed_dictionaries({fault: st.integers(0, 3) for fault in FAULTS}),
    st.integers(2, 4),
    st.randoms(use_true_random=False),
)
def test_several_moves_with_many_faults(
    hosts: str, budget: dict[str, int], moves: int, choose: random.Random
) -> None:
    found = wander(Model(Protocol()), initial(hosts, Budget(moves=moves, **budget)), choose)
    assert found.violation is None, found
    assert found.states > 0


def test_wandering_finds_what_is_wrong() -> None:
    model = Model(Protocol(may_pass=lambda owner, still: still or may_pass(owner, True)))
    start = initial("AB", Budget(moves=3, silences=3))
    walks = (wander(model, start, random.Random(seed)) for seed in range(4000))
    assert any(found.violation for found in walks)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "pair",
    [*OTHERS, *(pytest.param(pair, marks=pytest.mark.long) for pair in LONG_PAIRS)],
    ids=lambda v: str(v),
)
def test_the_other_pairs(pair: tuple[str, str]) -> None:
    found = explore(Model(Protocol()), initial("AB", Budget(**faults(*pair))))
    assert found.violation is None, found
    assert found.whole
    assert found.states > 5_000


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("most", [25_000, pytest.param(int(DEEP), marks=pytest.mark.long)])
def test_deep(most: int) -> None:
    """Three faults of any kinds, or few of them with three hosts or two moves, which share the
    states that may be visited."""
    budgets = [
        ("AB", faults(*three)) for three in itertools.combinations_with_replacement(FAULTS, 3)
    ]
    budgets += [("ABC", {"failures": 2, fault: 1 + 2 * (fault == "failures")}) for fault in FAULTS]
    budgets += [("AB", {"moves": 2, fault: 1}) for fault in FAULTS]
    total, whole, began = 0, 0, time.monotonic()
    for hosts, budget in budgets:
        each = most // len(budgets)
        found = explore(Model(Protocol()), initial(hosts, Budget(**budget)), each)
        assert found.violation is None, (hosts, budget, str(found))
        total += found.states
        whole += found.whole
    print(
        f"{total} states of {len(budgets)} budgets, {whole} of them whole, "
        f"in {time.monotonic() - began:.0f} s"
    )
    assert total > most // 4
