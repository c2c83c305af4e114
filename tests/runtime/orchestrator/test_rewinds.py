# SPDX-License-Identifier: Apache-2.0
"""A job loses a host and is taken back, with a real journal and the real judge of claims; hosts
are stand-ins that answer as agents do."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from fleet_scene import a_fleet
from orchestrator_parts import Parts
from rewind_scene import FACTS, SURVEY

from liveshift.errors import NotFound, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.control import reach
from liveshift.runtime.journal.journal_file import JournalError
from liveshift.runtime.messages import CapsuleEnded, CapsuleState, Message
from liveshift.runtime.model.jobs import KILLED, Capsule, Job
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.orchestrator.endings import Endings
from liveshift.runtime.orchestrator.fleet import Fleet
from liveshift.runtime.orchestrator.rewinds import Rewinds
from liveshift.runtime.orchestrator.stopping import Stopping

FAULT_S = 0.7
BRISK = f"[timeouts]\nsuspicion = 0.6\nheartbeat = 0.05\nfault = {FAULT_S}\n"


def ended(capsule: Capsule, code: int, signum: int = 0, collectives: int = 0) -> CapsuleEnded:
    return CapsuleEnded(capsule.name, capsule.epoch, code, signum, collectives)


class Scene:
    """The job a, on h0 and h1; h2 holds its newest snapshot. ``alive``: the hosts whose agents are
    heard. ``kernels``: those that answer a connection. ``stuck``: what is never answered."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = {"h0", "h1", "h2"}
        self.kernels = {"h0", "h1", "h2"}
        self.images = True
        self.stuck: set[str] = set()
        self.said: list[str] = []
        fleet = a_fleet(state, BRISK)
        for capsule in fleet.jobs["a"].capsules.values():
            capsule.started = True
        self.take_snapshot(fleet)
        self.begin(fleet)
        addresses = {str(host.data): host.name for host in fleet.cluster.hosts}

        async def answers(address: str, _limit: float) -> bool:
            await asyncio.sleep(0.01)
            return addresses[address] in self.kernels

        monkeypatch.setattr(reach, "answers", answers)

    def begin(self, fleet: Fleet) -> None:
        """An orchestrator on this fleet."""
        self.fleet = fleet
        self.parts = Parts(fleet, self, gates=self)
        stopping = Stopping(fleet, cast(Any, self))
        self.endings = Endings(fleet, cast(Any, self), stopping)
        self.stopping = stopping
        self.rewinds = Rewinds(
            fleet,
            self.parts.agents,
            self.parts.address_book,
            self.parts.context,
            cast(Any, self),
            self.endings,
        )

    @property
    def job(self) -> Job:
        return self.fleet.jobs["a"]

    def take_snapshot(self, fleet: Fleet) -> None:
        job, tables = fleet.jobs["a"], fleet.journal.snapshots
        owners = {c.name: (c.host, c.epoch) for c in job.capsules.values()}
        holders = {name: ["h2"] for name in owners}
        number = tables.begin_snapshot("a")
        job.newest = Generation(number, "a", "step 9", time.time(), job.rewinds, owners, holders)
        tables.complete_snapshot(job.newest)

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        work = [asyncio.ensure_future(each) for each in (self.rewinds.run(), self._beat())]
        try:
            await asyncio.sleep(0.1)
            yield
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            for host in self.alive:
                self.fleet.hosts[host].heard = time.monotonic()
            await asyncio.sleep(0.01)

    def end(self, name: str, code: int, signum: int = 0, collectives: int = 0) -> CapsuleEnded:
        """How a command ends under the present epoch."""
        return ended(self.job.capsules[name], code, signum, collectives)

    def report(self, end: CapsuleEnded) -> bool:
        """An agent reports an end. Returns whether it has to report it again."""
        capsule = self.job.capsules[end.capsule]
        if end.epoch != capsule.epoch:  # the orchestrator does not even look at it
            return False
        return self.rewinds.takes_back(self.job, capsule, end)

    def died(self) -> list[dict[str, int]]:
        """The capsules that the job's rewinds are put down to."""
        return [row.died for row in self.fleet.journal.snapshots.history("a")]

    def ask(self, **options: Any) -> None:
        """As if the job had been started with these options."""
        self.job.request = msgspec.structs.replace(self.job.request, **options)

    def cut(self, *hosts: str) -> None:
        self.alive -= set(hosts)
        self.kernels -= set(hosts)

    async def until(self, look: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not look():
                await asyncio.sleep(0.01)

    def history(self, kind: str) -> list[str]:
        return [e.text for e in self.fleet.journal.events("a", 0) if e.kind == kind]

    def owners(self) -> dict[str, tuple[str, int, bool]]:
        """As memory has them; the journal must say the same."""
        rows = self.fleet.journal.capsules("a")
        kept = {name: (host, epoch, bool(g)) for name, _, _, host, epoch, _, g in rows}
        assert kept == {c.name: (c.host, c.epoch, c.granted) for c in self.job.capsules.values()}
        return kept

    # ---- the switchboard and the gates ----

    async def request(self, host: str, message: Message, _limit: float) -> Message | None:
        kind = type(message).__name__
        self.said.append(f"{kind} {host}")
        if host not in self.alive:
            raise Unreachable(f"{host} does not answer")
        if kind in self.stuck:
            await asyncio.Event().wait()
        if isinstance(message, messages.GetHeld):
            if not self.images:
                raise NotFound(f"{host} has no {message.image}")
            return messages.HeldFacts(SURVEY, FACTS, 1000)
        if isinstance(message, messages.Reserve):
            return messages.Reserved([], f"tcp://{host}:7401")
        if isinstance(message, messages.ForwardHeld):
            return messages.Frozen(1000, [])
        if isinstance(message, messages.RestoreCapsule):
            claim = messages.Claim(
                message.migration,
                message.capsule,
                "coming",
                message.epoch,
                ready=True,
                rewinds=self.job.rewinds,
            )
            assert self.parts.claims.rule(host, claim).ruling == "run"
            return messages.Moved(1000, [])
        return None

    def opened(self, _job: Job) -> float:
        return 0.0

    async def open(self, job: Job, _limits: object) -> str:
        assert all(capsule.granted for capsule in job.capsules.values())
        self.said.append("open")
        return ""


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_dead_host_s_capsule_goes_to_its_holder_and_all_go_back(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.state == "running"
    assert scene.job.book().rewinds == 1
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h2", 3, True)}
    (why,) = scene.history("rewinding")
    assert why == "goes back to s1: h1 is silent, and so is its kernel"
    assert scene.said.index("EndEarlier h0") < scene.said.index("Reserve h0")
    assert scene.fleet.journal.snapshots.rewinds_under_way() == []
    again = Fleet(scene.fleet.cluster).jobs["a"]
    assert (again.state, again.rewinds) == ("running", 1)


def test_an_agent_that_is_away_leads_to_nothing(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.alive.remove("h1")
            await asyncio.sleep(2.0)

    asyncio.run(play())
    assert "GetHeld h2" not in scene.said
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


def test_a_job_that_trains_on_is_left_alone(scene: Scene) -> None:
    def state(count: int) -> CapsuleState:
        return CapsuleState("a/0", 1, 2, 0, count, 1.0, [0], "true")

    async def play() -> None:
        capsule = scene.job.capsules["a/0"]
        async with scene.at_work():
            scene.cut("h1")
            for count in range(200):
                scene.rewinds.note_heartbeat(capsule, seen := state(count))
                capsule.seen = seen
                await asyncio.sleep(0.01)
            assert scene.owners()["a/1"] == ("h1", 1, True)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"] == ("h2", 3, True), "it was, until it stood still"


def test_a_host_that_came_back_without_a_capsule_has_lost_it(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"][1] == 3
    assert scene.history("rewinding") == ["goes back to s1: h1 came back without a/1"]


def test_a_job_without_a_snapshot_ends_as_ever(scene: Scene) -> None:
    scene.job.newest = None
    capsule = scene.job.capsules["a/1"]
    assert not scene.rewinds.host_lost("h1", scene.job, capsule)
    assert not scene.rewinds.takes_back(scene.job, capsule, ended(capsule, KILLED))


def test_what_fails_beside_a_silent_host_is_not_recorded_yet(scene: Scene) -> None:
    async def play() -> None:
        job, capsule = scene.job, scene.job.capsules["a/0"]
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            scene.cut("h1")
            await asyncio.sleep(0.3)
            assert scene.rewinds.takes_back(job, capsule, ended(capsule, 1))
            assert not scene.rewinds.takes_back(job, capsule, ended(capsule, 0)), "ended well"
            assert not scene.history("rewinding")

    asyncio.run(play())


def test_what_fails_shortly_before_a_host_is_lost_is_taken_back_with_it(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            end = scene.end("a/0", 1)
            assert scene.report(end), "nothing is silent yet"
            scene.cut("h1")
            await scene.until(lambda: not scene.report(end))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.history("rewound")
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h2", 3, True)}


def test_what_fails_shortly_after_a_host_was_silent_fails_of_it(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            await asyncio.sleep(0.8)  # else agents may not have reported to a new orchestrator
            scene.cut("h1")
            await asyncio.sleep(0.3)
            scene.alive.add("h1")
            scene.kernels.add("h1")
            await asyncio.sleep(0.1)
            assert scene.report(scene.end("a/0", 1))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h1", 3, True)}, "all in place"
    (why,) = scene.history("rewinding")
    assert "a/0 ended with code 1, and h1 and its kernel were silent until" in why
    assert scene.died() == [{}], "the job is not to blame"


def test_what_fails_by_itself_ends_the_job_once_that_is_certain(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            began = time.monotonic()
            end = scene.end("a/0", 3)
            while scene.report(end):
                await asyncio.sleep(0.02)
            assert FAULT_S <= time.monotonic() - began < FAULT_S + 5

    asyncio.run(play())
    assert not scene.history("rewinding")
    assert scene.owners() == {"a/0": ("h0", 1, True), "a/1": ("h1", 1, True)}


@pytest.mark.parametrize(("code", "signum"), [(137, 0), (139, 0), (1, 11), (1, 7)])
def test_a_job_of_which_a_rank_was_killed_goes_back_in_place(
    scene: Scene, code: int, signum: int
) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.report(scene.end("a/1", code, signum))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners() == {"a/0": ("h0", 3, True), "a/1": ("h1", 3, True)}
    (why,) = scene.history("rewinding")
    assert why.startswith("goes back to s1: ")
    assert "was ended by SIG" in why
    assert scene.died() == [{"a/1": 0}]


def test_a_peer_that_fails_of_a_killed_rank_is_taken_back_whichever_ends_first(
    scene: Scene,
) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.report(scene.end("a/0", 1)), "its connection was reset"
            await asyncio.sleep(0.1)
            assert scene.report(scene.end("a/1", KILLED))
            assert scene.report(scene.end("a/0", 1))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.state == "running"
    assert scene.died() == [{"a/1": 0}]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGABRT])
def test_a_job_that_a_person_has_signalled_ends_as_it_will(scene: Scene, number: int) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.stuck = {"Signal"}
            sending = asyncio.ensure_future(scene.stopping.signal(scene.job, number, "root"))
            await scene.until(lambda: scene.job.end_asked > 0)
            assert not scene.report(scene.end("a/1", 128 + number))
            sending.cancel()

    asyncio.run(play())
    assert not scene.history("rewinding")


def test_a_signal_of_before_the_snapshot_was_borne(scene: Scene) -> None:
    scene.job.end_asked = time.time()
    scene.take_snapshot(scene.fleet)
    assert scene.report(scene.end("a/1", KILLED))


def test_a_signal_that_is_delivered_after_a_snapshot_was_wished_after_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capsules are frozen for a snapshot when a person asks."""

    async def after_the_thaw(capsules: list[Capsule], _: int) -> list[tuple[Capsule, None]]:
        scene.take_snapshot(scene.fleet)
        return [(capsule, None) for capsule in capsules]

    monkeypatch.setattr(scene.stopping, "_all", after_the_thaw)

    async def play() -> None:
        async with scene.at_work():
            await scene.stopping.signal(scene.job, signal.SIGINT, "root")
            assert not scene.report(scene.end("a/1", KILLED)), "as it was asked to"

    asyncio.run(play())


def test_a_rank_that_fails_while_its_job_is_taken_back_is_taken_back_with_it(scene: Scene) -> None:
    """Its peers may not be back for minutes, because their holder is gone: it waits in vain."""
    scene.job.state = "rewinding"
    assert scene.report(scene.end("a/0", 1))
    assert scene.rewinds.why_again(scene.job) == "a/0 ended with code 1"
    assert scene.rewinds.takes_back(scene.job, scene.job.capsules["a/0"], scene.end("a/0", 1))


def test_with_any_an_exit_code_leads_to_a_rewind_too(scene: Scene) -> None:
    scene.ask(rewind_on="any")

    async def play() -> None:
        async with scene.at_work():
            assert not scene.report(scene.end("a/1", 0))
            assert scene.report(scene.end("a/1", 3))
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.history("rewinding") == ["goes back to s1: a/1 ended with code 3"]


def test_a_rank_that_dies_twice_at_one_collective_ends_its_job(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            assert scene.report(scene.end("a/1", 1, signal.SIGSEGV, collectives=40))
            await scene.until(lambda: len(scene.history("rewound")) == 1)
            assert scene.report(scene.end("a/1", 1, signal.SIGSEGV, collectives=41)), (
                "at another one"
            )
            await scene.until(lambda: len(scene.history("rewound")) == 2)
            assert not scene.report(scene.end("a/1", 1, signal.SIGSEGV, collectives=41))

    asyncio.run(play())
    (why,) = scene.history("not rewound")
    assert "twice in a row after collective 41" in why
    assert scene.died() == [{"a/1": 40}, {"a/1": 41}]


def test_a_job_is_taken_back_so_often_in_an_hour_only(scene: Scene) -> None:
    scene.ask(max_rewinds=1)

    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: len(scene.history("rewound")) == 1)
            assert scene.report(scene.end("a/0", KILLED, collectives=3)), (
                "a lost host does not count"
            )
            await scene.until(lambda: len(scene.history("rewound")) == 2)
            assert not scene.report(scene.end("a/0", KILLED, collectives=4))

    asyncio.run(play())
    (why,) = scene.history("not rewound")
    assert "taken back 1 times" in why
    assert why.endswith("max_rewinds is 1")


def test_a_rank_that_is_killed_while_its_job_is_rewound_is_taken_back_again(scene: Scene) -> None:
    async def play() -> None:
        scene.stuck = {"ForwardHeld"}
        async with scene.at_work():
            assert scene.report(scene.end("a/1", KILLED, collectives=5))
            await scene.until(lambda: "ForwardHeld h2" in scene.said)
            scene.job.capsules["a/0"].granted = True  # it is back already
            assert scene.report(scene.end("a/0", KILLED, collectives=6))
            scene.stuck = set()
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.rewinds == 2
    assert scene.died() == [{"a/1": 5}, {"a/0": 6}]


# ---- a person's order ----


def test_a_person_takes_a_job_back(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            plan = scene.rewinds.order("root", scene.job, "", dry_run=True)
            assert plan.where == {"a/0": "h0", "a/1": "h1"}
            assert (plan.snapshot, plan.boundary) == ("s1", "step 9")
            await asyncio.sleep(0.2)
            assert scene.job.rewinds == 0, "it was only asked"
            assert scene.rewinds.order("root", scene.job, "", dry_run=False).where == plan.where
            await scene.until(lambda: bool(scene.history("rewound")))
            await asyncio.sleep(0.2)

    asyncio.run(play())
    assert scene.job.rewinds == 1, "once"
    assert scene.history("rewinding") == [
        "ordered: root wants it",
        "goes back to s1: root wants it",
    ]
    assert scene.died() == [{}]


def test_an_order_is_refused_in_words(scene: Scene) -> None:
    def refusal(lost: str = "") -> str:
        with pytest.raises(Refused) as refused:
            scene.rewinds.order("root", scene.job, lost, dry_run=False)
        return refused.value.message

    async def play() -> None:
        async with scene.at_work():
            assert refusal("h2") == "--lost h2: a does not run there"
            assert refusal("h1") == "--lost h1: it is not dead, it answers"
            generation, scene.job.newest = scene.job.newest, None
            assert refusal() == "a cannot be taken back: it has no complete snapshot"
            scene.job.newest = generation
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            assert "no host that holds a/0 is up" in refusal()
            scene.cut("h0", "h1")
            await scene.until(lambda: not scene.fleet.is_up("h1"))
            assert "none of its hosts is heard (h0, h1)" in refusal()
            scene.job.state = "ending"
            assert refusal() == "a cannot be taken back: it is being ended"

    asyncio.run(play())
    assert scene.job.rewinds == 0


def test_an_order_that_cannot_be_carried_out_soon_is_void(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.rewinds._lookout.order(scene.job, "root wants it", 0.3)
            scene.cut("h2")
            await asyncio.sleep(1.0)
            scene.alive.add("h2")
            await asyncio.sleep(0.5)

    asyncio.run(play())
    assert scene.job.rewinds == 0


def test_a_person_vouches_for_a_job_of_which_no_host_is_heard(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h0", "h1")
            await asyncio.sleep(1.5)
            assert not scene.history("rewinding"), "it may train on without us"
            scene.rewinds.order("root", scene.job, "h1", dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert {host for host, _, _ in scene.owners().values()} == {"h2"}
    assert "goes back to s1: h0 is silent, and so is its kernel; h1 is dead, says root" in (
        scene.history("rewinding")
    )


def test_a_rewind_that_waits_for_one_of_its_hosts_goes_on_at_a_person_s_word(scene: Scene) -> None:
    async def play() -> None:
        scene.stuck = {"EndEarlier"}
        async with scene.at_work():
            assert scene.report(scene.end("a/1", KILLED))
            await scene.until(lambda: "EndEarlier h1" in scene.said)
            scene.cut("h0", "h1")
            scene.stuck = set()
            await scene.until(lambda: any("left on" in each for each in scene.history("rewinding")))
            await asyncio.sleep(1.5)
            assert not scene.history("rewound"), "no host of it is heard"
            scene.rewinds.order("root", scene.job, "h0", dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert {host for host, _, _ in scene.owners().values()} == {"h2"}


@pytest.mark.parametrize("dead", ["h0", "h1"])
def test_a_person_s_word_counts_for_hosts_that_own_nothing_any_more(
    scene: Scene, dead: str
) -> None:
    async def play() -> None:
        scene.stuck = {"EndEarlier"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "EndEarlier h2" in scene.said)
            scene.cut("h0")
            scene.stuck = set()
            await scene.until(lambda: {host for host, _, _ in scene.owners().values()} == {"h2"})
            waits = "waits until one of h0, h1 has ended its copy: the job may train there"
            await scene.until(lambda: waits in scene.history("rewinding"))
            assert not [said for said in scene.said if said.startswith("Reserve")]
            scene.rewinds.order("root", scene.job, dead, dry_run=False)
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.job.rewinds == 2, "the one that waited went on"
    assert scene.owners() == {"a/0": ("h2", 5, True), "a/1": ("h2", 5, True)}


def test_a_dead_host_that_did_not_run_the_job_proves_nothing(scene: Scene) -> None:
    row = scene.fleet.journal.snapshots.rewind("a", 1, {"a/0": "h2", "a/1": "h2"}, "h0 is silent")
    scene.rewinds._lookout.vouch(scene.job, "h2", "root")
    assert scene.rewinds.before(scene.job) == row.before == ["h0", "h1"]
    scene.rewinds._lookout.vouch(scene.job, "h1", "root")
    assert scene.rewinds.before(scene.job) == []
    scene.fleet.hosts["h1"].heard = time.monotonic()
    assert scene.rewinds.before(scene.job) == ["h0", "h1"], "it was not dead"


def test_a_job_waits_for_a_holder_and_nothing_of_it_is_ended(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h1", "h2")
            await scene.until(lambda: bool(scene.history("rewinding")))
            await asyncio.sleep(0.3)
            (why,) = scene.history("rewinding")
            assert why.startswith("waits: no host that holds")
            assert scene.owners()["a/1"] == ("h1", 1, True)
            scene.alive.add("h2")
            scene.kernels.add("h2")
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(play())
    assert scene.owners()["a/1"] == ("h2", 3, True)


def test_an_image_that_is_gone_ends_only_what_is_certainly_lost(scene: Scene) -> None:
    async def play() -> None:
        scene.images = False
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: bool(scene.history("rewinding")))
            await asyncio.sleep(0.1)
            assert scene.job.capsules["a/1"].code is None, "h1 may come back with it"
            assert not scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])

    asyncio.run(play())
    (why,) = scene.history("rewinding")
    assert "the image of a/0, is gone" in why


def test_a_restarted_orchestrator_goes_on(scene: Scene) -> None:
    async def begins() -> None:
        scene.stuck = {"Reserve"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)

    async def goes_on() -> None:
        scene.stuck = set()
        async with scene.at_work():
            await scene.until(lambda: bool(scene.history("rewound")))

    asyncio.run(begins())
    scene.begin(Fleet(scene.fleet.cluster))
    assert scene.job.state == "rewinding"
    asyncio.run(goes_on())
    assert scene.job.state == "running"
    assert scene.job.rewinds == 1, "the same rewind"
    assert {host for host, _, granted in scene.owners().values() if granted} == {"h0", "h2"}


def test_a_job_that_is_stopped_meanwhile_ends(scene: Scene) -> None:
    async def play() -> None:
        scene.stuck = {"Reserve"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)
            await scene.stopping.signal(scene.job, 15, "root")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert [capsule.code for capsule in scene.job.capsules.values()] == [KILLED, KILLED]
    assert not scene.history("rewound")


def test_a_capsule_that_waited_for_a_rewind_ends_when_its_job_is_stopped(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewinding")))
            assert scene.job.capsules["a/1"].code is None
            await scene.stopping.signal(scene.job, 15, "root")
            await scene.until(lambda: scene.job.capsules["a/1"].code == KILLED)
            assert scene.job.capsules["a/0"].code is None, "its host ends it"
            scene.endings.capsule_ended(scene.job, scene.job.capsules["a/0"], 0)

    asyncio.run(play())
    assert scene.job.state == "ended"
    assert scene.history("lost") == ["a/1 is lost: h1 came back without a/1"]
    assert not scene.history("rewound")


def test_a_capsule_that_waited_for_a_rewind_ends_when_another_has_ended_well(scene: Scene) -> None:
    async def play() -> None:
        async with scene.at_work():
            scene.cut("h2")
            await scene.until(lambda: not scene.fleet.is_up("h2"))
            assert scene.rewinds.host_lost("h1", scene.job, scene.job.capsules["a/1"])
            await scene.until(lambda: bool(scene.history("rewinding")))
            scene.endings.capsule_ended(scene.job, scene.job.capsules["a/0"], 0)
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert scene.job.code == KILLED


def test_a_capsule_that_is_lost_again_ends_when_its_job_is_stopped(scene: Scene) -> None:
    async def play() -> None:
        scene.stuck = {"ForwardHeld"}
        async with scene.at_work():
            assert scene.report(scene.end("a/1", KILLED))
            await scene.until(lambda: "ForwardHeld h2" in scene.said)
            scene.job.capsules["a/0"].granted = True  # it is back already
            scene.rewinds.lacks(scene.job.capsules["a/0"], "h0 does not have it")
            await scene.stopping.signal(scene.job, 15, "root")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert [capsule.code for capsule in scene.job.capsules.values()] == [KILLED, KILLED]
    assert scene.job.rewinds == 1


def test_a_full_disk_ends_no_loop_and_the_end_is_recorded_once_there_is_room(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def full(name: str, _code: int) -> None:
        tried.append(name)
        raise JournalError("the disk is full", hint="make room")

    async def play() -> None:
        scene.stuck = {"Reserve"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "Reserve h2" in scene.said)
            with monkeypatch.context() as disk:
                disk.setattr(scene.fleet.journal, "set_ended", full)
                await scene.stopping.signal(scene.job, 15, "root")
                await scene.until(lambda: len(tried) > 3)
                assert scene.job.state == "ending"
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert scene.history("rewinding")[-1] == "waits: the disk is full"
    assert [capsule.code for capsule in scene.job.capsules.values()] == [KILLED, KILLED]


def test_a_job_of_which_a_rank_has_ended_well_is_not_rewound_again(scene: Scene) -> None:
    async def play() -> None:
        scene.stuck = {"ForwardHeld"}
        async with scene.at_work():
            scene.cut("h1")
            await scene.until(lambda: "ForwardHeld h2" in scene.said)
            scene.job.capsules["a/0"].granted = True  # it is back already
            scene.endings.capsule_ended(scene.job, scene.job.capsules["a/0"], 0)
            scene.rewinds.lacks(scene.job.capsules["a/1"], "h2 does not have it")
            await scene.until(lambda: scene.job.state == "ended")

    asyncio.run(play())
    assert scene.job.code == KILLED
    assert scene.history("rewinding")[-1] == "waits: cannot be taken back: a/0 has ended"
    assert scene.job.rewinds == 1
