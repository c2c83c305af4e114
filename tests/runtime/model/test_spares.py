# SPDX-License-Identifier: Apache-2.0
"""Where capsules go: what must hold for any cluster, and the reasons given when nothing will do."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liveshift.errors import NoSpare, NotFound, Refused
from liveshift.runtime.messages import GpuSeat
from liveshift.runtime.model.spares import GpuNeed, HostView, choose_destination, place_job

KINDS = ["floating", "dedicated", "none"]


@st.composite
def clusters(draw: st.DrawFn) -> list[HostView]:
    count = draw(st.integers(1, 6))
    return [
        HostView(
            f"h{n}",
            draw(st.sampled_from(KINDS)),
            draw(st.integers(1, 4)),
            draw(st.integers(0, 5)),  # more than its slots: it was lowered while they ran
            draw(st.booleans()),
            draw(st.booleans()),
        )
        for n in range(count)
    ]


def can_receive(host: HostView, source: str) -> bool:
    return (
        host.name != source
        and host.up
        and not host.tainted
        and host.spare != "none"
        and host.used < host.slots
    )


@settings(max_examples=300, deadline=None, database=None)
@given(clusters())
def test_a_destination_can_receive_and_is_the_best_that_can(hosts: list[HostView]) -> None:
    able = [h for h in hosts if can_receive(h, "h0")]
    if not able:
        with pytest.raises(Refused, match="no spare can take gpt/1: ") as caught:
            choose_destination(hosts, "gpt/1", "h0", "")
        assert all(f"{h.name} " in caught.value.message for h in hosts)  # each with its reason
        return
    chosen, why = choose_destination(hosts, "gpt/1", "h0", "")
    assert chosen in able
    if any(h.spare == "dedicated" for h in able):
        assert chosen.spare == "dedicated"
        assert why == "a dedicated spare"
    else:
        assert why == "the emptiest free host"
    alike = [h for h in able if h.spare == chosen.spare]
    assert all(chosen.used / chosen.slots <= h.used / h.slots for h in alike)
    assert choose_destination(reversed(hosts), "gpt/1", "h0", "") == (chosen, why)


@settings(max_examples=200, deadline=None, database=None)
@given(clusters(), st.integers(0, 7))
def test_a_named_destination_is_taken_or_refused_with_its_reason(
    hosts: list[HostView], to: int
) -> None:
    named = next((h for h in hosts if h.name == f"h{to}"), None)
    if named is None:
        with pytest.raises(NotFound, match=f'no host "h{to}"') as caught:
            choose_destination(hosts, "gpt/1", "h0", f"h{to}")
        assert all(h.name in str(caught.value.hint) for h in hosts)
    elif can_receive(named, "h0"):
        assert choose_destination(hosts, "gpt/1", "h0", f"h{to}") == (named, "as asked")
    else:
        with pytest.raises(Refused, match=f"gpt/1 cannot move to h{to}: h{to} (is|has|receives) "):
            choose_destination(hosts, "gpt/1", "h0", f"h{to}")


@settings(max_examples=300, deadline=None, database=None)
@given(clusters(), st.integers(1, 12))
def test_a_job_is_placed_within_the_free_slots_and_spread(
    hosts: list[HostView], count: int
) -> None:
    able = [h for h in hosts if h.up and not h.tainted and h.spare != "dedicated" and h.free > 0]
    free = sum(h.free for h in able)
    if free < count:
        with pytest.raises(Refused, match=f"asks for {count} hosts, but only {free} slots"):
            place_job(hosts, count)
        return
    chosen = place_job(hosts, count)
    assert len(chosen) == count
    taken = {h.name: chosen.count(h.name) for h in hosts}
    for host in hosts:
        assert taken[host.name] <= (host.free if host in able else 0)
    for one in able:  # nobody gets a second capsule while another could have a first
        for other in able:
            assert taken[one.name] <= taken[other.name] + 1 or taken[other.name] == other.free


def test_no_job_begins_on_a_cordoned_host() -> None:
    closed = HostView("h1", "floating", 4, 0, True, False, (), True)
    assert place_job([closed, HostView("h2", "floating", 2, 0, True, False)], 2) == ["h2", "h2"]
    with pytest.raises(Refused, match="only 0 slots are free"):
        place_job([closed], 1)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (HostView("h1", "floating", 1, 0, False, False), "h1 is not up"),
        (HostView("h1", "floating", 1, 0, True, True), "h1 is tainted"),
        (HostView("h1", "floating", 1, 0, True, False, (), True), "h1 is cordoned"),
        (HostView("h1", "none", 1, 0, True, False), r"h1 receives nothing \(spare = none\)"),
        (HostView("h1", "floating", 2, 2, True, False), "h1 has no free slot"),
        (HostView("h0", "floating", 2, 1, True, False), "h0 is where it runs already"),
    ],
)
def test_the_reason_why_not(host: HostView, why: str) -> None:
    with pytest.raises(Refused, match=why):
        choose_destination([host], "gpt/1", "h0", host.name)
    with pytest.raises(Refused, match=why) as caught:
        choose_destination([host], "gpt/1", "h0", "")
    assert "add a host" in str(caught.value.hint)


def test_of_many_hosts_each_reason_is_said_once_the_most_frequent_first() -> None:
    """Each host with its reason would be 26 KB of text, again and again in the history."""
    full = [HostView(f"h{n}", "floating", 1, 1, True, False) for n in range(600)]
    down = [replace(host, name=f"g{n}", up=False) for n, host in enumerate(full[:399])]
    hosts = [*full, *down, replace(full[0], name="c0", cordoned=True)]
    with pytest.raises(NoSpare) as caught:
        choose_destination(hosts, "gpt/1", "h0", "")
    assert str(caught.value) == (
        "no spare can take gpt/1: h1 has no free slot (598 more as well);"
        " g0 is not up (398 more as well); h0 is where it runs already; c0 is cordoned"
    )
    assert caught.value.hint == "add a host, uncordon one, or raise its slots in the cluster file"
    kinds = caught.value.kinds
    with pytest.raises(NoSpare) as caught:
        choose_destination([*hosts, replace(down[0], name="g999")], "gpt/1", "h0", "")
    assert caught.value.kinds == kinds, "one more host went down: that is no news"


# ---- GPUs ----------------------------------------------------------------------------------------

H200, A100 = "NVIDIA H200", "NVIDIA A100"


def seats(host: str, *names: str, free: str = "") -> tuple[GpuSeat, ...]:
    """``free``: numbers of those that nobody uses; by default all of them."""
    every = "".join(map(str, range(len(names))))
    return tuple(
        GpuSeat(f"GPU-{host}{n}", name, str(n) in (free or every)) for n, name in enumerate(names)
    )


def with_gpus(name: str, gpus: tuple[GpuSeat, ...], spare: str = "floating") -> HostView:
    return HostView(name, spare, 1, 0, True, False, gpus)


SOURCE = seats("a", H200, H200, A100)
TWO = GpuNeed(frozenset({"GPU-a0", "GPU-a1"}), SOURCE)


def test_hosts_without_enough_gpus_are_passed_over() -> None:
    hosts = [
        with_gpus("h1", (), "dedicated"),
        with_gpus("h2", seats("b", H200, H200, A100, free="0"), "dedicated"),
        with_gpus("h3", seats("c", H200, H200), "dedicated"),
        with_gpus("h4", seats("d", A100, H200, H200, H200, free="12")),
    ]
    assert choose_destination(hosts, "gpt/1", "h0", "", gpus=TWO)[0].name == "h4"
    assert choose_destination(hosts, "gpt/1", "h0", "")[0].name == "h1"  # it uses none
    with pytest.raises(Refused) as caught:
        choose_destination(hosts[:3], "gpt/1", "h0", "", gpus=TWO)
    assert (
        "h1 has no GPU that can be used; h2 has 1 free of 2 NVIDIA H200, 2 needed; h3 has 2 GPUs"
        " and the source 3, each of which needs another that stands for it"
    ) in str(caught.value)
    assert "free GPUs of the model" in str(caught.value.hint)
    assert choose_destination(hosts, "gpt/1", "h0", "h2", gpus=TWO)[1] == "as asked"


def test_gpus_that_both_hosts_see_are_its_own() -> None:
    """Not free, since it uses them itself."""
    both = with_gpus("h1", tuple(msgspec.structs.replace(s, free=False) for s in SOURCE))
    assert choose_destination([both], "gpt/1", "h0", "", gpus=TWO)[0] is both
