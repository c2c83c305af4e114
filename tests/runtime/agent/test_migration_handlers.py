# SPDX-License-Identifier: Apache-2.0
"""Requests of the orchestrator that come twice, too late, or to a host that cannot do them. The
migrations and the capsules of the host are stand-ins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from liveshift.errors import NotFound, Refused, StepFailed, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.agent import destination_handlers, preflight, source_handlers
from liveshift.runtime.agent.departure.snapshot_sessions import SnapshotSessions
from liveshift.runtime.agent.destination_handlers import DestinationHandlers
from liveshift.runtime.agent.host import host_facts
from liveshift.runtime.agent.migration_registry import MigrationRegistry
from liveshift.runtime.agent.source_handlers import SourceHandlers

T = TypeVar("T")
PRECOPY: Any = SimpleNamespace(
    capsule="gpt/1", migration="m1", destination="h2", endpoint="", verify=False, plain=""
)
FREEZE = messages.Freeze("m1", "gpt/1", 10.0)
RESTORE: Any = SimpleNamespace(capsule="gpt/1", migration="m1", epoch=9, deadline=10.0, hold=60.0)


class Migration:
    """Stands in for either side; what it is asked for may fail."""

    migration = "m1"

    def __init__(self, scene: Scene) -> None:
        self.resident, self.sent = scene.capsule, 77
        self.late: Exception | None = None
        self.error: Exception | None = None
        self.ended_in: list[float] = []
        self._scene = scene

    def precopy(self, _request: object, _asked: float, _criu: object) -> messages.Moved:
        return self._do("precopy")

    def freeze(self, _criu: object, _deadline: float) -> messages.Moved:
        return self._do("freeze")

    def check_may_freeze(self) -> None:
        if self.late:
            raise self.late

    def check_may_restore(self, _epoch: int) -> None:
        if self.late:
            raise self.late

    def end_sooner(self, seconds: float) -> None:
        self.ended_in.append(seconds)

    def free_images(self) -> None:
        self._scene.done.append("images freed")

    async def run(self, _request: object) -> messages.Moved:
        return self._do("restore")

    def _do(self, what: str) -> messages.Moved:
        assert self._scene.is_busy("m1")
        self._scene.done.append(what)
        if self.error:
            raise self.error
        return messages.Moved(14, [])


class Scene(MigrationRegistry):
    """h1 with gpt/1; stands in for its table of capsules and its measures, too."""

    host = "h1"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        me = cast(Any, self)
        self._busy, self._undecided = set(), set()
        self._capsule_table = me
        self.outgoing, self.incoming = {}, {}
        self.snapshots = SnapshotSessions()
        self.done: list[str] = []
        self.criu = cast(Any, "criu")
        self.capsule: Any = SimpleNamespace(
            spec=SimpleNamespace(name="gpt/1", job="gpt"), code=None, epoch=8
        )
        self.capsules = {"gpt/1": self.capsule}
        self.factory = SimpleNamespace()
        self.cluster = SimpleNamespace(host=lambda _name: None)
        self.devices = cast(Any, SimpleNamespace(tree=self._tree))
        self.devices_fail: Exception | None = None
        self.meanwhile: Callable[[], None] = lambda: None
        self.receiver = cast(
            Any,
            SimpleNamespace(
                forget=lambda _name: self.done.append("forget"), received=lambda _name: 7
            ),
        )
        self.made = Migration(self)
        self.source = SourceHandlers(me, self, me, lambda _report: None, lambda: 90)
        copies: Any = SimpleNamespace(own_bytes=lambda _="": 0, make_room=lambda *_: None)
        self.destination = DestinationHandlers(me, self, me, me, me, copies, me)
        monkeypatch.setattr(self.source, "_breaks", lambda _resident: ["one connection"])
        monkeypatch.setattr(source_handlers, "OutgoingMigration", lambda *_: self.made)
        monkeypatch.setattr(destination_handlers, "RestoreAttempt", lambda *_: self.made)
        monkeypatch.setattr(destination_handlers, "FREE_AFTER_S", 0.0)

    def _tree(self, *_: object, **__: object) -> Any:
        self.meanwhile()
        if self.devices_fail:
            raise self.devices_fail
        return None

    def open_sender(self, *_: object) -> Any:
        return None

    def resident(self, capsule: str) -> Any:
        if capsule not in self.capsules:
            raise NotFound(f"{capsule} is not on h1")
        return self.capsules[capsule]

    async def blocking(self, _capsule: str, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    async def hold_signals(self, _resident: object) -> None:
        self.done.append("signals held")

    def admit(self, _resident: object) -> None:
        self.done.append("admitted")

    def stops(self, _migration: str) -> None:
        self.done.append("stops")

    def sent(self, _migration: str, size: int) -> None:
        self.done.append(f"sent {size}")

    def runs(self, _migration: str, _resident: object) -> None:
        self.done.append("measured")

    async def arrive(self, job: str, hold: float) -> None:
        self.done.append(f"gates of {job} kept for {hold:g} s")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


# ---- the source --------------------------------------------------------------------------------


def test_a_precopy_is_registered_while_it_works(scene: Scene) -> None:
    moved = asyncio.run(scene.source.precopy(PRECOPY))
    assert (moved.bytes, moved.outside) == (14, ["one connection"])
    assert scene.outgoing == {"m1": cast(Any, scene.made)}
    assert not scene.is_busy("m1")


def test_a_precopy_that_fails_stays_registered_until_a_ruling(scene: Scene) -> None:
    scene.made.error = StepFailed("ship", "h2 refuses")
    with pytest.raises(StepFailed):
        asyncio.run(scene.source.precopy(PRECOPY))
    assert scene.outgoing == {"m1": cast(Any, scene.made)}
    assert not scene.is_busy("m1")


def test_a_capsule_that_another_migration_holds_is_not_precopied(scene: Scene) -> None:
    scene.outgoing["m0"] = other = cast(Any, Migration(scene))
    other.migration = "m0"
    with pytest.raises(Refused, match="gpt/1 is held by m0 still"):
        asyncio.run(scene.source.precopy(PRECOPY))
    assert list(scene.outgoing) == ["m0"]


@pytest.mark.parametrize("fails", [False, True])
def test_snapshots_give_the_memory_back_before_a_precopy(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def end(capsule: str) -> None:
        scene.done.append(f"{capsule} given back")
        assert "m1" in scene.outgoing, "so that no snapshot begins from here on"
        if fails:
            raise StepFailed("memory", "it is still followed")

    monkeypatch.setattr(scene.snapshots, "end", end)
    if fails:
        with pytest.raises(StepFailed):
            asyncio.run(scene.source.precopy(PRECOPY))
    else:
        asyncio.run(scene.source.precopy(PRECOPY))
    assert scene.done == ["gpt/1 given back", "precopy"][: 2 - fails]
    assert not scene.is_busy("m1")


@pytest.mark.parametrize("how", ["helper", "another", "ended"])
def test_what_happens_while_the_gpus_are_asked_for_begins_no_precopy(
    scene: Scene, how: str
) -> None:
    scene.source._gpus_used["gpt/1"] = ["GPU-1"]
    if how == "helper":
        scene.devices_fail = Unreachable("the helper is silent")
    elif how == "another":
        scene.meanwhile = lambda: scene.outgoing.update(m0=cast(Any, Migration(scene)))
    else:
        scene.meanwhile = lambda: setattr(scene.capsule, "code", 0)
    with pytest.raises(Unreachable if how == "helper" else Refused):
        asyncio.run(scene.source.precopy(PRECOPY))
    assert "m1" not in scene.outgoing
    assert scene.done == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_freeze_holds_signals_first_and_says_in_any_case_what_was_sent(
    scene: Scene, fails: bool
) -> None:
    scene.outgoing["m1"] = cast(Any, scene.made)
    if fails:
        scene.made.error = StepFailed("dump", "CRIU was killed")
        with pytest.raises(StepFailed):
            asyncio.run(scene.source.freeze(FREEZE))
    else:
        asyncio.run(scene.source.freeze(FREEZE))
    assert scene.done == ["signals held", "stops", "freeze", "sent 77"]
    assert not scene.is_busy("m1")


def test_a_freeze_that_comes_too_late_holds_no_signals(scene: Scene) -> None:
    scene.outgoing["m1"] = cast(Any, scene.made)
    scene.made.late = Refused("it is returned")
    with pytest.raises(Refused):
        asyncio.run(scene.source.freeze(FREEZE))
    assert scene.done == []


def test_a_freeze_of_what_is_not_here(scene: Scene) -> None:
    with pytest.raises(NotFound, match="h1 knows no migration m1"):
        asyncio.run(scene.source.freeze(FREEZE))
    scene.capsule.code = 0
    with pytest.raises(Refused, match="gpt/1 has ended with code 0"):
        asyncio.run(scene.source.freeze(FREEZE))
    scene.criu = None
    with pytest.raises(Refused, match="h1 has no CRIU"):
        asyncio.run(scene.source.freeze(FREEZE))


def test_a_deadline_goes_to_the_migrations_of_its_capsule_alone(scene: Scene) -> None:
    other = Migration(scene)
    other.resident = SimpleNamespace(spec=SimpleNamespace(name="gpt/2", job="gpt"))
    scene.outgoing |= {"m1": cast(Any, scene.made), "m2": cast(Any, other)}
    asyncio.run(scene.source.end_sooner(messages.EndSooner("gpt/1", 7.0)))
    assert (scene.made.ended_in, other.ended_in) == ([7.0], [])


@pytest.fixture
def inspected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A scene in which a capsule can be inspected; the test adds the look at its memory."""

    async def found(*_: object) -> Any:
        return SimpleNamespace(along=(), output=0)

    scene.capsule.sandbox = SimpleNamespace(plan=None)
    scene.reservations = cast(Any, SimpleNamespace(survey=lambda *_: None))
    scene.facts = cast(Any, None)
    cast(Any, scene).idle = SimpleNamespace(cores=lambda: None)
    scene.cluster.precopy = None
    monkeypatch.setattr(scene, "dumper", lambda: None)
    monkeypatch.setattr(scene, "surveyed", found)
    monkeypatch.setattr(scene, "until_on_gpus", found)
    monkeypatch.setattr(scene.source, "_with_files", lambda survey, _plan: survey)
    monkeypatch.setattr(preflight, "warm_tools", lambda _criu: None)
    return scene


