# SPDX-License-Identifier: Apache-2.0
"""GPUs for capsules that come: no two of them get the same one, however close they come."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest
from gpu_scenes import GIB, gpu, gpu_host, gpu_survey, process, survey
from preflight_scene import HERE

from liveshift.errors import Refused
from liveshift.runtime.agent.gpu import reservations as gpu_reservations
from liveshift.runtime.agent.gpu.reservations import GpuReservations
from liveshift.runtime.agent.gpu.watch import GpuWatch
from liveshift.runtime.messages import Book, CapsuleSpec, GpuHost, Reserve

SOURCE = gpu_host("a")
USED = gpu_survey(process({SOURCE.gpus[0].uuid: GIB}, GIB))


class Watch:
    """A host with two GPUs; ``busy`` so many looks long with a process that has just ended."""

    why_none = ""

    def __init__(self, busy: int = 0) -> None:
        self.busy = busy

    def helper(self) -> object:
        return self

    def host(self, taken: Mapping[str, str]) -> GpuHost:
        self.busy -= 1
        gone = {g.uuid: "is used by process 9" for g in gpu_host("b", 2).gpus if self.busy >= 0}
        return msgspec.structs.replace(gpu_host("b", 2), taken={**gone, **taken})


def reservations(watch: Watch | None = None) -> GpuReservations:
    def taken() -> dict[str, str]:
        return dict(made.chosen)

    made = GpuReservations("b", cast(GpuWatch, watch or Watch()), taken)
    return made


def ask(number: int, **fields: Any) -> Reserve:
    spec = CapsuleSpec(f"gpt/{number}", "gpt", number, [], {}, "/", 0, 0, [], "")
    book = Book("gpt", 1, "10.99.1.0/24", {})
    given = Reserve(f"m{number}", spec, survey(), HERE, "h0", 2, book, 1, False, USED)
    return msgspec.structs.replace(given, **fields)


def test_two_at_a_time_get_two_and_a_third_is_told_who_has_them() -> None:
    async def scene() -> None:
        made = reservations()
        async with made.making(ask(1)) as one:
            async with made.making(ask(2)) as two, made.making(ask(3)) as three:
                [(refused, _)] = three.findings
            assert {one.pairs[0][1], two.pairs[0][1]} == {gpu.uuid for gpu in gpu_host("b", 2).gpus}
            assert "is promised to gpt/1 (m1)" in refused
            assert "is promised to gpt/2 (m2)" in refused
        assert made.chosen == {}

    asyncio.run(scene())


def test_those_that_begin_together() -> None:
    async def scene() -> None:
        made, both = reservations(), asyncio.Barrier(2)

        async def one(number: int) -> str:
            async with made.making(ask(number)) as plan:
                await both.wait()
                return plan.pairs[0][1]

        assert len(set(await asyncio.gather(one(1), one(2)))) == 2

    asyncio.run(scene())


def test_a_plan_promises_nothing() -> None:
    async def scene() -> None:
        made = reservations()
        async with made.making(ask(1, dry_run=True)) as plan:
            assert plan.pairs
            assert made.chosen == {}
        async with made.making(ask(1, gpu=None)) as plan:
            assert (plan.pairs, plan.findings) == ([], [])

    asyncio.run(scene())


def test_what_fails_gives_its_gpus_back() -> None:
    async def scene() -> None:
        made = reservations()
        with pytest.raises(Refused):
            async with made.making(ask(1)):
                raise Refused("no room")
        assert made.chosen == {}

    asyncio.run(scene())


def test_a_rewind_waits_until_the_driver_has_released_what_ended() -> None:
    """A move does not: a GPU that is in use stays so."""

    async def scene() -> None:
        watch = Watch(busy=2)
        async with reservations(watch).making(ask(1, migration="r4.1")) as plan:
            assert (plan.findings, watch.busy) == ([], -1)
            assert plan.pairs
            assert (plan.plain, plan.host_memory) == (gpu_reservations.IN_IMAGE, GIB)
        async with reservations(Watch(busy=1)).making(ask(1)) as plan:
            [(refused, _)] = plan.findings
            assert "is used by process 9" in refused

    asyncio.run(scene())


def test_a_rewind_waits_for_room_on_the_gpu_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets that one whatever is on it, and the restore looks again."""
    full = {"free_bytes": GIB // 2}
    looks: list[GpuHost] = []

    class Filled(Watch):
        def host(self, taken: Mapping[str, str]) -> GpuHost:
            looks.append(gpu_host("a", gpus=[gpu("a", **(full if len(looks) < 3 else {}))]))
            return looks[-1]

    async def scene() -> None:
        async with reservations(Filled()).making(ask(1, migration="r4.1")) as plan:
            assert plan.pairs == [(SOURCE.gpus[0].uuid, SOURCE.gpus[0].uuid)]
        assert len(looks) == 4
        looks.clear()
        full["free_bytes"] = 0
        monkeypatch.setattr(gpu_reservations, "RELEASED_S", 0.0)
        async with reservations(Filled()).making(ask(1, migration="r4.1")) as plan:
            assert plan.pairs
        assert len(looks) == 1

    asyncio.run(scene())
