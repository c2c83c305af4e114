# SPDX-License-Identifier: Apache-2.0
"""A reservation that fails half way leaves no sandbox: no ruling would ever remove it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from liveshift.criu_glue.capsule import sandboxes
from liveshift.criu_glue.network import network
from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import Refused, Unreachable
from liveshift.runtime.agent import destination_handlers, preflight
from liveshift.runtime.agent.destination_handlers import DestinationHandlers
from liveshift.runtime.agent.host import host_facts
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.config.cluster import Files, Logs, Paths
from liveshift.runtime.messages import Book, CapsuleSpec, HostFacts

SPEC = CapsuleSpec("gpt/1", "gpt", 1, ["train"], {}, "/", 1000, 1000, [], "")
FACTS = HostFacts("6.1", "x86_64", "cpu", [], "4.2.1", "0.1")


class Scene:
    """A host that makes a reservation for m1; ``removed``: the capsules whose sandbox was removed.
    ``devices_come`` stands in for the GPU helper, and ``refuse_older`` for the capsule table's."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.removed: list[str] = []
        self.built = 0
        self.devices_come: Callable[[], None] = lambda: None
        self.refuse_older: Callable[[object], None] = lambda _: None
        self.make_way: Callable[[], None] = lambda: None
        self.images = tmp_path / "m1"
        self.images.mkdir()
        (self.images / "note").write_bytes(b"half of it")
        resident = SimpleNamespace(remove=self._remove)

        @asynccontextmanager
        async def making(_: object) -> AsyncIterator[Any]:
            yield SimpleNamespace(pairs=[], plain="")

        async def make_way(_: object) -> None:
            self.make_way()

        async def nothing(_: object) -> None:
            return None

        async def blocking(_: str, work: Any) -> Any:
            return await asyncio.to_thread(work)

        def build(_: object) -> Any:
            self.built += 1
            return resident

        paths = SimpleNamespace(state=Path("/"), run=Path("/"))
        self.table = SimpleNamespace(
            host="h1",
            cluster=SimpleNamespace(host=lambda _: SimpleNamespace(memory=0), paths=paths),
            capsules={},
            network=asyncio.Lock(),
            idle=SimpleNamespace(cores=lambda: SimpleNamespace(idle=1.0)),
            refuse_older=lambda request: self.refuse_older(request),
            make_way=make_way,
            blocking=blocking,
            factory=SimpleNamespace(build_sandbox=build, images=tmp_path.joinpath),
        )
        self.registry = SimpleNamespace(
            reservations=SimpleNamespace(making=making),
            facts=FACTS,
            criu=None,
            devices=SimpleNamespace(tree=lambda *_: self.devices_come()),
            incoming={},
        )
        monkeypatch.setattr(preflight, "check", lambda *_, **__: [])
        monkeypatch.setattr(host_facts, "memory_offered", lambda *_: 0)
        monkeypatch.setattr(
            destination_handlers,
            "IncomingMigration",
            lambda *_, **__: SimpleNamespace(write_note=lambda: None),
        )
        copies = SimpleNamespace(own_bytes=lambda *_: 0, make_room=lambda *_: None)
        parts: list[Any] = [self.table, self.registry, None, None, None, copies, None]
        self.handlers = DestinationHandlers(*parts)
        monkeypatch.setattr(self.handlers, "_take_away_stale", nothing)

    def _remove(self) -> None:
        assert self.built == len(self.removed) + 1, "it would be the sandbox of the next one"
        self.removed.append("gpt/1")

    def reserve(self) -> None:
        asyncio.run(self.asked())

    async def asked(self) -> None:
        request = SimpleNamespace(
            dry_run=False,
            source="h0",
            survey=SimpleNamespace(resident=0, shared_memory=0),
            full_dump=False,
            facts=FACTS,
            spec=SPEC,
            book=None,
            gpu=object(),
            migration="m1",
        )
        await self.handlers.reserve(cast(Any, request))

    def rewound(self) -> None:
        """A later rewind comes into the table."""

        def refuse(_: object) -> None:
            raise Refused("gpt/1 is from before rewind 1 of its job")

        self.refuse_older = refuse


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_sandbox_and_image_go_where_the_gpu_helper_has_died(scene: Scene) -> None:
    def no_helper() -> None:
        raise Unreachable("the GPU helper does not answer")

    scene.devices_come = no_helper
    with pytest.raises(Unreachable, match="does not answer"):
        scene.reserve()
    assert (scene.removed, scene.registry.incoming) == (["gpt/1"], {})
    assert not scene.images.exists()


