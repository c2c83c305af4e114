# SPDX-License-Identifier: Apache-2.0
"""A job that no host outside it can hold: its own hosts hold each other's images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from liveshift.runtime.model.holders import beside, choose_holders, choose_neighbours, die_together
from liveshift.runtime.model.rewind_places import Place, rewind_plan
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.model.spares import HostView

OWNERS = {"gpt/0": "h0", "gpt/1": "h1"}


def host(
    name: str,
    used: int = 1,
    slots: int = 1,
    spare: str = "floating",
    up: bool = True,
    tainted: bool = False,
    memory_left: float = 1.0,
) -> HostView:
    return HostView(name, spare, slots, used, up, tainted, memory_left=memory_left)


BOTH = [host("h0"), host("h1")]


def neighbours(
    hosts: list[HostView],
    owners: Mapping[str, str] = OWNERS,
    domains: Mapping[str, str] | None = None,
    before: Mapping[str, str] | None = None,
    *,
    itself: bool = False,
) -> dict[str, str] | str:
    return choose_neighbours(hosts, owners, domains or {}, before or {}, itself=itself)


def test_two_hosts_hold_each_others_image() -> None:
    assert isinstance(choose_holders(BOTH, OWNERS, {}, {}), str)
    assert neighbours(BOTH) == {"gpt/0": "h1", "gpt/1": "h0"}


def test_the_images_are_spread_over_the_jobs_hosts() -> None:
    owners = {f"gpt/{n}": f"h{n}" for n in range(5)}
    found = neighbours([host(f"h{n}") for n in range(5)], owners)
    assert not isinstance(found, str)
    assert sorted(found.values()) == sorted(owners.values())
    assert all(found[capsule] != owner for capsule, owner in owners.items())


def test_a_free_slot_draws_one_image_and_not_all() -> None:
    owners = {f"gpt/{n}": f"h{n}" for n in range(5)}
    found = neighbours([host(f"h{n}", slots=2 if n == 3 else 1) for n in range(5)], owners)
    assert not isinstance(found, str)
    assert max(Counter(found.values()).values()) <= 2
    assert found["gpt/0"] == "h3"


def test_two_capsules_of_one_host_are_held_by_the_other() -> None:
    owners = {"gpt/0": "h0", "gpt/1": "h0", "gpt/2": "h1"}
    assert neighbours(BOTH, owners) == {"gpt/0": "h1", "gpt/1": "h1", "gpt/2": "h0"}


def test_an_earlier_neighbour_stays() -> None:
    three = [*BOTH, host("h2")]
    owners = {**OWNERS, "gpt/2": "h2"}
    before = {"gpt/0": "h2", "gpt/1": "h2", "gpt/2": "h2"}
    assert neighbours(three, owners, before=before) == {
        "gpt/0": "h2",
        "gpt/1": "h2",
        "gpt/2": "h0",
    }


def test_a_neighbour_shares_no_failure_domain_with_what_it_holds() -> None:
    racks = {"h0": "rack 1", "h1": "rack 1", "h2": "rack 2"}
    found = neighbours([*BOTH, host("h2")], {**OWNERS, "gpt/2": "h2"}, racks)
    assert found == {"gpt/0": "h2", "gpt/1": "h2", "gpt/2": "h0"}
    one = dict.fromkeys(("h0", "h1"), "rack 1")
    assert neighbours(BOTH, domains=one) == (
        "no host can hold the snapshots of gpt/0: h0 runs a capsule of the job; h1 is in one"
        " failure domain with h0, which runs a capsule of the job"
    )


def test_a_host_that_takes_no_work_holds_nothing() -> None:
    for other in (
        host("h1", up=False),
        host("h1", tainted=True),
        host("h1", spare="none"),
        host("h1", memory_left=0.04),
    ):
        assert isinstance(neighbours([host("h0"), other]), str)


def test_what_goes_on_into_a_directory_may_stay_on_its_own_host() -> None:
    alone = {"gpt/0": "h0"}
    assert isinstance(neighbours([host("h0")], alone), str)
    assert neighbours([host("h0")], alone, itself=True) == {"gpt/0": "h0"}
    assert neighbours([host("h0", tainted=True)], alone, itself=True) == {"gpt/0": "h0"}
    assert neighbours(BOTH, itself=True) == {"gpt/0": "h1", "gpt/1": "h0"}, "a neighbour is better"
    assert isinstance(neighbours([host("h0", up=False)], alone, itself=True), str)


def test_hosts_share_a_domain_if_they_are_one_or_the_file_says_so() -> None:
    racks = {"h0": "rack 1", "h1": "rack 1"}
    assert beside("h1", ["h2", "h0"], racks) == "h0"
    assert beside("h2", ["h0", "h2"], racks) == "h2"
    assert beside("h3", ["h0", "h2"], racks) == ""


def test_a_death_takes_a_capsule_with_the_last_copy_of_an_image_or_does_not() -> None:
    racks = {"h0": "rack 1", "h1": "rack 1", "h2": "rack 2"}
    for held, taken in (
        (["h2"], None),
        (["h1"], ("h1", "h1")),
        (["h1", "h0"], None),
        ([], None),
    ):
        assert die_together({"gpt/0": held}, ["h0", "h1"], {}) == taken
    assert die_together({"gpt/0": ["h1", "h0"]}, ["h0", "h2"], racks) == ("h1", "h0")
    assert die_together({"gpt/0": ["h1", "h2"]}, ["h0", "h2"], racks) is None


def generation(holders: dict[str, list[str]], owners: Mapping[str, str] = OWNERS) -> Generation:
    return Generation(17, "gpt", "", 5.0, 0, {c: (h, 1) for c, h in owners.items()}, holders)


HELD = generation({"gpt/0": ["h1", "h0"], "gpt/1": ["h0", "h1"]})


def test_who_stays_goes_back_to_the_copy_of_its_own_host() -> None:
    assert rewind_plan(BOTH, HELD, OWNERS, []) == {
        "gpt/0": Place("h0", "h0"),
        "gpt/1": Place("h1", "h1"),
    }


def test_a_lost_capsule_waits_for_its_host_or_goes_where_there_is_room() -> None:
    away = [host("h0"), host("h1", up=False)]
    assert rewind_plan(away, HELD, OWNERS, ["gpt/1"]) == (
        "no host has room for gpt/1, which was on h1"
    )
    back = {"gpt/0": Place("h0", "h0"), "gpt/1": Place("h1", "h1")}
    assert rewind_plan(BOTH, HELD, OWNERS, ["gpt/1"]) == back
    roomy = [host("h0", slots=2), away[1]]
    assert rewind_plan(roomy, HELD, OWNERS, ["gpt/1"]) == {
        "gpt/0": Place("h0", "h0"),
        "gpt/1": Place("h0", "h0"),
    }


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
    st.data(),
)
def test_with_its_own_copies_no_death_takes_the_last_image(
    where: list[int], racks: list[int], data: st.DataObject
) -> None:
    """Any failure domain dies. Each capsule has an image on a host that lives."""
    owners = {f"gpt/{n}": f"h{at}" for n, at in enumerate(where)}
    domains = {f"h{n}": f"rack {rack}" for n, rack in enumerate(racks)}
    before = {c: data.draw(st.sampled_from(sorted(domains))) for c in owners}
    chosen = neighbours([host(f"h{n}") for n in range(6)], owners, domains, before)
    assume(not isinstance(chosen, str))
    assert not isinstance(chosen, str)
    for dead in set(domains.values()):
        for capsule, owner in owners.items():
            left = [h for h in (chosen[capsule], owner) if domains[h] != dead]
            assert left, f"{capsule} of {owner} is held by {chosen[capsule]}"