@pytest.mark.parametrize(("snapshot", "room"), [(True, 110), (False, 0)])
def test_a_survey_for_a_snapshot_counts_the_copies_that_give_way_as_room(
    inspected: Scene, monkeypatch: pytest.MonkeyPatch, snapshot: bool, room: int
) -> None:
    asked: list[int] = []

    def forecast(*about: Any) -> tuple[None, None, str]:
        asked.append(about[-1])
        return None, None, ""

    monkeypatch.setattr(source_handlers, "forecast_memory", forecast)
    monkeypatch.setattr(host_facts, "memory_to_spare", lambda _kept: 20)
    asyncio.run(inspected.source.inspect(messages.Inspect("gpt/1", snapshot=snapshot)))
    assert asked == [room]


@pytest.mark.parametrize("watch", [True, False])
def test_no_snapshot_begins_while_a_forecast_follows_the_memory(
    inspected: Scene, monkeypatch: pytest.MonkeyPatch, watch: bool
) -> None:
    """A forecast that only measures the size of the memory is in nobody's way."""
    refused: list[bool] = []
    resident: Any = SimpleNamespace(spec=SimpleNamespace(name="gpt/1"))

    def forecast(*_: Any) -> tuple[None, None, str]:
        try:
            inspected.snapshots.begin(resident, lambda _tracker: cast(Any, None))
        except Refused:
            refused.append(True)
        return None, None, ""

    monkeypatch.setattr(source_handlers, "forecast_memory", forecast)
    asyncio.run(inspected.source.inspect(messages.Inspect("gpt/1", watch=watch)))
    assert refused == [True] * watch


