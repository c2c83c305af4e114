# SPDX-License-Identifier: Apache-2.0
"""A restarted orchestrator lets a rewound capsule run, and then gets a report that its host made
before it knew of that."""

from __future__ import annotations

import pytest
from orchestrator_scene import FACTS, brain, says

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import Unreachable
from liveshift.runtime.messages import Books, Claim, Register, RunJob
from liveshift.runtime.model.jobs import KILLED, Capsule, Job
from liveshift.runtime.orchestrator.orchestrator import Orchestrator

__all__ = ["brain"]


@pytest.fixture
def rewinding(brain: Orchestrator) -> Orchestrator:
    """a/0 and a/1 are restored on h0 and h1 under epoch 2, and ask whether they may run."""
    return put(brain, "h0", "h1")


def put(brain: Orchestrator, *hosts: str) -> Orchestrator:
    job, journal = brain.fleet.jobs["a"], brain.fleet.journal
    owners = {f"a/{n}": (host, 2) for n, host in enumerate(hosts)}
    journal.remove_job("a")
    places = {name: (n, host) for n, (name, (host, _)) in enumerate(owners.items())}
    journal.add_job("a", 1, "10.99.0.0/24", b"", places)
    journal.file.write("UPDATE capsules SET epoch = 2, granted = 0")
    job.enter(owners, 1, "rewinding")
    for capsule in job.capsules.values():
        capsule.started = True
    return brain


def grant(brain: Orchestrator, capsule: str, host: str) -> None:
    ruled = says(brain, host, Claim("r1.0", capsule, "coming", 2, ready=True, rewinds=1))
    assert ruled is not None
    assert brain.fleet.jobs["a"].capsules[capsule].granted


def register(brain: Orchestrator, host: str, boot_id: str = "first", **epochs: int) -> None:
    here = {f"a/{name[1:]}": epoch for name, epoch in epochs.items()}
    said = says(brain, host, Register(host, FACTS, here, brain.cluster.digest, boot_id))
    assert isinstance(said, Books)


def codes(brain: Orchestrator) -> dict[str, int | None]:
    return {c.name: c.code for c in brain.fleet.jobs["a"].capsules.values()}


def test_a_list_from_before_the_grant_proves_nothing(rewinding: Orchestrator) -> None:
    grant(rewinding, "a/0", "h0")
    with pytest.raises(Unreachable, match="h0 has no a/0 yet, or not any more"):
        register(rewinding, "h0")
    assert codes(rewinding) == {"a/0": None, "a/1": None}
    register(rewinding, "h0", _0=2)
    assert codes(rewinding) == {"a/0": None, "a/1": None}
    register(rewinding, "h1")
    assert codes(rewinding) == {"a/0": None, "a/1": None}, "a/1 is not granted: nothing is said"


def test_what_a_list_from_after_the_grant_lacks_is_lost(rewinding: Orchestrator) -> None:
    grant(rewinding, "a/0", "h0")
    with pytest.raises(Unreachable):
        register(rewinding, "h0")
    register(rewinding, "h0")
    assert codes(rewinding) == {"a/0": KILLED, "a/1": None}


def test_so_it_is_if_the_host_was_switched_off_meanwhile(rewinding: Orchestrator) -> None:
    grant(rewinding, "a/0", "h0")
    with pytest.raises(Unreachable):
        register(rewinding, "h0")
    register(rewinding, "h0", "second")
    assert codes(rewinding) == {"a/0": KILLED, "a/1": None}


def test_each_grant_is_waited_for(rewinding: Orchestrator) -> None:
    """Both capsules are on h0; the second is let run just before h0 reports again."""
    put(rewinding, "h0", "h0")
    grant(rewinding, "a/0", "h0")
    with pytest.raises(Unreachable, match="a/0"):
        register(rewinding, "h0")
    grant(rewinding, "a/1", "h0")
    with pytest.raises(Unreachable, match="a/1"):
        register(rewinding, "h0", _0=2)
    register(rewinding, "h0", _0=2, _1=2)
    assert codes(rewinding) == {"a/0": None, "a/1": None}


def test_other_jobs_do_not_wait_for_the_next_report(rewinding: Orchestrator) -> None:
    grant(rewinding, "a/0", "h0")
    fleet, overlay = rewinding.fleet, Overlay(2, "10.99.1.0/24")
    fleet.journal.add_job("b", 2, overlay.subnet, b"", {"b/0": (0, "h0")})
    other = Capsule("b/0", 0, "h0", 1, started=True)
    run = RunJob("b", 1, ["true"], {}, "/", 0, [])
    fleet.jobs["b"] = Job("b", overlay, run, 0, 0.0, {"b/0": other})
    with pytest.raises(Unreachable, match="h0 has no a/0 yet"):
        register(rewinding, "h0")
    assert codes(rewinding) == {"a/0": None, "a/1": None}
    assert other.code == KILLED


def test_a_job_that_runs_has_lost_what_its_host_lacks_at_once(rewinding: Orchestrator) -> None:
    job = rewinding.fleet.jobs["a"]
    for capsule in job.capsules.values():
        capsule.granted = True
    job.state = "running"
    register(rewinding, "h0")
    assert codes(rewinding) == {"a/0": KILLED, "a/1": None}
