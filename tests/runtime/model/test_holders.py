# SPDX-License-Identifier: Apache-2.0
"""Who holds the images of a job's snapshots."""

from __future__ import annotations

from dataclasses import replace

from planned_hosts import NEED, OWNERS, host, seat

from liveshift.runtime.model.holders import choose_holders, choose_second
from liveshift.runtime.model.spares import HostView


def holders(
    hosts: list[HostView],
    domains: dict[str, str] | None = None,
    before: dict[str, str] | None = None,
) -> dict[str, str] | str:
    mine = [host("h0", used=1), host("h1", used=1)]
    return choose_holders([*mine, *hosts], OWNERS, domains or {}, before or {})


def test_the_images_are_spread_over_hosts_without_a_capsule_of_the_job() -> None:
    assert holders([host("h2"), host("h3")]) == {"gpt/0": "h2", "gpt/1": "h3"}
    assert holders([host("h2")]) == {"gpt/0": "h2", "gpt/1": "h2"}


def test_a_host_that_can_take_the_capsule_over_comes_first() -> None:
    full = host("h2", used=2)
    assert holders([full, host("h3")]) == {"gpt/0": "h3", "gpt/1": "h3"}
    assert holders([full]) == {"gpt/0": "h2", "gpt/1": "h2"}, "an image takes no slot"
    spare = host("h3", spare="dedicated")
    assert holders([host("h2"), spare]) == {"gpt/0": "h3", "gpt/1": "h2"}
    assert holders([host("h2", used=1), host("h3")]) == {"gpt/0": "h3", "gpt/1": "h2"}


def test_an_earlier_holder_stays_as_long_as_it_can() -> None:
    before = {"gpt/0": "h3", "gpt/1": "h3"}
    assert holders([host("h2"), host("h3", used=2)], before=before) == before
    away = [host("h2"), host("h3", tainted=True)]
    assert holders(away, before=before) == {"gpt/0": "h2", "gpt/1": "h2"}
    assert holders([host("h2")], before={"gpt/0": "h1"}) == {"gpt/0": "h2", "gpt/1": "h2"}


def test_a_holder_shares_no_failure_domain_with_the_job() -> None:
    hosts = [host("h2"), host("h3")]
    assert holders(hosts, {"h1": "rack 1", "h2": "rack 1"}) == {"gpt/0": "h3", "gpt/1": "h3"}
    assert holders(hosts, {"h2": "rack 2", "h3": "rack 2"}) == {"gpt/0": "h2", "gpt/1": "h3"}


def test_a_large_cluster_without_a_holder_is_a_line_of_reasons() -> None:
    many = [host(f"g{n}", up=False) for n in range(500)]
    racks = {f"x{n}": f"rack {n % 2}" for n in range(20)} | {"h0": "rack 0", "h1": "rack 1"}
    text = holders([*many, *(host(f"x{n}") for n in range(20))], racks)
    assert text == (
        "no host can hold its snapshots: g0 is not up (499 more as well);"
        " x0 is in one failure domain with h0, which runs a capsule of the job (9 more as well);"
        " x1 is in one failure domain with h1, which runs a capsule of the job (9 more as well);"
        " h0 runs a capsule of the job (1 more as well)"
    )
    each = [replace(host(f"x{n}"), memory_left=n / 1000) for n in range(10)]
    assert str(holders(each)).endswith("; x4 is short of memory (0.4% is left); and 5 more reasons")


def test_a_host_that_is_short_of_memory_holds_nothing() -> None:
    short = replace(host("h2"), memory_left=0.049)
    assert holders([short, host("h3")], before={"gpt/0": "h2"}) == {"gpt/0": "h3", "gpt/1": "h3"}


def test_without_a_holder_each_host_s_reason_is_said() -> None:
    hosts = [
        host("h2", up=False),
        host("h3", tainted=True),
        host("h4", spare="none"),
        host("h5"),
    ]
    assert holders(hosts, {"h0": "rack 1", "h5": "rack 1"}) == (
        "no host can hold its snapshots: h0 runs a capsule of the job"
        " (1 more as well); h2 is not up; h3 is tainted or cordoned;"
        " h4 receives nothing (spare = none);"
        " h5 is in one failure domain with h0, which runs a capsule of the job"
    )


def test_a_host_with_a_gpu_to_spare_holds_the_image() -> None:
    mine = [host("h0", used=1), host("h1", used=1)]
    hosts = [*mine, host("h2"), host("h3", gpus=(seat("d0"),))]
    needs = dict.fromkeys(OWNERS, NEED)
    assert choose_holders(hosts, OWNERS, {}, {}, needs) == {"gpt/0": "h3", "gpt/1": "h3"}
    assert choose_holders(hosts[:3], OWNERS, {}, {}, needs) == {"gpt/0": "h2", "gpt/1": "h2"}


# ---- a second holder -----------------------------------------------------------------------------


def second(
    hosts: list[HostView], domains: dict[str, str] | None = None, load: dict[str, int] | None = None
) -> str:
    """For an image that only h2 has. The job ran on h3."""
    chosen = choose_second(hosts, "h2", ["h3"], domains or {}, load or {"h2": 2})
    return chosen if isinstance(chosen, str) else chosen.name


def test_an_image_that_one_host_has_gets_another_one() -> None:
    hosts = [host("h0"), host("h1"), host("h2")]
    assert second(hosts) == "h0"
    assert second(hosts, load={"h0": 1, "h2": 2}) == "h1", "the images are spread"
    assert second([host("h0", used=2), host("h1")]) == "h1", "it could run the capsule"


def test_a_host_that_ran_the_job_is_the_last_to_get_an_image() -> None:
    full = host("h0", used=2)
    assert second([full, host("h2"), host("h3")]) == "h0"
    assert second([host("h2"), host("h3")]) == "h3"


def test_a_host_that_has_the_gpus_comes_first_for_a_second_image() -> None:
    hosts = [host("h0"), host("h1", gpus=(seat("d0"),)), host("h2")]
    chosen = choose_second(hosts, "h2", [], {}, {"h2": 2}, NEED)
    assert not isinstance(chosen, str)
    assert chosen.name == "h1"


def test_a_second_holder_does_not_die_with_the_first() -> None:
    hosts = [host("h0"), host("h1"), host("h2")]
    assert second(hosts, {"h0": "rack 1", "h2": "rack 1"}) == "h1"


def test_without_a_second_holder_each_host_s_reason_is_said() -> None:
    hosts = [
        host("h0", up=False),
        host("h1", tainted=True),
        host("h2"),
        host("h3"),
        host("h4", spare="none"),
        replace(host("h5"), memory_left=0.01),
    ]
    assert second(hosts, {"h2": "rack 1", "h3": "rack 1"}) == (
        "h0 is not up; h1 is tainted or cordoned;"
        " h2 has it already; h3 is in one failure domain with h2, which has it;"
        " h4 receives nothing (spare = none); h5 is short of memory (1.0% is left)"
    )
