# SPDX-License-Identifier: Apache-2.0
"""Which silent hosts count as lost, and which do not."""

from __future__ import annotations

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.runtime.config.timeouts import Timeouts
from liveshift.runtime.losses.watch import HostContact, lost_hosts, perhaps_dead, suspected
from liveshift.runtime.messages import RunJob
from liveshift.runtime.model.jobs import Capsule, Job

LIMITS = Timeouts(suspicion=1.0)
NOW = 100.0
HEARD = HostContact(NOW - 0.1)
DEAD = HostContact(NOW - 1.2, answers=False)


def a_job(*hosts: str) -> Job:
    capsules = {
        f"gpt/{n}": Capsule(f"gpt/{n}", n, host, 1, started=True) for n, host in enumerate(hosts)
    }
    run = RunJob("gpt", len(hosts), ["true"], {}, "/", 0, [])
    return Job("gpt", Overlay(1, "10.99.0.0/24"), run, 0, 0.0, capsules)


JOB = a_job("h0", "h1")


def lost(seen: dict[str, HostContact], progress: dict[str, float] | None = None) -> list[str]:
    return lost_hosts(JOB, seen, progress or {}, NOW, LIMITS)


def test_a_silent_host_is_lost_if_its_kernel_is_silent_and_the_job_stands_still() -> None:
    assert lost({"h0": HEARD, "h1": DEAD}) == ["h1"]
    assert lost({"h0": DEAD, "h1": HEARD}) == ["h0"]
    assert lost({"h0": HEARD, "h1": HEARD}) == []


def test_a_host_is_not_lost_before_the_suspicion_is_over() -> None:
    assert lost({"h0": HEARD, "h1": HostContact(NOW - 0.9, answers=False)}) == []


def test_a_host_whose_kernel_answers_has_only_lost_its_agent() -> None:
    assert lost({"h0": HEARD, "h1": HostContact(NOW - 60, answers=True)}) == []


def test_nothing_is_decided_before_the_kernel_was_tried() -> None:
    assert lost({"h0": HEARD, "h1": HostContact(NOW - 60)}) == []


def test_a_job_that_trains_has_lost_no_host() -> None:
    seen = {"h0": HEARD, "h1": DEAD}
    assert lost(seen, {"gpt/0": NOW - 0.1}) == []
    assert lost(seen, {"gpt/0": NOW - 0.9}) == ["h1"], "the last collective before it fell silent"
    assert lost(seen, {"gpt/1": NOW - 0.1}) == ["h1"], "only others can show that it trains"


def test_a_job_that_was_paused_gets_time_to_show_that_it_trains() -> None:
    def judged(silence: float, paused: float) -> list[str]:
        seen = {"h0": HEARD, "h1": HostContact(NOW - silence, answers=False)}
        return lost_hosts(JOB, seen, {}, NOW, LIMITS, NOW - paused)

    assert judged(2.9, paused=2.9) == judged(2.9, paused=0.5) == []
    assert judged(3.1, paused=3.1) == ["h1"]
    assert judged(1.2, paused=2.0) == ["h1"], "the pause was over before"


def test_a_host_that_its_peers_do_not_reach_is_not_waited_for_because_of_a_pause() -> None:
    def judged(silence: float, *unreached: str) -> list[str]:
        seen = {"h0": HEARD, "h1": HostContact(NOW - silence, answers=False)}
        return lost_hosts(JOB, seen, {}, NOW, LIMITS, NOW - silence, (), unreached)

    assert judged(1.1) == judged(1.1, "h0") == judged(0.9, "h1") == []
    assert judged(1.1, "h1") == ["h1"]
    answers = {"h0": HEARD, "h1": HostContact(NOW - 1.1, answers=True)}
    assert lost_hosts(JOB, answers, {}, NOW, LIMITS, NOW, (), ["h1"]) == [], "we reach it"


def test_no_host_is_lost_while_none_of_the_job_is_heard() -> None:
    assert lost({"h0": DEAD, "h1": DEAD}) == []