# ---- the destination ---------------------------------------------------------------------------


async def restore(scene: Scene) -> messages.Moved:
    moved = await scene.destination.restore(RESTORE)
    begun_besides = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*begun_besides)
    return moved


def test_a_restored_capsule_is_admitted_and_its_image_freed(scene: Scene) -> None:
    scene.incoming["m1"] = cast(Any, scene.made)
    assert asyncio.run(restore(scene)).bytes == 14
    assert scene.incoming == {}
    assert scene.done[:2] == ["restore", "admitted"]
    assert sorted(scene.done[2:]) == [
        "forget",
        "gates of gpt kept for 60 s",
        "images freed",
        "measured",
    ]


def test_an_attempt_that_fails_keeps_the_image(scene: Scene) -> None:
    scene.incoming["m1"] = cast(Any, scene.made)
    scene.made.error = StepFailed("restore", "CRIU was killed")
    with pytest.raises(StepFailed):
        asyncio.run(restore(scene))
    assert (scene.done, list(scene.incoming)) == (["restore"], ["m1"])
    assert not scene.is_busy("m1")


def test_a_request_that_comes_again_succeeds_if_the_capsule_runs(scene: Scene) -> None:
    scene.capsule.epoch = 9
    assert asyncio.run(restore(scene)).bytes == 0
    scene.capsule.epoch = 10
    with pytest.raises(NotFound, match="h1 has no image of gpt/1"):
        asyncio.run(restore(scene))
    assert scene.done == []


