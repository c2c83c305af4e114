# SPDX-License-Identifier: Apache-2.0
"""Gates that have come to a host closed, with a capsule: its agent keeps them closed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Container, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from descriptors import no_descriptor_left
from gate_pages import Process
from simulated_gate import build

from liveshift.interposer import layout
from liveshift.interposer.layout import WantedState
from liveshift.interposer.orders import OrderedPage, open_ordered
from liveshift.runtime import messages
from liveshift.runtime.agent import gate_handlers
from liveshift.runtime.agent.gate_handlers import GateHandlers

LEASE_MS = 10_000
ELSEWHERE = 41
"""The attempt in which the gates were closed on another host."""


@pytest.fixture(scope="module")
def lib() -> Any:
    return build()


class Host:
    """A host with one job; ``come`` lets a capsule with one process come there."""

    def __init__(self, lib: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lib, self._folder = lib, folder
        self.made: list[Process] = []
        self.silent = 0.0
        monkeypatch.setattr(gate_handlers, "ordered_pages", self._ordered_pages)
        resident = SimpleNamespace(
            spec=SimpleNamespace(job="gpt"), sandbox=SimpleNamespace(alive=lambda: True)
        )
        table: Any = SimpleNamespace(
            host="h2",
            capsules={"gpt/0": resident},
            cluster=SimpleNamespace(timeouts=SimpleNamespace(suspicion=1.0)),
        )
        registry: Any = SimpleNamespace(gates_close=lambda _: None, gates_open=lambda _: None)
        self.gates = GateHandlers(table, registry, lambda: self.silent)

    def come(self, *, closed: bool = True, down: bool = False) -> Process:
        process = Process(self._lib, self._folder, len(self.made))
        page = process.ordered()
        if closed:
            page.arm(ELSEWHERE, LEASE_MS, 1000)
            page.give(WantedState.CLOSED, ELSEWHERE, 1)
        if down:
            at = layout.ANSWER_AT + layout.ANSWER.offsets["down"]
            os.pwrite(page.fd, (1).to_bytes(4, "little"), at)
        page.close()
        self.made.append(process)
        return process

    def order(self, process: Process) -> dict[str, Any]:
        page = process.ordered()
        try:
            return page.order()
        finally:
            page.close()

    async def keep(self) -> None:
        """One round of signs of life."""
        for job, closed in list(self.gates._closed.items()):
            await self.gates._keep_one(job, closed)

    def _ordered_pages(
        self, _resident: object, known: Container[tuple[int, int]], _on_error: Any
    ) -> Iterator[tuple[OrderedPage, int]]:
        directory = os.open(self._folder, os.O_RDONLY)
        try:
            for process in self.made:
                seen = process.path.stat()
                if (seen.st_dev, seen.st_ino) not in known:
                    yield open_ordered(process.path, directory), os.getpid()
        finally:
            os.close(directory)


@pytest.fixture
def host(lib: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(lib, tmp_path, monkeypatch)
    with no_descriptor_left():
        yield made
        asyncio.run(made.gates._release("gpt"))
    for process in made.made:
        lib.sim_process_end(process.gate)


def test_gates_that_have_come_closed_stay_so_until_they_are_opened(host: Host) -> None:
    """Another move of the job holds the boundary, so the orchestrator opens no gate yet."""

    async def story() -> None:
        first = host.come()
        before = host.order(first)
        await host.gates.arrive("gpt", 60.0)
        second = host.come()  # a later move, to the same host
        await host.gates.arrive("gpt", 60.0)
        for _ in range(2):
            await host.keep()
        for process in (first, second):
            order = host.order(process)
            assert order["heartbeat"] == before["heartbeat"] + 2
            assert {**order, "heartbeat": before["heartbeat"]} == before, "the order is as it was"
        await host.gates.open(messages.OpenGate("gpt"))
        assert [host.order(p)["want"] for p in host.made] == [WantedState.OPEN] * 2
        assert not host.gates._closed

    asyncio.run(story())


@pytest.mark.parametrize(("hold", "silent"), [(0.0, 0.0), (60.0, 2.1)])
def test_they_open_where_no_order_comes(host: Host, hold: float, silent: float) -> None:
    async def story() -> None:
        process = host.come()
        await host.gates.arrive("gpt", hold)
        host.silent = silent
        await asyncio.sleep(0.001)
        await host.keep()
        assert host.order(process)["want"] == WantedState.OPEN

    asyncio.run(story())


@pytest.mark.parametrize("state", [{"closed": False}, {"down": True}])
def test_gates_that_do_not_open_by_themselves_need_no_sign(
    host: Host, state: dict[str, bool]
) -> None:
    """The orchestrator has opened one already. Communicators of another are down; it is about to be
    given the order to rebuild them, and only one may write orders."""
    process = host.come(**state)
    before = host.order(process)
    asyncio.run(host.gates.arrive("gpt", 60.0))
    assert not host.gates._closed
    assert host.order(process) == before


def test_they_join_gates_of_their_job_that_are_closed_here(host: Host) -> None:
    async def story() -> None:
        host.come(closed=False)
        await host.gates.arm(messages.Arm("gpt", ELSEWHERE, 60.0, 1.0))
        until = host.gates._closed["gpt"].until
        arrived = host.come()
        before = host.order(arrived)["heartbeat"]
        await host.gates.arrive("gpt", 900.0)
        await host.keep()
        assert host.order(arrived)["heartbeat"] > before
        assert host.order(arrived)["want"] != WantedState.OPEN
        assert host.gates._closed["gpt"].until == until < time.monotonic() + 61

    asyncio.run(story())


def test_a_new_attempt_takes_their_place(host: Host) -> None:
    async def story() -> None:
        process = host.come()
        await host.gates.arrive("gpt", 60.0)
        armed = await host.gates.arm(messages.Arm("gpt", ELSEWHERE + 1, 60.0, 0.2))
        assert (armed.ranks, armed.obstacles) == (1, [])
        order = host.order(process)
        assert (order["attempt"], order["want"]) == (ELSEWHERE + 1, WantedState.ARMED)

    asyncio.run(story())


def test_gates_go_on_with_the_capsule(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capsule leaves again within the boundary: its processes end here."""

    async def story() -> None:
        host.come()
        await host.gates.arrive("gpt", 60.0)
        monkeypatch.setattr(gate_handlers, "lives", lambda _pid: False)
        await host.keep()
        assert not host.gates._closed

    asyncio.run(story())
