# SPDX-License-Identifier: Apache-2.0
"""What an agent does with each ruling on each copy that it holds, and what it recovers of an
earlier agent. Migrations, capsules and the orchestrator are stand-ins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.agent.arrival.incoming_migration import IncomingMigration
from liveshift.runtime.agent.departure.outgoing_migration import OutgoingMigration
from liveshift.runtime.agent.departure.outgoing_note import OutgoingNote, write_note
from liveshift.runtime.agent.departure.snapshot_sessions import SnapshotSessions
from liveshift.runtime.agent.host import ran_here
from liveshift.runtime.agent.migration_registry import MigrationRegistry
from liveshift.runtime.agent.rulings import Rulings
from liveshift.runtime.model.ownership import Ruling

T = TypeVar("T")
SETTLE = messages.Settle("m1", "gpt/1")


class Migration:
    """Stands in for either side; notes what is done to it, and may fail."""

    migration = "m1"

    def __init__(self, scene: Scene, *, promised: bool = True) -> None:
        self.resident = scene.resident
        self.gpus: list[str] = []
        self.promised = promised
        for name in ("thaw", "finish", "discard", "abandon"):
            setattr(self, name, scene.note(name))
        self.inbox = SimpleNamespace(close=lambda: None)


class Scene(MigrationRegistry):
    """h1, which holds gpt/1 for m1; stands in for its table of capsules, too."""

    host = "h1"

    def __init__(self, images: Path) -> None:
        self._busy = set()
        self._capsule_table = cast(Any, self)
        self.outgoing, self.incoming = {}, {}
        self.snapshots = SnapshotSessions()
        self.done: list[str] = []
        self.fails = ""
        self.alive = True
        self.resident: Any = SimpleNamespace(
            spec=SimpleNamespace(name="gpt/1", job="gpt"),
            overlay=Overlay(7, "10.99.7.0/24", 1),
            epoch=5,
            code=None,
            leaving=False,
            end_silently=self.note("end"),
            sandbox=SimpleNamespace(alive=lambda: self.alive),
            note=self.note("noted"),
        )
        self.capsules = {"gpt/1": self.resident}
        self.receiver = cast(Any, SimpleNamespace(forget=lambda _name: self.done.append("forget")))
        gpus = SimpleNamespace(refresh=lambda: self.done.append("GPUs looked at"))
        self.devices = cast(Any, SimpleNamespace(gpus=gpus, left=lambda *_: None))
        self.network = asyncio.Lock()
        timeouts = SimpleNamespace(heartbeat=0.01, suspicion=1.0, prepare=0.2)
        paths = SimpleNamespace(run=images.parent, state=images.parent / "state")
        self.cluster = SimpleNamespace(timeouts=timeouts, paths=paths)
        self.factory: Any = SimpleNamespace(
            images=lambda name: images / name,
            cluster=self.cluster,
            placement=SimpleNamespace(carried=()),
        )
        self.images = images
        self.ruled: messages.Ruled | LiveshiftError = messages.Ruled("wait", 5)
        self.claims: list[messages.Claim] = []
        self.rulings = Rulings(cast(Any, self), self, self._claimed)

    def note(self, what: str) -> Callable[[], None]:
        def do() -> None:
            self.done.append(what)
            if what == self.fails:
                raise OSError(28, "full") if what == "noted" else StepFailed(what, "it failed")

        return do

    async def _claimed(self, claim: messages.Claim) -> messages.Ruled:
        self.claims.append(claim)
        if isinstance(self.ruled, LiveshiftError):
            raise self.ruled
        return self.ruled

    async def blocking(self, _capsule: str, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    def ended(self, resident: Any) -> None:
        self.done.append("ended")

    def resident_of(self, capsule: str) -> Any:
        if capsule not in self.capsules:
            raise NotFound(f"{capsule} is not on h1")
        return self.capsules[capsule]

    async def recover_capsules(self, arriving: set[str]) -> None:
        self.done.append(f"capsules recovered, {sorted(arriving)} are arriving")

    def leaves(self, *, promised: bool = True) -> Any:
        self.outgoing["m1"] = cast(Any, Migration(self, promised=promised))
        return self.outgoing["m1"]

    def comes(self) -> Any:
        self.incoming["m1"] = cast(Any, Migration(self))
        return self.incoming["m1"]

    def rule(self, ruling: Ruling, epoch: int = 5) -> str:
        self.ruled = messages.Ruled(ruling.value, epoch)

        async def claim() -> str:
            state = await self.rulings.claim("m1")
            begun_besides = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*begun_besides)
            return state

        return asyncio.run(claim())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    (tmp_path / "images").mkdir()
    return Scene(tmp_path / "images")


# ---- the source's copy -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ruling", "promised", "alive", "state", "done"),
    [
        (Ruling.WAIT, True, True, "held", []),
        (Ruling.WAIT, False, True, "held", []),
        (Ruling.WAIT, True, False, "nothing", []),
        (Ruling.RUN, True, True, "runs", ["thaw", "noted"]),
        (Ruling.RUN, False, True, "runs", ["thaw", "noted"]),
        (Ruling.RUN, True, False, "ended", ["thaw", "ended"]),
        (Ruling.END, True, True, "ended", ["finish"]),
        (Ruling.END, True, False, "ended", ["finish"]),
        (Ruling.END, False, True, "ended", ["thaw"]),
        (Ruling.END, False, False, "ended", ["thaw"]),
    ],
)
def test_each_ruling_on_the_sources_copy(
    scene: Scene, ruling: Ruling, promised: bool, alive: bool, state: str, done: list[str]
) -> None:
    scene.leaves(promised=promised)
    scene.alive = alive
    assert scene.rule(ruling, 7) == state
    assert scene.done == done
    assert ("m1" in scene.outgoing) is (ruling is Ruling.WAIT)
    assert scene.resident.epoch == (7 if ruling is Ruling.RUN else 5)
    assert ran_here.last_epoch(scene.factory, "gpt/1") == (7 if ruling is Ruling.RUN else 0)
    assert ("gpt/1" in scene.capsules) is (done != ["finish"]), "one that has moved is not here"
    (claim,) = scene.claims
    assert (claim.side, claim.epoch, claim.ready, claim.rewinds) == ("leaving", 5, True, 1)


@pytest.mark.parametrize(
    ("ruling", "promised", "fails"),
    [(Ruling.RUN, True, "thaw"), (Ruling.END, True, "finish"), (Ruling.END, False, "thaw")],
)
def test_what_fails_is_tried_again_with_the_next_claim(
    scene: Scene, ruling: Ruling, promised: bool, fails: str
) -> None:
    scene.leaves(promised=promised)
    scene.fails = fails
    with pytest.raises(StepFailed):
        scene.rule(ruling)
    assert "m1" in scene.outgoing
    scene.fails, scene.done = "", []
    scene.rule(ruling)
    assert scene.done[0] == fails
    assert "m1" not in scene.outgoing


@pytest.mark.parametrize("ruling", [Ruling.RUN, Ruling.END])
def test_a_ruling_of_an_earlier_epoch_is_none(scene: Scene, ruling: Ruling) -> None:
    scene.leaves()
    with pytest.raises(LiveshiftError, match="is of epoch 4, and it has 5"):
        scene.rule(ruling, 4)
    assert (scene.done, list(scene.outgoing)) == ([], ["m1"])


def test_a_capsule_whose_epoch_cannot_be_noted_runs_nevertheless(scene: Scene) -> None:
    scene.leaves()
    scene.fails = "noted"
    assert scene.rule(Ruling.RUN) == "runs"
    assert scene.outgoing == {}


def test_gpus_that_a_capsule_has_left_are_looked_at(scene: Scene) -> None:
    scene.leaves().gpus = ["GPU-1"]
    scene.rule(Ruling.END)
    assert scene.done == ["finish", "GPUs looked at"]


# ---- the destination's copy --------------------------------------------------------------------


@pytest.mark.parametrize("ruling", Ruling)
def test_each_ruling_on_the_destinations_copy(scene: Scene, ruling: Ruling) -> None:
    """It is not ready to run, so RUN is only said: the restore is on its way."""
    scene.comes()
    over = ruling is Ruling.END
    assert scene.rule(ruling) == ("ended" if over else "held")
    assert scene.done == (["forget", "discard"] if over else [])
    assert ("m1" in scene.incoming) is not over
    (claim,) = scene.claims
    assert (claim.side, claim.ready, claim.rewinds) == ("coming", False, 1)


def test_a_removal_that_fails_is_tried_again(scene: Scene) -> None:
    scene.comes()
    scene.fails = "discard"
    with pytest.raises(StepFailed):
        scene.rule(Ruling.END)
    assert "m1" in scene.incoming
    scene.fails = ""
    assert scene.rule(Ruling.END) == "ended"
    assert scene.incoming == {}


# ---- when it claims ----------------------------------------------------------------------------


def test_nothing_changes_while_the_orchestrator_is_silent(scene: Scene) -> None:
    scene.leaves()
    scene.ruled = Unreachable("the orchestrator is silent")
    with pytest.raises(Unreachable):
        asyncio.run(scene.rulings.claim("m1"))
    assert (scene.done, list(scene.outgoing)) == ([], ["m1"])
    assert not scene.is_busy("m1")


def test_no_claim_is_sent_for_a_copy_with_work_under_way(scene: Scene) -> None:
    scene.leaves()
    with scene.working("m1"):
        assert scene.rule(Ruling.END) == "held"
    assert scene.claims == []


@pytest.mark.parametrize(
    ("code", "alive", "state"),
    [(None, True, "runs"), (None, False, "ended"), (0, True, "ended")],
)
def test_a_capsule_that_no_migration_holds(
    scene: Scene, code: int | None, alive: bool, state: str
) -> None:
    scene.resident.code, scene.alive = code, alive
    assert asyncio.run(scene.rulings.claim_now(SETTLE)).state == state
    scene.capsules.clear()
    assert asyncio.run(scene.rulings.claim_now(SETTLE)).state == "nothing"
    assert scene.claims == []


def test_a_copy_that_was_killed_while_it_is_held_is_nothing(scene: Scene) -> None:
    scene.leaves()
    scene.alive = False
    assert asyncio.run(scene.rulings.claim_now(SETTLE)).state == "nothing"
    assert scene.done == ["abandon"]


def test_an_order_interrupts_the_work_under_way_and_waits_for_its_end(scene: Scene) -> None:
    scene.leaves()
    scene.ruled = messages.Ruled("run", 5)

    async def both() -> str:
        with scene.working("m1"):
            order = asyncio.create_task(scene.rulings.claim_now(SETTLE))
            await asyncio.sleep(0.05)
            assert (scene.done, scene.claims, order.done()) == (["abandon"], [], False)
        return (await order).state

    assert asyncio.run(both()) == "runs"


def test_it_claims_with_every_heartbeat_whatever_happens(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.leaves()
    scene.ruled = Unreachable("the orchestrator is silent")

    async def claim() -> None:
        work = asyncio.create_task(scene.rulings.keep_claiming())
        while len(scene.claims) < 2:
            await asyncio.sleep(0.005)
        scene.ruled, scene.fails = messages.Ruled("end", 5), "finish"
        while "finish" not in scene.done:
            await asyncio.sleep(0.005)

        def breaks() -> None:
            scene.done.append("broke")
            raise ZeroDivisionError

        scene.outgoing["m1"].finish = breaks  # type: ignore[method-assign]
        while "broke" not in scene.done:
            await asyncio.sleep(0.005)
        scene.outgoing["m1"].finish = scene.note("finish")  # type: ignore[method-assign]
        scene.fails = ""
        while scene.outgoing:
            await asyncio.sleep(0.005)
        work.cancel()

    asyncio.run(asyncio.wait_for(claim(), 20))


def test_a_migration_whose_disk_hangs_keeps_no_other_one_waiting(scene: Scene) -> None:
    """Neither for its ruling nor for the network of this host."""
    back, stuck = threading.Event(), scene.comes()
    stuck.inbox = SimpleNamespace(close=lambda: back.wait(20))
    scene.ruled = messages.Ruled("end", 5)

    async def story() -> None:
        work = asyncio.create_task(scene.rulings.keep_claiming())
        while not scene.is_busy("m1"):
            await asyncio.sleep(0.005)
        other = Migration(scene)
        other.migration = "m2"
        scene.incoming["m2"] = cast(Any, other)
        async with asyncio.timeout(5):
            while "m2" in scene.incoming:
                await asyncio.sleep(0.005)
        assert list(scene.incoming) == ["m1"]
        back.set()
        async with asyncio.timeout(5):
            while scene.incoming:
                await asyncio.sleep(0.005)
        work.cancel()

    try:
        asyncio.run(story())
    finally:
        back.set()
    assert [claim.migration for claim in scene.claims] == ["m1", "m2"]


# ---- after a rewind ----------------------------------------------------------------------------


def book(rewinds: int = 2, job: str = "gpt") -> messages.Book:
    return messages.Book(job, 7, "10.99.7.0/24", {}, rewinds)


@pytest.mark.parametrize(
    ("promised", "done"),
    [(True, ["abandon", "end", "finish"]), (False, ["abandon", "end", "thaw"])],
)
def test_what_leaves_from_before_a_rewind_ends_without_a_ruling(
    scene: Scene, promised: bool, done: list[str]
) -> None:
    scene.leaves(promised=promised)
    scene.ruled = Unreachable("the orchestrator is silent")
    asyncio.run(scene.rulings.drop_earlier(book()))
    assert (scene.done, scene.outgoing, scene.claims) == (done, {}, [])
    assert scene.resident.leaving


def test_what_comes_from_before_a_rewind_is_discarded(scene: Scene) -> None:
    scene.comes()
    asyncio.run(scene.rulings.drop_earlier(book()))
    assert (scene.done, scene.incoming, scene.claims) == (["end", "forget", "discard"], {}, [])


@pytest.mark.parametrize("other", [book(rewinds=1), book(job="other")])
def test_the_copies_of_the_rewind_and_other_jobs_stay(scene: Scene, other: messages.Book) -> None:
    scene.leaves()
    asyncio.run(scene.rulings.drop_earlier(other))
    assert (scene.done, list(scene.outgoing)) == ([], ["m1"])


def test_the_work_on_an_earlier_copy_ends_first(scene: Scene) -> None:
    scene.leaves()

    async def both() -> None:
        with scene.working("m1"):
            order = asyncio.create_task(scene.rulings.drop_earlier(book()))
            await asyncio.sleep(0.05)
            assert (scene.done, order.done()) == (["abandon", "end"], False)
        await order

    asyncio.run(both())
    assert (scene.done[-1], scene.outgoing) == ("finish", {})


def test_work_on_an_earlier_copy_that_does_not_end_is_named(scene: Scene) -> None:
    scene.leaves()

    async def busy() -> None:
        with scene.working("m1"):
            await scene.rulings.drop_earlier(book())

    with pytest.raises(Refused, match=r"m1 still works on gpt/1, 0\.1 s after gpt/1 was ended"):
        asyncio.run(busy())
    assert list(scene.outgoing) == ["m1"]


@pytest.mark.parametrize("fails", ["end", "finish"])
def test_an_earlier_copy_that_cannot_be_removed_is_tried_again(scene: Scene, fails: str) -> None:
    scene.leaves()
    scene.fails = fails
    with pytest.raises(StepFailed, match="it failed"):
        asyncio.run(scene.rulings.drop_earlier(book()))
    assert (list(scene.outgoing), scene.not_busy()) == (["m1"], {"m1"})
    scene.fails = ""
    asyncio.run(scene.rulings.drop_earlier(book()))
    assert scene.outgoing == {}


# ---- after a restart ---------------------------------------------------------------------------


class Recovers:
    """What an earlier agent has left of m1, for either side."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scene = scene
        self.incoming: Any = None
        self.outgoing = Migration(scene)
        monkeypatch.setattr(scene, "resident", scene.resident_of)
        monkeypatch.setattr(IncomingMigration, "recover", lambda *_: self.incoming)
        monkeypatch.setattr(OutgoingMigration, "recover", lambda *_: self.outgoing)
        (scene.images / "m1").mkdir()
        write_note(scene.images / "m1", OutgoingNote("m1", "gpt/1"))

    def run(self) -> None:
        asyncio.run(self.scene.recover_migrations())


