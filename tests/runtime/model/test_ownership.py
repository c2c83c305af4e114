# SPDX-License-Identifier: Apache-2.0
"""Who may run a capsule (ownership.py): the rules as a table, and what holds for all of it."""

from __future__ import annotations

import itertools

import pytest

from liveshift.runtime.model.ownership import (
    Owner,
    Ruling,
    Side,
    is_stray,
    last_whole,
    may_pass,
    may_restore,
    rule,
    rule_held,
)
from liveshift.runtime.model.steps import ALLOWED, ENDS, MigrationStep

WAIT, RUN, END = Ruling.WAIT, Ruling.RUN, Ruling.END
BEFORE = (
    MigrationStep.PREPARING,
    MigrationStep.PRECOPYING,
    MigrationStep.QUIESCING,
    MigrationStep.FREEZING,
)
STEPS = (*MigrationStep, None)

LEAVING = {  # step: (mine, not mine)
    MigrationStep.PREPARING: (WAIT, END),
    MigrationStep.PRECOPYING: (WAIT, END),
    MigrationStep.QUIESCING: (WAIT, END),
    MigrationStep.FREEZING: (WAIT, END),
    MigrationStep.COMMITTED: (RUN, WAIT),
    MigrationStep.RESTORING: (RUN, WAIT),
    MigrationStep.RESUMING: (END, END),
    MigrationStep.FINISHING: (END, END),
    MigrationStep.DONE: (END, END),
    MigrationStep.ROLLING_BACK: (RUN, END),
    MigrationStep.RETURNING: (RUN, WAIT),
    MigrationStep.FAILED: (RUN, END),
    MigrationStep.JOB_ENDED: (RUN, END),
    MigrationStep.LOST: (END, END),
    MigrationStep.REWOUND: (RUN, END),
    None: (RUN, END),
}

COMING = {  # step: (mine by that epoch, mine by another, the next epoch's, none of these)
    MigrationStep.PREPARING: (RUN, WAIT, WAIT, END),
    MigrationStep.PRECOPYING: (RUN, WAIT, WAIT, END),
    MigrationStep.QUIESCING: (RUN, WAIT, WAIT, END),
    MigrationStep.FREEZING: (RUN, WAIT, WAIT, END),
    MigrationStep.COMMITTED: (RUN, WAIT, END, END),
    MigrationStep.RESTORING: (RUN, WAIT, WAIT, END),
    MigrationStep.RESUMING: (RUN, WAIT, END, END),
    MigrationStep.FINISHING: (RUN, WAIT, END, END),
    MigrationStep.DONE: (RUN, END, END, END),
    MigrationStep.ROLLING_BACK: (RUN, WAIT, WAIT, WAIT),
    MigrationStep.RETURNING: (RUN, WAIT, WAIT, WAIT),
    MigrationStep.FAILED: (RUN, END, END, END),
    MigrationStep.JOB_ENDED: (RUN, END, END, END),
    MigrationStep.LOST: (RUN, END, END, END),
    MigrationStep.REWOUND: (RUN, END, END, END),
    None: (RUN, END, END, END),
}


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_the_source_s_copy(step: MigrationStep | None, granted: bool) -> None:
    mine, other = Owner("a", 7, granted), Owner("b", 7, granted)
    for epoch in (5, 6, 7):  # it was frozen under
        assert rule(Side.LEAVING, "a", epoch, mine, step) is LEAVING[step][0]
        assert rule(Side.LEAVING, "a", epoch, other, step) is LEAVING[step][1]


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_the_destination_s_copy(step: MigrationStep | None, granted: bool) -> None:
    mine, other = Owner("b", 7, granted), Owner("a", 7, granted)
    this, another, following, none = COMING[step]
    assert rule(Side.COMING, "b", 7, mine, step) is this
    assert {rule(Side.COMING, "b", e, mine, step) for e in (5, 6, 8)} == {another}
    assert rule(Side.COMING, "b", 8, other, step) is following
    assert {rule(Side.COMING, "b", e, other, step) for e in (6, 7, 9)} == {none}


def test_only_the_owner_is_ever_told_to_run() -> None:
    told = [
        (host, owner, epoch)
        for side, host, epoch, step in itertools.product(Side, "ab", (1, 2, 3), STEPS)
        for owner in (Owner("a", 2, False), Owner("b", 2, True))
        if rule(side, host, epoch, owner, step) is RUN
    ]
    assert told
    assert all(host == owner.host for host, owner, _ in told)


