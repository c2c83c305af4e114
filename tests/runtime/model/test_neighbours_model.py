# SPDX-License-Identifier: Apache-2.0
"""Explores snapshots that the hosts of a job hold for each other: of each image a copy is left when
one host dies, whatever else happens once.

Snapshots with other holders, rewinds and suspensions: test_rewind_model.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from exploring import explore, wander
from rewind_budgets import FOUND_AT_MOST, KINDS, PAIRS, faults, whole
from rewind_model import RewindModel
from rewind_state import NAMES, Cluster, Faults, Safeguards, neighbours

NEIGHBOURS = {
    (): 40,
    ("agents",): 250,
    ("chunks",): 150,
    ("copies",): 100,
    ("copies", "chunks"): 350,
    ("doubles",): 400,
    ("failures",): 40,
    ("orchestrator",): 100,
    ("silences",): 450,
}
"""The same while a snapshot is taken that the hosts of the job hold for each other."""

FULL = Cluster("AB", neighbours=True, slots=1)
"""A capsule goes to no host that has the other one."""

ANY = Cluster(NAMES, neighbours=True)
"""A third host holds the images if it is up."""

ROOM = {None: "roomy", FULL: "full", ANY: "any"}


def case_id(hosts: int, cluster: Cluster | None, kinds: tuple[str, ...], snapshots: int) -> str:
    return "-".join((str(hosts), ROOM[cluster], *kinds, *["snapshot"] * snapshots))


@pytest.mark.parametrize(("kinds", "least"), NEIGHBOURS.items(), ids=lambda v: str(v))
def test_faults_in_a_snapshot_that_neighbours_hold(kinds: tuple[str, ...], least: int) -> None:
    assert not whole(neighbours(faults(*kinds, snapshots=1), 2), least).forgave


def test_a_job_is_suspended_by_a_snapshot_that_neighbours_hold() -> None:
    whole(neighbours(faults(suspensions=1), 2), 1_500)


ONE_DIES: list[tuple[int, Cluster | None, tuple[str, ...], int, int]] = [
    (2, None, ("hosts",), 1, 25_000),
    (2, FULL, ("hosts",), 1, 10_000),
    (2, None, ("agents", "hosts"), 0, 4_000),
    (2, None, ("cuts", "hosts"), 0, 20_000),
    (2, None, ("hosts", "orchestrator"), 0, 4_000),
    (2, FULL, ("cuts", "hosts"), 0, 500),
    (2, FULL, ("hosts", "orchestrator"), 0, 1_000),
    (3, None, ("hosts",), 0, 700),
    (3, FULL, ("hosts",), 0, 500),
]
"""How many hosts there are, what they have room for, faults, snapshots, and the least states."""


@pytest.mark.parametrize(
    ("hosts", "cluster", "kinds", "snapshots", "least"),
    ONE_DIES,
    ids=[case_id(*m[:4]) for m in ONE_DIES],
)
def test_a_neighbour_that_dies_takes_no_job_along(
    hosts: int, cluster: Cluster | None, kinds: tuple[str, ...], snapshots: int, least: int
) -> None:
    """At each step of a snapshot or a rewind, with another fault beside: of each capsule there is
    an image left. Where no other host has a free slot, the job waits for the one that died."""
    start = neighbours(faults(*kinds, snapshots=snapshots), hosts, cluster)
    assert not whole(start, least).forgave


@pytest.mark.parametrize("never_weaker", [True, False])
def test_a_snapshot_with_one_copy_takes_no_place_of_one_with_two(never_weaker: bool) -> None:
    """A host has given up the copy of its own capsule, and then the other host dies. If that
    snapshot were complete all the same, the job would be lost."""
    model = RewindModel(Safeguards(never_weaker=never_weaker))
    start = neighbours(faults("copies", "hosts", snapshots=1), 2, FULL)
    found = explore(model, start, FOUND_AT_MOST, rest=False)
    assert found.violation is None, found
    assert bool(model.forgave) is not never_weaker


ONE_COPY = "the job is lost, and at most one host is"
WRONG_PAGES = "a snapshot with wrong pages is complete"
NEVER = "it never comes to rest"


@pytest.mark.parametrize(
    ("part", "kinds", "why"),
    [
        ("own_stays", ("hosts",), ONE_COPY),
        ("names_whole", ("copies",), WRONG_PAGES),
        ("same_base", ("copies",), NEVER),  # no copy is whole any more
        ("digest", ("chunks",), WRONG_PAGES),
    ],
)
def test_without_it_neighbours_do_not_protect(part: str, kinds: tuple[str, ...], why: str) -> None:
    start = neighbours(faults(*kinds, snapshots=1), 2)
    # With never_weaker such a snapshot fails, and the one before it is still there.
    without: dict[str, Any] = {part: False, "never_weaker": part != "same_base"}
    model = RewindModel(Safeguards(**without))
    found = explore(model, start, FOUND_AT_MOST, rest=why is not ONE_COPY)
    assert found.violation == why, found


@pytest.mark.parametrize("cluster", [FULL, ANY], ids=ROOM.get)
def test_many_faults_where_neighbours_hold(cluster: Cluster | None) -> None:
    model, states = RewindModel(Safeguards()), 0
    for seed in range(30):
        choose = random.Random(seed)
        budget = {kind: choose.randrange(3) for kind in (*KINDS, "copies")}
        asked = Faults(**budget, snapshots=3, suspensions=choose.randrange(2))
        start = neighbours(asked, choose.choice([2, 3]), cluster)
        found = wander(model, start, choose)
        assert found.violation is None, (seed, budget, str(found))
        states += found.states
    assert states > 500


BESIDE = ("agents", "cuts", "orchestrator")

ONE_DIES_IN_MORE: list[tuple[int, Cluster | None, tuple[str, ...], int]] = [
    (2, None, ("cuts",), 1),
    (2, FULL, ("cuts",), 1),
    (2, None, ("hosts", "orchestrator"), 1),
    (2, FULL, ("hosts", "orchestrator"), 1),
    *((3, cluster, (kind,), 1) for cluster in (None, FULL, ANY) for kind in ("hosts", "cuts")),
    *((3, cluster, (kind, "hosts"), 0) for cluster in (None, FULL, ANY) for kind in BESIDE),
]
"""As ONE_DIES, but for the least states."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("hosts", "cluster", "kinds", "snapshots"),
    ONE_DIES_IN_MORE,
    ids=[case_id(*m) for m in ONE_DIES_IN_MORE],
)
def test_every_state_in_which_a_neighbour_dies(
    hosts: int, cluster: Cluster | None, kinds: tuple[str, ...], snapshots: int
) -> None:
    start = neighbours(faults(*kinds, snapshots=snapshots), hosts, cluster)
    assert not whole(start, 100).forgave


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kinds", PAIRS, ids=lambda v: "-".join(v))
def test_every_state_of_a_snapshot_that_neighbours_hold_with_two_faults(
    kinds: tuple[str, str],
) -> None:
    """One of the faults may cost a copy, and a host that dies the other one. The snapshot before
    has both."""
    model = whole(neighbours(faults(*kinds, snapshots=1), 2, FULL), 40)
    assert kinds == ("hosts", "hosts") or not model.forgave
