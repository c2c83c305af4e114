# SPDX-License-Identifier: Apache-2.0
"""Explores snapshots, rewinds and suspensions: one running copy of each capsule under the newest
count, a consistent cut, images that are kept, and rest once faults stop. With each safeguard taken
away it finds what goes wrong.

What a state is, and what may happen in it: rewind_model.py and what it imports.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from exploring import explore, follow, wander
from rewind_budgets import FOUND_AT_MOST, KINDS, PAIRS, faults, whole
from rewind_model import RewindModel
from rewind_state import (
    Faults,
    Safeguards,
    State,
    at,
    initial,
    precopying,
    waiting,
)

from liveshift.runtime.model.ownership import Owner, Ruling, Side, rule, rule_held
from liveshift.runtime.model.steps import MigrationStep

SNAPSHOT = {
    (): 15,
    ("agents",): 100,
    ("chunks",): 40,
    ("doubles",): 100,
    ("failures",): 15,
    ("orchestrator",): 50,
    ("silences",): 100,
    ("agents", "silences"): 500,
    ("cuts",): 10_000,
    ("hosts",): 5_000,
}
"""Faults while a snapshot is taken, and how many states that is at least: fewer, and it explores
nothing."""

REWIND = {
    ("agents", "hosts"): 2_000,
    ("cuts", "cuts"): 10_000,
    ("cuts", "failures"): 1_000,
    ("cuts", "silences"): 5_000,
    ("doubles", "hosts"): 1_000,
    ("hosts", "hosts"): 5_000,
    ("hosts", "orchestrator"): 2_000,
}
"""The same without another snapshot: the job has one, and is rewound."""

SUSPENSION = {
    (): 3_000,
    ("agents",): 200,
    ("chunks",): 40,
    ("doubles",): 300,
    ("orchestrator",): 100,
    ("silences",): 300,
    ("cuts",): 2_000,
    ("hosts",): 1_000,
    ("cuts", "silences"): 2_000,
    ("hosts", "orchestrator"): 2_000,
}
"""The same while a job is suspended and resumed."""

MOST = 2_500
"""States of each budget that would take too long as a whole. Those nearest to the start come
first."""


def nearest(start: State, least: int, most: int = MOST) -> None:
    """Explore so many states."""
    found = explore(RewindModel(Safeguards()), start, most)
    assert found.violation is None, found
    assert found.states >= min(least, most)


# With at most one fault in a snapshot, and with two in a rewind, every state is explored.


@pytest.mark.parametrize(("kinds", "least"), SNAPSHOT.items(), ids=lambda v: str(v))
def test_faults_in_a_snapshot(kinds: tuple[str, ...], least: int) -> None:
    whole(initial(faults(*kinds, snapshots=1)), least)


@pytest.mark.parametrize("left", ["source", "destination"])
@pytest.mark.parametrize(("kinds", "least"), SNAPSHOT.items(), ids=lambda v: str(v))
def test_faults_in_a_snapshot_after_a_move_that_failed(
    kinds: tuple[str, ...], least: int, left: str
) -> None:
    nearest(initial(faults(*kinds, snapshots=1), left), least, MOST // 4)


@pytest.mark.parametrize(("kinds", "least"), REWIND.items(), ids=lambda v: str(v))
def test_faults_in_a_rewind(kinds: tuple[str, ...], least: int) -> None:
    whole(initial(faults(*kinds)), least)


@pytest.mark.parametrize("kinds", [("hosts",), ("cuts",), ("hosts", "hosts"), ("cuts", "hosts")])
def test_a_rewind_ends_a_move_that_waits_where_its_capsule_may_run(kinds: tuple[str, ...]) -> None:
    """Its host or another one of the job is lost, before or after it lets the capsule run."""
    explored = whole if len(kinds) == 1 else nearest
    explored(waiting(faults(*kinds)), 2_500)


MOVE = {
    ("agents", "hosts"): 2_000,
    ("cuts",): 1_000,
    ("cuts", "hosts"): 2_000,
    ("doubles", "hosts"): 2_000,
    ("hosts",): 500,
    ("hosts", "hosts"): 2_000,
    ("hosts", "orchestrator"): 2_000,
    ("hosts", "silences"): 2_000,
}
"""The same beside a move, from its pre-copy on."""


@pytest.mark.parametrize(("kinds", "least"), MOVE.items(), ids=lambda v: str(v))
def test_a_rewind_ends_a_move_in_each_of_its_steps(kinds: tuple[str, ...], least: int) -> None:
    """A host of the job, or of the move, is lost at any moment."""
    found = explore(RewindModel(Safeguards()), precopying(faults(*kinds)), MOST)
    assert found.violation is None, found
    assert found.states >= least


def test_a_move_that_no_rewind_ends_comes_through_and_is_rewound_in_each_step() -> None:
    """Else the exploration above shows nothing."""
    model, seen, todo = RewindModel(Safeguards()), set(), [precopying(faults("hosts"))]
    ended: set[tuple[MigrationStep | None, bool, bool, bool]] = set()
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        for label, after in model.changes(state):
            todo.append(after)
            if label.startswith("rewind"):
                frozen = any(copy and copy.promised for host in state.hosts for copy in host.copies)
                coming = at(state, "D").coming[1]
                whole = coming is not None and coming.complete
                ended.add((state.moving, frozen, whole, coming is not None and coming.ready))
    steps = MigrationStep
    assert {step for step, *_ in ended} >= {steps.PRECOPYING, steps.FREEZING, steps.RESTORING}
    assert {(steps.FREEZING, True, True, False), (steps.RESTORING, True, True, True)} <= ended
    assert any(s.owners[1].host == "D" and not s.moving and not s.rewinds for s in seen)


@pytest.mark.parametrize(
    ("part", "value"), [("overtakes", False), ("rule", "without_counts"), ("end_first", False)]
)
def test_without_it_a_rewind_may_not_end_a_move(part: str, value: Any) -> None:
    value = without_counts if value == "without_counts" else value
    start = precopying(faults("hosts"))
    found = explore(RewindModel(Safeguards(**{part: value})), start, FOUND_AT_MOST)
    assert found.violation is not None, found


@pytest.mark.parametrize(("kinds", "least"), SUSPENSION.items(), ids=lambda v: str(v))
def test_faults_in_a_suspension(kinds: tuple[str, ...], least: int) -> None:
    explored = nearest if kinds else whole
    explored(initial(faults(*kinds, suspensions=1)), least)


def test_a_suspended_job_is_resumed() -> None:
    """Without faults there is a way through: it is suspended, no copy is left, and it trains."""
    model, seen, ends = RewindModel(Safeguards()), set(), {"nowhere": 0, "trains": 0}
    todo = [initial(faults(suspensions=1))]
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        todo += [after for _, after in model.changes(state)]
        copies = [copy for host in state.hosts for copy in host.copies if copy]
        ends["nowhere"] += state.suspended and not copies
        ends["trains"] += state.rewinds == 2 and model.progress(state) == [2]
    assert min(ends.values()) > 0, ends


def test_a_host_that_dies_takes_no_job_along() -> None:
    """Without faults beside: wherever the rewind stands at the end, the job trains."""
    model = RewindModel(Safeguards())
    seen, todo, rewound = set(), [initial(faults("hosts"))], 0
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        todo += [after for _, after in model.changes(state)]
        rewound += bool(state.rewinds) and not state.rewinding and model.progress(state) == [1]
    assert not any(state.forgiven for state in seen)
    assert rewound >= 3


# ---- what it rests on ------------------------------------------------------------------------


def without_counts(
    side: Side,
    host: str,
    epoch: int,
    owner: Owner,
    step: MigrationStep | None,
    *,
    copy_rewinds: int,
    job_rewinds: int,
) -> Ruling:
    return rule(side, host, epoch, owner, step)


def ends_what_comes(number: int, newest: int, taking: int) -> Ruling:
    return rule_held(number, newest, 0)


def ends_the_newest(number: int, newest: int, taking: int) -> Ruling:
    return rule_held(number, 0, taking)


def ends_nothing(number: int, newest: int, taking: int) -> Ruling:
    return Ruling.WAIT


TAKEN_AWAY: list[tuple[str, Any, Faults, str]] = [
    ("all_locked_first", False, faults(snapshots=1), ""),
    ("dump_only_if_locked", False, faults("agents", snapshots=1), ""),
    ("keeps_earlier", False, faults("hosts", snapshots=1), ""),
    ("based", False, faults("hosts", snapshots=1), ""),
    ("digest", False, faults("chunks", snapshots=1), ""),
    ("same_rewinds", False, faults("cuts", snapshots=1), ""),
    ("numbers_grow", False, faults("hosts", snapshots=1), ""),
    ("rule_held", ends_what_comes, faults("hosts", snapshots=1), ""),
    ("rule_held", ends_the_newest, faults(), ""),
    ("rule_held", ends_nothing, faults(snapshots=1), ""),
    ("rule", without_counts, faults("hosts"), "source"),
    ("halved", False, faults("cuts", "cuts"), ""),
    ("images_seen", False, faults("hosts", "cuts"), ""),
    ("one_write", False, faults("hosts", "orchestrator"), ""),
    ("recorded", False, faults("hosts", "orchestrator"), ""),
    ("plus", 0, faults("hosts"), ""),
    ("end_first", False, faults("hosts"), ""),
    ("answers_when_removed", False, faults("hosts"), ""),
    ("ends_by_count", False, faults("hosts", "doubles"), ""),
    ("ends_by_itself", False, faults("cuts"), ""),
    ("wire_id", False, faults("hosts"), ""),
    ("counted", False, faults(suspensions=1), ""),
]


@pytest.mark.parametrize(
    ("part", "value", "budget", "left"),
    TAKEN_AWAY,
    ids=[f"{m[0]}{i}" for i, m in enumerate(TAKEN_AWAY)],
)
def test_without_it_the_protocol_fails(part: str, value: Any, budget: Faults, left: str) -> None:
    model = RewindModel(Safeguards(**{part: value}))
    found = explore(model, initial(budget, left), FOUND_AT_MOST)
    assert found.violation is not None, found
    assert found.trace


def test_that_one_host_is_heard_is_not_enough() -> None:
    """The host that was heard may be cut off before it has ended its copy. Then the job would train
    on both sides, unless nothing is restored before one earlier copy has ended for certain. With
    that, a rewind that no host hears is only useless."""
    start = initial(faults("cuts", "cuts"))
    heard = explore(RewindModel(Safeguards(halved=False)), start, FOUND_AT_MOST)
    assert heard.violation == "the job trains twice"
    halved = explore(RewindModel(Safeguards(one_heard=False)), start, MOST)
    assert halved.violation is None, halved
    assert halved.states >= MOST


def test_a_late_order_takes_no_host_back_to_an_earlier_count() -> None:
    """Else its device has the id of that count again, and frames of it come through."""
    twice_rewound = [
        "A is cut off",
        "rewind 1",
        "B ends what is earlier: removing",
        "B has removed 1",
        "B ends what is earlier: done",
        "C ends what is earlier: done",
        "reserve 0 on C: done",
        "restore 0 on C: done",
        "C may run 0",
        "C carries out ruled",
        "reserve 1 on B: done",
        "restore 1 on B: done",
        "B may run 1",
        "B carries out ruled",
        "rewound",
        "B is cut off",
        "rewind 2",
    ]
    for never_lower in (False, True):
        model = RewindModel(Safeguards(never_lower=never_lower))
        state = follow(model, initial(faults("cuts", "cuts")), twice_rewound)
        assert [owner.host for owner in state.owners] == ["C", "C"]
        late = ("C", at(state, "C").life, "end", 1, (("C", 3), ("B", 3)))
        found = explore(model, state._replace(net=frozenset({late})), FOUND_AT_MOST)
        assert (found.violation is None) is never_lower, found


# ---- deeper than can be explored -------------------------------------------------------------


@pytest.mark.parametrize("hosts", [3, 4])
def test_many_faults(hosts: int) -> None:
    model, states = RewindModel(Safeguards()), 0
    for seed in range(60):
        choose = random.Random(seed)
        budget = {kind: choose.randrange(3) for kind in KINDS}
        asked = Faults(**budget, snapshots=3, suspensions=choose.randrange(2))
        start = initial(asked, choose.choice(["", "source"]), hosts)
        found = wander(model, start, choose)
        assert found.violation is None, (seed, budget, str(found))
        states += found.states
    assert states > 1_500


TOO_MANY = {("cuts", "cuts"), ("cuts", "hosts")}
"""More than a million states of a snapshot."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kinds", PAIRS, ids=lambda v: "-".join(v))
def test_every_state_of_a_rewind_with_two_faults(kinds: tuple[str, str]) -> None:
    whole(initial(faults(*kinds)), 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kinds", [kinds for kinds in PAIRS if kinds not in TOO_MANY], ids=lambda v: "-".join(v)
)
def test_every_state_of_a_snapshot_with_two_faults(kinds: tuple[str, str]) -> None:
    whole(initial(faults(*kinds, snapshots=1)), 15)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", ["source", "destination"])
def test_every_state_of_a_snapshot_after_a_move_that_failed(kind: str, left: str) -> None:
    whole(initial(faults(kind, snapshots=1), left), 40)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_state_of_a_suspension_with_one_fault(kind: str) -> None:
    whole(initial(faults(kind, suspensions=1)), 3_000)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kinds", PAIRS, ids=lambda v: "-".join(v))
def test_all_pairs(kinds: tuple[str, str]) -> None:
    for snapshots, suspensions, hosts in ((0, 0, 3), (1, 0, 3), (1, 0, 4), (0, 1, 3), (1, 1, 4)):
        asked = faults(*kinds, snapshots=snapshots, suspensions=suspensions)
        start = initial(asked, hosts=hosts)
        found = explore(RewindModel(Safeguards()), start, 60_000)
        assert found.violation is None, found
        assert found.states > 0