def test_a_request_that_comes_again_waits_for_the_first(scene: Scene) -> None:
    scene.incoming["m1"] = cast(Any, scene.made)

    async def both() -> messages.Moved:
        with scene.working("m1"):
            again = asyncio.create_task(scene.destination.restore(RESTORE))
            await asyncio.sleep(0.05)
            assert not again.done()
            del scene.incoming["m1"]
            scene.capsule.epoch = 9
        return await again

    assert asyncio.run(both()).bytes == 0
    assert scene.done == []


def test_an_attempt_that_is_not_allowed_is_none(scene: Scene) -> None:
    scene.incoming["m1"] = cast(Any, scene.made)
    scene.made.late = StepFailed("restore", "the attempt under epoch 9 has failed")
    with pytest.raises(StepFailed, match="has failed"):
        asyncio.run(restore(scene))
    assert scene.done == []


def test_an_inbox_that_a_disk_holds_up_takes_one_thread(scene: Scene) -> None:
    """The orchestrator asks again every few seconds, as long as the source is silent."""
    begun, goes_on = [0], threading.Event()

    def close() -> None:
        begun[0] += 1
        assert goes_on.wait(10)

    async def play() -> list[messages.Arrived]:
        made: Any = SimpleNamespace(
            migration="m1",
            inbox=SimpleNamespace(close=close),
            complete=False,
            placed=(0, False),
        )
        scene.incoming["m1"] = made
        asks = []
        for _ in range(5):
            ask = scene.destination.progress(messages.Progress("m1", close=True))
            asks.append(asyncio.ensure_future(ask))
            await asyncio.sleep(0.02)
        asks.pop().cancel()  # its caller has gone
        assert begun == [1]
        goes_on.set()
        found = await asyncio.gather(*asks)
        await scene.destination.progress(messages.Progress("m1", close=True))
        assert begun == [2], "that was over"
        return found

    assert [seen.complete for seen in asyncio.run(play())] == [False] * 4
