# SPDX-License-Identifier: Apache-2.0
"""Where a rewind puts the capsules of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_hosts import NEED, OWNERS, generation, host, seat

from liveshift.runtime.model import rewind_places
from liveshift.runtime.model.rewind_places import Place, Room, rewind_plan
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.model.spares import GpuNeed, HostView


def plan(
    hosts: list[HostView], lost: list[str], a: str = "h2", b: str = "h2"
) -> dict[str, Place] | str:
    return rewind_plan(hosts, generation(a=a, b=b), OWNERS, lost)


LOST, LEFT = host("h0", used=1, up=False), host("h1", used=1)


def test_survivors_stay_and_a_lost_capsule_goes_to_its_holder() -> None:
    hosts = [LOST, LEFT, host("h2", used=1), host("h3", spare="dedicated")]
    assert plan(hosts, ["gpt/0"]) == {"gpt/0": Place("h2", "h2"), "gpt/1": Place("h1", "h2")}
    apart = {"gpt/0": Place("h3", "h3"), "gpt/1": Place("h1", "h2")}
    assert plan(hosts, ["gpt/0"], a="h3") == apart


@pytest.mark.parametrize("full", [host("h2", used=2), host("h2", tainted=True)])
def test_where_the_holder_cannot_take_it_a_spare_does(full: HostView) -> None:
    hosts = [LOST, LEFT, full, host("h3", used=1, slots=4), host("h4", used=1)]
    assert plan(hosts, ["gpt/0"]) == {"gpt/0": Place("h3", "h2"), "gpt/1": Place("h1", "h2")}


def test_no_capsule_goes_to_a_host_that_is_to_be_avoided() -> None:
    """Not back to its own host either, which is up: its links are cut."""
    hosts = [host("h0", used=1), LEFT, host("h2"), host("h3")]
    found = rewind_plan(hosts, generation(a="h2", b="h2"), OWNERS, ["gpt/0"], ["h0", "h2"])
    assert found == {"gpt/0": Place("h3", "h2"), "gpt/1": Place("h1", "h2")}
    few = rewind_plan(hosts[:3], generation(a="h2", b="h2"), OWNERS, ["gpt/0"], ["h0", "h2"])
    assert few == {"gpt/0": Place("h1", "h2"), "gpt/1": Place("h1", "h2")}


def test_a_survivor_stays_on_a_tainted_host() -> None:
    hosts = [LOST, host("h1", used=2, tainted=True), host("h2")]
    assert plan(hosts, ["gpt/0"]) == {"gpt/0": Place("h2", "h2"), "gpt/1": Place("h1", "h2")}


def test_a_host_that_came_back_without_its_capsule_is_one_of_many() -> None:
    hosts = [host("h0", used=1), LEFT, host("h2", used=2)]
    assert plan(hosts, ["gpt/0"]) == {"gpt/0": Place("h0", "h2"), "gpt/1": Place("h1", "h2")}


def test_a_host_that_came_back_without_its_capsule_can_take_it_back() -> None:
    full = [host("h0", used=1, slots=1), host("h1", used=2), host("h2", used=2)]
    assert plan(full, ["gpt/0"]) == {"gpt/0": Place("h0", "h2"), "gpt/1": Place("h1", "h2")}
    down = [host("h0", used=1, slots=1, up=False), host("h1", used=2), host("h2", used=2)]
    assert plan(down, ["gpt/0"]) == "no host has room for gpt/0, which was on h0"
    over = [host("h0", used=2, slots=1), host("h1", used=2), host("h2", used=2)]
    assert plan(over, ["gpt/0"]) == "no host has room for gpt/0, which was on h0"


def test_a_slot_that_a_lost_capsule_leaves_is_given_once() -> None:
    full = [host(name, used=1, slots=1) for name in ("h0", "h1")] + [host("h2", used=2)]
    both = plan(full, ["gpt/0", "gpt/1"])
    assert not isinstance(both, str)
    assert sorted(place.host for place in both.values()) == ["h0", "h1"]


def test_each_slot_is_given_once() -> None:
    gone = [host("h0", up=False), host("h1", up=False), host("h2", used=1), host("h3", used=1)]
    both = ["gpt/0", "gpt/1"]
    assert plan(gone, both) == {"gpt/0": Place("h2", "h2"), "gpt/1": Place("h3", "h2")}
    assert plan(gone[:3], both) == "no host has room for gpt/1, which was on h1"


def test_a_capsule_whose_host_is_down_is_lost_even_if_nobody_said_so() -> None:
    assert plan([LOST, LEFT, host("h2")], []) == {
        "gpt/0": Place("h2", "h2"),
        "gpt/1": Place("h1", "h2"),
    }


def test_without_an_image_nothing_is_planned() -> None:
    hosts = [LOST, LEFT, host("h2"), host("h3", up=False)]
    assert plan(hosts, ["gpt/0"], b="h3") == (
        "no host that holds gpt/1 is up: the image of s17 is on h3"
    )
    nowhere = Generation(17, "gpt", "", 5.0, 0, {}, {})
    assert rewind_plan(hosts, nowhere, OWNERS, ["gpt/0"]) == (
        "no host that holds gpt/0 is up: the image of s17 is on no host"
    )


def test_where_any_host_can_have_the_images_the_job_is_spread() -> None:
    hosts = [host("h2", slots=4), host("h3", slots=4)]
    anywhere = Generation(17, "gpt", "", 5.0, 0, {}, {c: ["h2", "h3"] for c in OWNERS})
    found = rewind_plan(hosts, anywhere, OWNERS, list(OWNERS))
    assert found == {"gpt/0": Place("h2", "h2"), "gpt/1": Place("h3", "h3")}


def test_capsules_with_files_on_carried_paths_go_to_different_hosts() -> None:
    hosts = [host("h0", used=1, slots=4), host("h1", up=False), host("h2", slots=4)]
    for carried, where in (
        ([], "h0"),
        (["gpt/1"], "h0"),
        (["gpt/0"], "h0"),
        (["gpt/0", "gpt/1"], "h2"),
    ):
        held = replace(generation(a="h0", b="h0"), carried=carried)
        found = rewind_plan(hosts, held, OWNERS, ["gpt/1"])
        assert found == {"gpt/0": Place("h0", "h0"), "gpt/1": Place(where, "h0")}
    both = replace(generation(a="h0", b="h0"), carried=["gpt/0", "gpt/1"])
    assert rewind_plan(hosts[:2], both, OWNERS, ["gpt/1"]) == (
        "no host has room for gpt/1, which was on h1; h0 gets gpt/0, which has files on carried"
        " paths, too"
    )
    neither = rewind_plan(hosts, both, OWNERS, list(OWNERS))
    assert not isinstance(neither, str)
    assert sorted(place.host for place in neither.values()) == ["h0", "h2"]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[HostView], Generation, dict[str, str]]:
    """Hosts with and without room and GPUs, and a job of some of them."""
    seats = st.tuples(st.sampled_from(["H100", "A100"]), st.booleans())
    hosts = [
        host(
            f"h{n}",
            used=draw(st.integers(0, 2)),
            spare=draw(st.sampled_from(["floating", "dedicated", "none"])),
            up=draw(st.integers(0, 4)) > 0,
            tainted=draw(st.integers(0, 4)) == 0,
            gpus=tuple(
                seat(f"{n}-{k}", model=model, free=free)
                for k, (model, free) in enumerate(draw(st.lists(seats, max_size=2)))
            ),
        )
        for n in range(draw(st.integers(2, 12)))
    ]
    names = st.sampled_from([each.name for each in hosts])
    owners = {f"gpt/{n}": draw(names) for n in range(draw(st.integers(1, 3)))}
    seen = draw(st.sampled_from(["x", "0-0", "1-0"]))  # a GPU that no host has, or one has
    two = (seat(seen, free=False), seat("y", model="A100", free=False))
    one = GpuNeed(frozenset({seen}), two[: draw(st.integers(1, 2))])
    gpus = {capsule: one for capsule in owners if draw(st.booleans())}
    made = Generation(
        *(17, "gpt", "", 5.0, 0, {c: (h, 1) for c, h in owners.items()}),
        {c: draw(st.lists(names, min_size=1, max_size=2)) for c in owners},
        gpus=gpus,
        carried=[c for c in owners if draw(st.booleans())],
    )
    return hosts, made, owners


@settings(max_examples=500, deadline=None, database=None)
@given(clusters(), st.integers(0, 7))
def test_the_near_hosts_make_the_plan_that_all_hosts_make(
    drawn: tuple[list[HostView], Generation, dict[str, str]], which: int
) -> None:
    hosts, made, owners = drawn
    near = Room(hosts).near(made, owners)
    lost = [capsule for n, capsule in enumerate(owners) if which >> n & 1]
    for gone in ("", *owners.values()):
        few = rewind_plan([h for h in near if h.name != gone], made, owners, lost)
        full = rewind_plan([h for h in hosts if h.name != gone], made, owners, lost)
        if isinstance(full, str):
            assert isinstance(few, str)
        else:
            assert few == full


def test_what_gpus_hosts_lack_is_found_out_once_for_all_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[GpuNeed] = []

    def lacks(_seats: object, need: GpuNeed) -> str:
        asked.append(need)
        return "has none"

    monkeypatch.setattr(rewind_places, "lacks", lacks)
    room = Room([host(f"h{n}") for n in range(100)])
    for number in range(50):
        used, rest = (seat(f"{number}-{k}", free=False) for k in range(2))
        gpus = {"gpt/0": GpuNeed(frozenset({used.uuid}), (used, rest))}
        assert len(room.near(replace(generation(a="h7", b="h8"), gpus=gpus), OWNERS)) <= 14
    assert len(asked) == 200, "once for the need of all these jobs, and once without GPUs"


def test_few_hosts_of_many_are_near() -> None:
    many = [host(f"h{n}") for n in range(1000)]
    assert len(Room(many).near(generation(a="h7", b="h8"), OWNERS)) <= 14


# ---- GPUs --------------------------------------------------------------------------------------


def with_gpus(hosts: list[HostView], lost: list[str], **needs: GpuNeed) -> dict[str, str] | str:
    """Where each capsule goes, from images on h2."""
    gpus = {name.replace("_", "/"): need for name, need in needs.items()}
    found = rewind_plan(hosts, replace(generation(a="h2", b="h2"), gpus=gpus), OWNERS, lost)
    if isinstance(found, str):
        return found
    assert {place.holder for place in found.values()} == {"h2"}
    return {name: place.host for name, place in found.items()}


def test_a_capsule_with_a_gpu_goes_where_one_of_its_model_is_free() -> None:
    gone, holder = host("h1", used=1, up=False), host("h2", gpus=(seat("c0", free=False),))
    other, fits = host("h3", gpus=(seat("d0", model="L4"),)), host("h4", gpus=(seat("e0"),))
    hosts = [host("h0", used=1), gone, holder, other, fits]
    assert with_gpus(hosts, ["gpt/1"], gpt_1=NEED) == {"gpt/0": "h0", "gpt/1": "h4"}
    assert with_gpus(hosts, ["gpt/1"]) == {"gpt/0": "h0", "gpt/1": "h2"}, "without a GPU"
    assert with_gpus(hosts[:4], ["gpt/1"], gpt_1=NEED) == (
        "no host has room for gpt/1, which was on h1; h0 has no GPU that can be used;"
        " h2 has 0 free of 1 H100, 1 needed; h3 has 0 free of 0 H100, 1 needed"
    )


def test_each_gpu_is_given_once() -> None:
    gone = [host("h0", up=False), host("h1", up=False)]
    mine = GpuNeed(frozenset({"a0"}), (seat("a0", free=False),))
    one = host("h2", slots=4, gpus=(seat("c0"), seat("c1", free=False)))
    both = ["gpt/0", "gpt/1"]
    assert with_gpus([*gone, one], both, gpt_0=mine, gpt_1=NEED) == (
        "no host has room for gpt/1, which was on h1; h2 has 0 free of 2 H100, 1 needed"
    )
    two = host("h2", slots=4, gpus=(seat("c0"), seat("c1")))
    found = with_gpus([*gone, two], both, gpt_0=mine, gpt_1=NEED)
    assert found == {"gpt/0": "h2", "gpt/1": "h2"}


def test_a_capsule_may_go_back_to_the_gpu_that_it_had() -> None:
    """Whoever uses it now: its host came back without the capsule."""
    back = host("h1", used=1, slots=1, gpus=(seat("b0", free=False),))
    hosts = [host("h0", used=1), back, host("h2")]
    assert with_gpus(hosts, ["gpt/1"], gpt_1=NEED) == {"gpt/0": "h0", "gpt/1": "h1"}