@pytest.fixture
def recovers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Recovers:
    return Recovers(scene, monkeypatch)


def test_a_tree_that_was_promised_stays_held(scene: Scene, recovers: Recovers) -> None:
    recovers.run()
    found: Any = scene.outgoing
    assert found == {"m1": recovers.outgoing}
    assert scene.done == ["capsules recovered, [] are arriving"]
    assert (scene.images / "m1").exists()


@pytest.mark.parametrize("fails", ["", "thaw"])
def test_a_tree_that_was_being_frozen_goes_on(scene: Scene, recovers: Recovers, fails: str) -> None:
    recovers.outgoing.promised, scene.fails = False, fails
    recovers.run()
    assert scene.done[-1] == "thaw"
    assert ("m1" in scene.outgoing) is bool(fails), "the next claim tries it again"
    assert (scene.images / "m1").exists() is bool(fails)


def test_what_is_left_of_a_capsule_that_is_gone_is_removed(
    scene: Scene, recovers: Recovers
) -> None:
    scene.capsules.clear()
    recovers.run()
    assert (scene.outgoing, scene.incoming) == ({}, {})
    assert not (scene.images / "m1").exists()


def test_images_that_are_held_for_others_are_no_migrations(
    scene: Scene, recovers: Recovers
) -> None:
    held = scene.images / "held/gpt.1/s17"
    held.mkdir(parents=True)
    recovers.run()
    assert held.exists()
    assert "held" not in {*scene.outgoing, *scene.incoming}


