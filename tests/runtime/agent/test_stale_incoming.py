# SPDX-License-Identifier: Apache-2.0
"""What an earlier migration has left of a capsule does not stand in the way of the next one.

The rulings are applied for real; capsules, sandbox and orchestrator are stand-ins.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from liveshift.errors import Refused
from liveshift.runtime import messages
from liveshift.runtime.agent.destination_handlers import DestinationHandlers
from liveshift.runtime.agent.host.measures import Measures
from liveshift.runtime.agent.migration_registry import MigrationRegistry
from liveshift.runtime.agent.rulings import Rulings
from liveshift.runtime.model.ownership import Ruling

T = TypeVar("T")
PATIENCE_S = 0.4


class GotOn(Exception):
    """Raised in place of the reservation's next step."""


class Scene(MigrationRegistry):
    """Of gpt/0, m16 has left something on h1; stands in for its capsule table, too."""

    host = "h1"

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._busy, self._undecided = set(), set()
        self._capsule_table = cast(Any, self)
        self.ruling = Ruling.END
        self.may_go = threading.Event()
        self.may_go.set()
        self.discarded = 0
        overlay = SimpleNamespace(rewinds=0)
        resident = SimpleNamespace(spec=SimpleNamespace(name="gpt/0"), epoch=15, overlay=overlay)
        left = SimpleNamespace(migration="m16", resident=resident, discard=self.discard)
        left.inbox = SimpleNamespace(close=lambda: None)
        self.incoming = {"m16": cast(Any, left)}
        self.outgoing = {}
        self.receiver = cast(Any, SimpleNamespace(forget=lambda migration: None))
        self.reservations = cast(Any, SimpleNamespace(making=self.making))
        timeouts = SimpleNamespace(prepare=2 * patience_s)
        self.cluster = SimpleNamespace(timeouts=timeouts, host=lambda name: None)
        self.network = asyncio.Lock()
        self.rulings = Rulings(cast(Any, self), self, self.claimed)
        measures = Measures(cast(Any, self))
        copies: Any = SimpleNamespace(own_bytes=lambda _="": 0, make_room=lambda *_: None)
        self.destination = DestinationHandlers(
            cast(Any, self), self, self.rulings, self.claimed, measures, copies, cast(Any, None)
        )

    def discard(self) -> None:
        assert self.may_go.wait(5)
        self.discarded += 1

    def making(self, ask: messages.Reserve) -> Any:
        raise GotOn

    async def claimed(self, claim: messages.Claim) -> messages.Ruled:
        assert (claim.migration, claim.capsule, claim.side) == ("m16", "gpt/0", "coming")
        return messages.Ruled(self.ruling.value, 15)

    async def blocking(self, capsule: str, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    async def reserve(self, *, dry_run: bool = False) -> None:
        spec = SimpleNamespace(name="gpt/0")
        await self.destination.reserve(
            cast(Any, SimpleNamespace(spec=spec, migration="m17", dry_run=dry_run))
        )


def test_what_is_over_is_taken_away() -> None:
    scene = Scene()
    with pytest.raises(GotOn):
        asyncio.run(scene.reserve())
    assert (scene.discarded, scene.incoming) == (1, {})


def test_what_is_just_being_taken_away_is_waited_for() -> None:
    scene = Scene(patience_s=60.0)
    scene.may_go.clear()

    async def both() -> None:
        first = asyncio.create_task(scene.rulings.claim("m16"))
        await asyncio.sleep(0)
        asked = asyncio.create_task(scene.reserve())
        await asyncio.sleep(PATIENCE_S / 4)
        assert (scene.discarded, asked.done()) == (0, False)
        scene.may_go.set()
        assert await first == "ended"
        await asked

    with pytest.raises(GotOn):
        asyncio.run(both())
    assert (scene.discarded, scene.incoming) == (1, {})


def test_what_is_not_over_is_kept() -> None:
    scene = Scene()
    scene.ruling = Ruling.WAIT
    with pytest.raises(Refused, match="gpt/0 is arriving on h1 already, by m16"):
        asyncio.run(scene.reserve())
    assert (scene.discarded, list(scene.incoming)) == (0, ["m16"])


def test_what_is_being_worked_on_is_not_waited_for_without_end() -> None:
    scene = Scene()

    async def asked() -> None:
        with scene.working("m16"):
            await scene.reserve()

    with pytest.raises(Refused, match="gpt/0 is arriving on h1 already, by m16"):
        asyncio.run(asked())
    assert (scene.discarded, list(scene.incoming)) == (0, ["m16"])


def test_a_dry_run_takes_nothing_away() -> None:
    scene = Scene()
    with pytest.raises(GotOn):
        asyncio.run(scene.reserve(dry_run=True))
    assert (scene.discarded, list(scene.incoming)) == (0, ["m16"])
