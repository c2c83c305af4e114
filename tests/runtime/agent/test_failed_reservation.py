# SPDX-License-Identifier: Apache-2.0
"""A reservation that fails half way leaves no sandbox: no ruling would ever remove it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from liveshift.criu_glue.capsule import sandboxes
from liveshift.criu_glue.network import network
from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import Unreachable
from liveshift.runtime.agent import preflight
from liveshift.runtime.agent.destination_handlers import DestinationHandlers
from liveshift.runtime.agent.host import host_facts
from liveshift.runtime.agent.host.running_capsule import CapsuleFactory
from liveshift.runtime.config.cluster import Files, Logs, Paths
from liveshift.runtime.messages import Book, CapsuleSpec, HostFacts

SPEC = CapsuleSpec("gpt/1", "gpt", 1, ["train"], {}, "/", 1000, 1000, [], "")
FACTS = HostFacts("6.1", "x86_64", "cpu", [], "4.2.1", "0.1")


def test_sandbox_and_image_go_where_the_gpu_helper_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    images = tmp_path / "m1"
    images.mkdir()
    (images / "note").write_bytes(b"half of it")
    resident = SimpleNamespace(remove=lambda: removed.append("gpt/1"))

    @asynccontextmanager
    async def making(_: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(pairs=[], plain="")

    def no_helper(*_: object) -> None:
        raise Unreachable("the GPU helper does not answer")

    async def nothing(*_: object) -> None:
        return None

    async def blocking(_: str, work: Any) -> Any:
        return work()

    paths = SimpleNamespace(state=Path("/"), run=Path("/"))
    table = SimpleNamespace(
        host="h1",
        cluster=SimpleNamespace(host=lambda _: SimpleNamespace(memory=0), paths=paths),
        capsules={},
        network=asyncio.Lock(),
        refuse_older=lambda _: None,
        make_way=nothing,
        blocking=blocking,
        factory=SimpleNamespace(build_sandbox=lambda _: resident, images=tmp_path.joinpath),
    )
    registry = SimpleNamespace(
        reservations=SimpleNamespace(making=making),
        facts=FACTS,
        criu=None,
        devices=SimpleNamespace(tree=no_helper),
        incoming={},
    )
    monkeypatch.setattr(preflight, "check", lambda *_, **__: [])
    monkeypatch.setattr(host_facts, "memory_offered", lambda *_: 0)
    copies = SimpleNamespace(own_bytes=lambda _="": 0, make_room=lambda *_: None)
    parts: list[Any] = [table, registry, None, None, None, copies, None]
    handlers = DestinationHandlers(*parts)
    monkeypatch.setattr(handlers, "_take_away_stale", nothing)
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
    with pytest.raises(Unreachable, match="does not answer"):
        asyncio.run(handlers.reserve(cast(Any, request)))
    assert (removed, registry.incoming) == (["gpt/1"], {})
    assert not images.exists()


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