@pytest.mark.parametrize("epoch", [3, 5])
def test_a_capsule_that_has_come_back_since_is_not_held(
    scene: Scene, recovers: Recovers, epoch: int
) -> None:
    """m1 took it away under epoch 3, and could not clear up here; now it runs under epoch 5."""
    write_note(scene.images / "m1", OutgoingNote("m1", "gpt/1", [], epoch))
    recovers.run()
    assert ("m1" in scene.outgoing) is (epoch == scene.capsules["gpt/1"].epoch)


def test_a_note_that_cannot_be_read_is_none(scene: Scene, recovers: Recovers) -> None:
    (scene.images / "m1" / "departure").write_bytes(b"\xc1")
    recovers.run()
    assert scene.outgoing == {}
    assert not (scene.images / "m1").exists()


@pytest.mark.parametrize("runs", [False, True])
def test_an_image_is_kept_unless_its_tree_runs(
    scene: Scene, recovers: Recovers, runs: bool
) -> None:
    directory = SimpleNamespace(name="gpt.1")
    sandbox = SimpleNamespace(plan=SimpleNamespace(directory=directory))
    recovers.incoming = SimpleNamespace(
        resume_recovered=lambda: runs, resident=SimpleNamespace(sandbox=sandbox)
    )
    (scene.images / "m1" / "departure").unlink()
    recovers.run()
    assert ("m1" in scene.incoming) is not runs
    assert (scene.images / "m1").exists() is not runs
    assert scene.done == [f"capsules recovered, {[] if runs else ['gpt.1']} are arriving"]
