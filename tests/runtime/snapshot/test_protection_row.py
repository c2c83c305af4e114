# SPDX-License-Identifier: Apache-2.0
"""What people see of a job's snapshots, and what a failure would cost them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import msgspec
import pytest
from snapshot_stage import CLUSTER, a_job

from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import SNAPSHOTS_OFF, ProtectionRow
from liveshift.runtime.model.failures import NOTHING_SEEN, FailuresSeen
from liveshift.runtime.model.interval import expected_cost
from liveshift.runtime.model.jobs import Job, LastRewind
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.model.spares import HostView
from liveshift.runtime.snapshot import protection_row

MADE = 1000.0
SMALL = """
[cluster]
name = "small"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"
[hosts.h0]
address = "10.88.0.10"
"""


def a_host(name: str, used: int, *, up: bool = True) -> HostView:
    return HostView(name, "floating", 1, used, up, tainted=False)


HOSTS = [a_host("h0", 1), a_host("h1", 1), a_host("h2", 1), a_host("h3", 0)]


def protected() -> Job:
    """Its capsules run on h0 to h2, and h3 has their images, of 100 MB each."""
    job = a_job()
    owners = {c.name: (c.host, c.epoch) for c in job.capsules.values()}
    holders = {name: ["h3"] for name in owners}
    job.newest = Generation(17, "gpt", "", MADE, 0, owners, holders, 300_000_000)
    job.pause_s = 0.3
    return job


def row(job: Job, hosts: list[HostView]) -> ProtectionRow:
    found = protection_row.row(job, CLUSTER, protection_row.Seen(hosts), MADE + 12.0)
    assert found is not None
    return found


def test_a_failure_costs_what_is_trained_again_and_the_rewind() -> None:
    job = protected()
    seen = row(job, HOSTS)
    assert (seen.newest, seen.age, seen.bytes) == ("s17", 12.0, 300_000_000)
    assert (seen.holders, seen.why_not, seen.pause_s) == (["h3"], "", 0.3)
    # suspicion 0.3 s, 1 s, and 100 MB at 250 MB/s
    assert seen.rewind_s == pytest.approx(1.7)
    assert not seen.rewind_measured
    assert seen.failure_s == pytest.approx(13.7)
    job.rewind_s = 5.0
    seen = row(job, HOSTS)
    assert (seen.rewind_s, seen.rewind_measured, seen.failure_s) == (5.0, True, 17.0)


def test_it_says_after_what_time_a_snapshot_is_complete() -> None:
    job = protected()
    assert row(job, HOSTS).takes_s == 0.0, "none was taken since the orchestrator began"
    job.snapshot_cost = expected_cost(0).after(0.3, 5.2)
    assert row(job, HOSTS).takes_s == 5.2
    job.snapshot_cost = job.snapshot_cost.after(0.3, 6.2)
    assert row(job, HOSTS).takes_s == pytest.approx(5.5)


def test_it_says_where_the_last_rewind_led_also_without_a_snapshot() -> None:
    job = protected()

    def led() -> tuple[str, float, float, float]:
        seen = row(job, HOSTS)
        return seen.newest, seen.rewound_to, seen.repeated_s, seen.rewound_ago_s

    assert led() == ("s17", 0.0, 0.0, 0.0)
    job.last_rewind = LastRewind(MADE - 60.0, 22.0, MADE - 30.0)
    assert led() == ("s17", MADE - 60.0, 22.0, 42.0)
    job.newest = None
    assert led() == ("", MADE - 60.0, 22.0, 42.0)
    job.last_rewind = LastRewind(MADE - 60.0, 22.0, MADE + 30.0)
    assert led()[3] == 0.0, "the clock was set back since"


def test_it_says_how_often_a_host_fails_and_from_where_that_is_known() -> None:
    def rate(text: str, seen: FailuresSeen = NOTHING_SEEN) -> tuple[float, float, str]:
        cluster = dataclasses.replace(CLUSTER, snapshots=config.parse(text).cluster.snapshots)
        found = protection_row.row(protected(), cluster, protection_row.Seen(HOSTS), MADE, seen)
        assert found is not None
        return found.every, found.mttf_s, found.mttf_from

    auto = f'{SMALL}[snapshots]\nevery = "auto"\n'
    often = FailuresSeen(99, 1011.2)  # fifty times as often as assumed
    every, mttf, source = rate(auto)
    assert mttf == pytest.approx(1011.2 * 3600 / 3)
    assert source == "assumed"
    shorter, learnt, source = rate(auto, often)
    assert learnt == pytest.approx(mttf / 50)
    assert source == "learnt from 99 losses in 1011 host-hours"
    assert shorter < every
    assert rate(auto + 'mttf = "30h"\n', often)[1:] == (10 * 3600.0, "given")
    assert rate(f"{SMALL}[snapshots]\nevery = 30\n", often) == (30.0, 0.0, "")


def test_it_names_what_goes_back_in_place_and_who_would_wait() -> None:
    seen = row(protected(), HOSTS)
    assert seen.in_place == ["gpt/0", "gpt/1", "gpt/2"]
    assert seen.would_wait == ""
    seen = row(protected(), [*HOSTS[:3], a_host("h3", 1)])
    assert seen.in_place == ["gpt/0", "gpt/1", "gpt/2"]
    assert seen.would_wait == (
        "if h0 died, the job would wait: no host has room for gpt/0, which was on h0"
    )


def test_a_job_on_one_host_would_wait_unless_a_command_can_switch_that_host_off() -> None:
    job = protected()
    for capsule in job.capsules.values():
        capsule.host = "h0"
    alone = (
        "if h0 died, the job would wait until h0 is back, or for `liveshift rewind gpt --lost h0`:"
        " h0 may only be cut off, and no other host runs a part of the job that could tell"
        " (`snapshots.fence` can)"
    )
    roomy = [replace(host, slots=4) for host in HOSTS]
    assert row(job, roomy).would_wait == alone
    full = "if h0 died, the job would wait: no host has room for gpt/1, which was on h0"
    assert row(job, HOSTS).would_wait == f"{alone}; {full}"
    *_, last = job.capsules.values()
    last.host, last.code = "h1", 0
    assert protection_row.only_host(job, CLUSTER) == "h0", "gpt/2 has ended"
    settings = dataclasses.replace(CLUSTER.snapshots, fence=("/bin/true",))
    fenced = dataclasses.replace(CLUSTER, snapshots=settings)
    assert protection_row.only_host(job, fenced) == ""
    last.code = None
    assert protection_row.only_host(job, CLUSTER) == "", "h1 can tell"


def test_it_names_what_the_holder_would_send_and_is_faster_where_nothing_is_sent() -> None:
    job = protected()
    assert job.newest is not None
    assert row(job, HOSTS).sent == ["gpt/0", "gpt/1", "gpt/2"]
    job.newest = replace(job.newest, own_copies=["gpt/0", "gpt/2"])
    seen = row(job, HOSTS)
    assert seen.sent == ["gpt/1"]
    assert seen.rewind_s == pytest.approx(1.7)
    job.newest = replace(job.newest, own_copies=["gpt/0", "gpt/1", "gpt/2"])
    seen = row(job, HOSTS)
    assert seen.sent == []
    assert seen.rewind_s == pytest.approx(1.3 + 100 / 600)


def test_the_capsules_of_a_host_that_is_gone_do_not_go_back_there() -> None:
    seen = row(protected(), [a_host("h0", 1, up=False), *HOSTS[1:]])
    assert seen.in_place == ["gpt/1", "gpt/2"]


def test_without_its_holder_nothing_goes_back() -> None:
    seen = row(protected(), [*HOSTS[:3], a_host("h3", 0, up=False)])
    assert seen.why_not == "h3, which keeps s17, is not up"
    assert seen.in_place == []


@pytest.mark.parametrize("state", ["running", "suspended"])
def test_a_holder_that_has_lost_its_memory_keeps_nothing(state: str) -> None:
    job = protected()
    job.state = state
    other = replace(HOSTS[3], lost=frozenset({"s16.0"}))
    assert row(job, [*HOSTS[:3], other]).why_not == ""
    empty = replace(HOSTS[3], lost=frozenset({"s17.1"}))
    assert row(job, [*HOSTS[:3], empty]).why_not == "h3, which kept s17, has lost its memory since"


def test_a_job_without_a_snapshot_says_why() -> None:
    job = a_job()
    job.request = msgspec.structs.replace(job.request, snapshot_every=SNAPSHOTS_OFF)
    assert row(job, HOSTS) == ProtectionRow()
    job.request = msgspec.structs.replace(job.request, snapshot_every=150.0)
    assert row(job, HOSTS) == ProtectionRow(150.0, why_not="no snapshot is complete yet")
    job.unprotected = "h3 has no room"
    assert row(job, HOSTS).why_not == "h3 has no room"
    job.state = "ended"
    assert protection_row.row(job, CLUSTER, protection_row.Seen(HOSTS), MADE) is None


def test_why_there_is_no_later_snapshot_is_kept_beside_the_last_one() -> None:
    job = protected()
    job.unprotected = "m3 is under way"
    assert (row(job, HOSTS).trouble, row(job, HOSTS).why_not) == ("m3 is under way", "")


@pytest.mark.parametrize(
    ("every", "text"), [(150.0, "150 s"), (1045.27, "1045 s"), (1.0, "1 s"), (2.5, "2.5 s")]
)
def test_intervals_in_words(every: float, text: str) -> None:
    assert protection_row.seconds(every) == text


# ---- a job that is suspended -----------------------------------------------------------------


def test_a_suspended_job_has_its_image_and_nothing_that_a_failure_would_cost() -> None:
    job = protected()
    job.state = "suspended"
    seen = row(job, HOSTS)
    assert (seen.newest, seen.age, seen.bytes) == ("s17", 12.0, 300_000_000)
    assert (seen.holders, seen.why_not) == (["h3"], "")
    assert (seen.pause_s, seen.rewind_s, seen.failure_s) == (0.0, 0.0, 0.0)
    assert (seen.in_place, seen.would_wait, seen.trouble) == ([], "", "")


def test_a_suspended_job_whose_former_hosts_are_gone_lacks_nothing() -> None:
    job = protected()
    job.state = "suspended"
    gone = [a_host(name, 0, up=False) for name in ("h0", "h1", "h2")]
    assert row(job, [*gone, a_host("h3", 0)]).why_not == ""


def test_a_suspended_job_says_which_of_its_holders_is_not_up() -> None:
    job = protected()
    job.state = "suspended"
    assert job.newest is not None
    job.newest = replace(job.newest, holders={"gpt/0": ["h3"], "gpt/1": ["h2"], "gpt/2": ["h3"]})
    found = row(job, [*HOSTS[:2], a_host("h2", 0, up=False), HOSTS[3]])
    assert found.holders == ["h2", "h3"]
    assert found.why_not == "h2, which keeps s17, is not up"


def test_a_suspended_job_needs_each_image_on_one_host_that_is_up() -> None:
    job = protected()
    job.state = "suspended"
    assert job.newest is not None
    both = {"gpt/0": ["h3", "h1"], "gpt/1": ["h2", "h3"], "gpt/2": ["h3", "h2"]}
    job.newest = replace(job.newest, holders=both)
    assert (row(job, HOSTS).why_not, row(job, HOSTS).alone) == ("", [])
    found = row(job, [*HOSTS[:2], a_host("h2", 0, up=False), HOSTS[3]])
    assert (found.why_not, found.alone) == ("", ["h3"])
    lost = replace(HOSTS[3], lost=frozenset({"s17.1"}))
    found = row(job, [*HOSTS[:3], lost])
    assert (found.why_not, found.alone) == ("", ["h2"])
    found = row(job, [*HOSTS[:2], a_host("h2", 0, up=False), lost])
    assert found.why_not == "h2, which keeps s17, is not up"


def test_a_suspended_job_may_run_beside_its_image_again() -> None:
    """Its capsules are on no host: that a holder was one of theirs is no exposure."""
    job = protected()
    job.state = "suspended"
    assert job.newest is not None
    job.newest = replace(job.newest, holders={name: ["h0"] for name in job.capsules})
    assert row(job, HOSTS).why_not == ""