@pytest.mark.parametrize(
    ("step", "owner"),
    [
        *[(step, "a") for step in BEFORE],
        *[
            (step, "b")
            for step in (MigrationStep.COMMITTED, MigrationStep.RESTORING, MigrationStep.RETURNING)
        ],
        (MigrationStep.RETURNING, "a"),
        (MigrationStep.ROLLING_BACK, "a"),
    ],
)
def test_until_it_is_decided_one_copy_is_kept_and_at_most_one_runs(
    step: MigrationStep, owner: str
) -> None:
    now = Owner(owner, 2 if owner == "b" else 1, False)
    ready = {rule(Side.LEAVING, "a", 1, now, step), rule(Side.COMING, "b", 2, now, step)}
    assert len(ready - {RUN}) > 0
    assert END not in ready


def test_a_copy_always_hears_in_the_end() -> None:
    """After a migration nobody waits any more."""
    for side, host, step in itertools.product(Side, "ab", (*ENDS, None)):
        for owner, epoch in itertools.product((Owner("a", 2, True), Owner("b", 2, True)), (1, 2)):
            assert rule(side, host, epoch, owner, step) is not WAIT


def test_ownership_passes_from_who_was_not_told_to_run_or_stands_still() -> None:
    assert may_pass(Owner("a", 1, False), still=False)
    assert may_pass(Owner("a", 1, False), still=True)
    assert may_pass(Owner("a", 1, True), still=True)
    assert not may_pass(Owner("a", 1, True), still=False)


@pytest.mark.parametrize(
    ("host", "epoch", "moving", "stray"),
    [
        ("a", 2, False, True),  # of the past, and nothing decides about it
        ("a", 2, True, False),  # a migration does
        ("a", 3, False, False),
        ("a", 4, False, False),  # the journal may be the one that is behind
        ("b", 2, False, False),
        ("b", 3, False, False),
    ],
)
def test_strays(host: str, epoch: int, moving: bool, stray: bool) -> None:
    assert is_stray(host, epoch, Owner("b", 3, True), moving) is stray


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("step", STEPS)
def test_a_copy_of_before_a_rewind_ends(side: Side, step: MigrationStep | None) -> None:
    for host, epoch, granted in itertools.product("ab", (1, 2, 3), (False, True)):
        owner = Owner("a", 2, granted)
        now = rule(side, host, epoch, owner, step)
        for copy_rewinds in (0, 1, 2, 3):
            ruling = rule(side, host, epoch, owner, step, copy_rewinds=copy_rewinds, job_rewinds=2)
            assert ruling is (END if copy_rewinds < 2 else now)


@pytest.mark.parametrize(
    ("host", "epoch", "moving", "copy_rewinds", "stray"),
    [
        ("b", 1, False, 1, True),  # a survivor's host owns the capsule again, but not this copy
        ("b", 3, False, 1, True),
        ("a", 2, True, 1, True),  # no migration outlives a rewind
        ("b", 3, False, 2, False),
        ("a", 2, True, 2, False),
        ("a", 2, False, 2, True),
        ("b", 3, False, 3, False),  # the journal may be the one that is behind
    ],
)
def test_strays_of_before_a_rewind(
    host: str, epoch: int, moving: bool, copy_rewinds: int, stray: bool
) -> None:
    owner = Owner("b", 3, True)
    found = is_stray(host, epoch, owner, moving, copy_rewinds=copy_rewinds, job_rewinds=2)
    assert found is stray


@pytest.mark.parametrize(
    ("number", "newest", "taking", "ruling"),
    [
        (3, 3, 0, WAIT),
        (4, 3, 4, WAIT),  # it comes
        (3, 3, 4, WAIT),  # the one before is kept until then
        (3, 4, 0, END),
        (4, 3, 0, END),  # it was given up
        (1, 0, 0, END),
        (1, 0, 1, WAIT),
    ],
)
def test_images_of_snapshots(number: int, newest: int, taking: int, ruling: Ruling) -> None:
    assert rule_held(number, newest, taking) is ruling


def test_a_rewind_waits_for_one_host_of_the_job_as_it_last_ran() -> None:
    ran = [Owner("a", 1, True), Owner("b", 1, True), Owner("b", 2, True)]
    assert last_whole(ran, ()) == {"a", "b"}
    assert last_whole(ran, {"z"}) == {"a", "b"}
    begun = [Owner("c", 3, True), Owner("b", 3, False)]
    assert last_whole(begun, {"a", "b"}) == {"a", "b"}, "the rewind before never ran as a whole"
    assert last_whole(begun, ()) == set(), "and of what ran before it one copy has ended"
    assert not may_restore({"a", "b"}, ())
    assert not may_restore({"a", "b"}, {"c"})
    assert may_restore({"a", "b"}, {"c", "b"})
    assert may_restore((), ())


def test_every_step_leads_to_an_end() -> None:
    assert {
        MigrationStep.DONE,
        MigrationStep.FAILED,
        MigrationStep.JOB_ENDED,
        MigrationStep.LOST,
        MigrationStep.REWOUND,
    } == ENDS
    reached = set(ENDS)
    for _ in MigrationStep:
        reached |= {step for step, after in ALLOWED.items() if after & reached}
    assert reached == set(MigrationStep)