def test_another_host_must_be_heard_after_the_silence_began() -> None:
    """Else the orchestrator itself may have been cut off from both."""
    at_once = HostContact(NOW - 0.99)
    assert lost({"h0": at_once, "h1": DEAD}) == []


def test_a_job_on_one_host_loses_none() -> None:
    alone = a_job("h1", "h1")
    assert lost_hosts(alone, {"h0": HEARD, "h1": DEAD}, {}, NOW, LIMITS) == []


def test_two_hosts_of_three_may_be_lost() -> None:
    three = a_job("h0", "h1", "h2")
    seen = {"h0": HEARD, "h1": DEAD, "h2": HostContact(NOW - 2, answers=False)}
    assert lost_hosts(three, seen, {}, NOW, LIMITS) == ["h1", "h2"]


def test_only_capsules_that_live_count() -> None:
    ended = a_job("h0", "h1")
    ended.capsules["gpt/1"].code = 0
    assert lost_hosts(ended, {"h0": HEARD, "h1": DEAD}, {}, NOW, LIMITS) == []
    begins = a_job("h0", "h1")
    begins.capsules["gpt/1"].started = False
    assert lost_hosts(begins, {"h0": HEARD, "h1": DEAD}, {}, NOW, LIMITS) == []


def test_a_host_outside_of_the_cluster_file_is_suspected_and_never_lost() -> None:
    assert lost({"h0": HEARD}) == []
    assert suspected(JOB, {"h0": HEARD}, NOW, LIMITS) == ["h1"]


def test_a_host_is_suspected_after_two_heartbeats() -> None:
    late = HostContact(NOW - 0.41)
    assert suspected(JOB, {"h0": HEARD, "h1": late}, NOW, LIMITS) == ["h1"]
    assert suspected(JOB, {"h0": HEARD, "h1": HostContact(NOW - 0.39)}, NOW, LIMITS) == []


def test_a_host_that_a_person_calls_dead_is_lost_and_so_are_silent_ones() -> None:
    def judged(seen: dict[str, HostContact], vouched: str) -> list[str]:
        return lost_hosts(JOB, seen, {"gpt/0": NOW}, NOW, LIMITS, NOW, [vouched])

    both = {"h0": DEAD, "h1": DEAD}
    assert judged(both, "h1") == judged(both, "h0") == ["h0", "h1"]
    assert judged({"h0": HEARD, "h1": DEAD}, "h1") == ["h1"]
    assert judged({"h0": HostContact(NOW - 60), "h1": DEAD}, "h1") == ["h1"], "not tried yet"
    assert judged(both, "h2") == [], "no host of the job"
    assert lost_hosts(a_job("h1"), {"h1": DEAD}, {}, NOW, LIMITS, 0.0, ["h1"]) == ["h1"]


def test_while_no_host_of_a_job_is_heard_those_with_silent_kernels_may_be_dead() -> None:
    def judged(job: Job, **seen: HostContact) -> list[str]:
        return perhaps_dead(job, seen, NOW, LIMITS)

    alone, no_agent = a_job("h1", "h1"), HostContact(NOW - 60, answers=True)
    assert judged(alone, h0=HEARD, h1=DEAD) == ["h1"]
    assert judged(JOB, h0=DEAD, h1=DEAD) == ["h0", "h1"]
    assert judged(JOB, h0=no_agent, h1=DEAD) == ["h1"], "only the agent of h0 is away"
    assert judged(JOB, h0=HEARD, h1=DEAD) == [], "it is lost"
    assert judged(JOB, h0=HostContact(NOW - 0.9), h1=DEAD) == [], "h0 may be heard soon"
    assert judged(JOB, h0=HostContact(NOW - 60), h1=DEAD) == [], "its kernel was not tried yet"
    assert judged(alone, h1=no_agent) == judged(alone, h1=HEARD) == judged(alone) == []