def test_no_sandbox_is_built_if_a_rewind_comes_before(scene: Scene) -> None:
    """It would take the directory and the network of the restored capsule."""
    scene.make_way = scene.rewound
    with pytest.raises(Refused, match="from before rewind 1"):
        scene.reserve()
    assert (scene.built, scene.removed, scene.registry.incoming) == (0, [], {})


def test_no_sandbox_is_built_if_the_capsule_comes_before(scene: Scene) -> None:
    scene.make_way = lambda: scene.table.capsules.update({"gpt/1": SimpleNamespace(code=None)})
    with pytest.raises(Refused, match="gpt/1 is on h1 already"):
        scene.reserve()
    assert (scene.built, scene.removed, scene.registry.incoming) == (0, [], {})


def test_a_sandbox_goes_if_a_rewind_comes_before_it_is_registered(scene: Scene) -> None:
    """EndEarlier has not seen it."""
    scene.devices_come = scene.rewound
    with pytest.raises(Refused, match="from before rewind 1"):
        scene.reserve()
    assert (scene.built, scene.removed, scene.registry.incoming) == (1, ["gpt/1"], {})
    assert not scene.images.exists()


def test_the_next_one_waits_until_the_sandbox_is_removed(scene: Scene) -> None:
    """It is removed by the capsule's name, after its turn at the network."""

    async def both() -> Sequence[BaseException | None]:
        first, going = asyncio.ensure_future(scene.asked()), threading.Event()

        def come() -> None:
            going.set()
            time.sleep(0.2)
            raise Unreachable("the GPU helper does not answer")

        scene.devices_come = come
        await asyncio.to_thread(going.wait, 5)
        second = asyncio.ensure_future(scene.asked())
        return await asyncio.gather(first, second, return_exceptions=True)

    outcomes = asyncio.run(both())
    assert [type(outcome) for outcome in outcomes] == [Unreachable, Unreachable]
    assert (scene.built, scene.removed) == (2, ["gpt/1", "gpt/1"])


@pytest.mark.parametrize("step", ["plug_in", "build_empty"])
def test_nothing_is_left_of_a_sandbox_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A full disk, for one: that is an OSError."""
    unplugged: list[str] = []

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cluster: Any = SimpleNamespace(
        paths=Paths(state=tmp_path / "state", run=tmp_path / "run", keys=tmp_path / "keys"),
        files=Files(),
        logs=Logs(),
        relay=None,
    )
    factory = CapsuleFactory(cluster, "h1")
    overlay = Overlay(7, "10.99.7.0/24")
    monkeypatch.setattr(CapsuleFactory, "raise_overlay", lambda *_: overlay)
    monkeypatch.setattr(network, "plug_in", lambda *_: None)
    monkeypatch.setattr(network, "unplug", lambda _, netns, __: unplugged.append(netns))
    monkeypatch.setattr(sandboxes, "build_empty", lambda *_: None)
    monkeypatch.setattr(network if step == "plug_in" else sandboxes, step, refuse)
    survey = SimpleNamespace(ids=(1, 2))
    book = Book("gpt", 7, "10.99.7.0/24", {})
    reserve: Any = SimpleNamespace(migration="m1", spec=SPEC, book=book, survey=survey)
    with pytest.raises(OSError, match="No space left"):
        factory.build_sandbox(reserve)
    assert len(unplugged) == 1
    assert not [*(tmp_path / "state" / "capsules").glob("*")]
