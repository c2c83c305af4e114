# SPDX-License-Identifier: Apache-2.0
"""A host's gatekeeper on pages of the real gate: what closes is opened again, whatever happens."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from descriptors import no_descriptor_left
from gate_pages import WORLD, Process
from simulated_gate import GO, PARK, build

from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed
from liveshift.interposer import layout
from liveshift.interposer.layout import WantedState
from liveshift.interposer.orders import OrderedPage, open_ordered
from liveshift.interposer.page import PageError
from liveshift.runtime import messages
from liveshift.runtime.agent import gate_handlers
from liveshift.runtime.agent.closed_gates import ClosedGates
from liveshift.runtime.agent.gate_handlers import GateHandlers
from liveshift.runtime.agent.host.rank_pages import lives, unknown
from liveshift.runtime.quiesce import services
from liveshift.runtime.quiesce.host_gate import HostGate

ARM = messages.Arm("gpt", 1, 60.0, 0.2)
OPEN = messages.OpenGate("gpt")


@pytest.fixture(scope="module")
def lib() -> Any:
    return build()


class Host:
    """One capsule whose processes' pages are in ``folder``; ``pids`` of the processes by name."""

    def __init__(self, lib: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lib, self.folder = lib, folder
        self.pids: dict[str, int] = {}
        self.silent = 0.0
        self.made: list[Process] = []
        self.told: list[str] = []  # to the outgoing migrations
        self.before_each: Callable[[], None] = lambda: None
        monkeypatch.setattr(gate_handlers, "ordered_pages", self.ordered_pages)
        self.cuda = False
        monkeypatch.setattr(gate_handlers, "has_cuda", lambda _resident: self.cuda)
        alive = SimpleNamespace(alive=lambda: True)
        resident = SimpleNamespace(spec=SimpleNamespace(job="gpt"), sandbox=alive)
        capsule_table = SimpleNamespace(
            host="h0",
            capsules={"gpt/0": resident},
            cluster=SimpleNamespace(timeouts=SimpleNamespace(suspicion=1.0)),
        )
        self.keeper = GateHandlers(capsule_table, self, lambda: self.silent)  # type: ignore[arg-type]

    def gates_close(self, job: str) -> None:
        self.told.append(f"{job} closes")

    def gates_open(self, job: str) -> None:
        self.told.append(f"{job} opens")

    def start(self, rank: int = 0, pid: int = 0) -> Process:
        process = Process(self.lib, self.folder, rank)
        self.made.append(process)
        self.pids[process.path.name] = pid or os.getpid()
        return process

    def ordered_pages(
        self, _resident: object, known: Container[tuple[int, int]], on_error: Any
    ) -> Iterator[tuple[OrderedPage, int]]:
        directory = os.open(self.folder, os.O_RDONLY)
        try:
            for name, pid in list(self.pids.items()):
                self.before_each()
                seen = os.stat(self.folder / name)
                if not lives(pid) or (seen.st_dev, seen.st_ino) in known:
                    continue
                try:
                    page = open_ordered(self.folder / name, directory)
                except PageError as error:
                    on_error(self.folder / name, error)
                    continue
                yield page, pid
        finally:
            os.close(directory)

    def closed(self) -> ClosedGates:
        return self.keeper._closed["gpt"]

    def want(self, process: Process) -> WantedState:
        page = process.ordered()
        order = page.order()
        page.close()
        return WantedState(order["want"])

    def play(self, *asks: Callable[[], Awaitable[Any]]) -> list[Any]:
        async def each() -> list[Any]:
            return [await ask() for ask in asks]

        return asyncio.run(each())


@pytest.fixture
def host(lib: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(lib, tmp_path, monkeypatch)
    with no_descriptor_left():
        yield made
        asyncio.run(made.keeper._release("gpt"))
    for process in made.made:
        lib.sim_process_end(process.gate)


def aim(version: int, **targets: int) -> messages.SetTargets:
    return messages.SetTargets("gpt", 1, version, {WORLD: targets.get("world", 0)}, 0.05)


def test_from_arming_to_opening(host: Host) -> None:
    one = host.start()
    keeper = host.keeper
    armed, aimed, shut = host.play(
        lambda: keeper.arm(ARM),
        lambda: keeper.aim(aim(1)),
        lambda: keeper.shut(messages.Shut("gpt", 1)),
    )
    assert (armed.ranks, armed.obstacles, armed.numbers) == (1, [], {WORLD: 0})
    assert aimed.reached
    assert shut.reached
    assert host.told == ["gpt closes"]
    host.play(lambda: keeper.open(OPEN))
    assert host.want(one) is WantedState.OPEN
    assert host.told == ["gpt closes", "gpt opens"]


def test_what_came_late_and_together_is_done_in_its_order(host: Host) -> None:
    """An Arm that its orchestrator has given up is followed by an OpenGate at once."""
    one = host.start()
    host.before_each = lambda: time.sleep(0.02)

    async def together() -> list[Any]:
        asks = (ARM, OPEN, messages.Arm("gpt", 2, 60.0, 0.2), OPEN)
        serve: dict[type[messages.Message], Any] = {
            messages.Arm: host.keeper.arm,
            messages.OpenGate: host.keeper.open,
        }
        return await asyncio.gather(
            *(serve[type(ask)](ask) for ask in asks), return_exceptions=True
        )

    host.play(together)
    assert host.want(one) is WantedState.OPEN
    assert not host.keeper._closed


@pytest.mark.parametrize("cuda", [False, True])
def test_a_page_that_cannot_be_read_is_a_rank_without_a_boundary(host: Host, cuda: bool) -> None:
    """With CUDA it may use NCCL, so that it is not frozen in place either."""
    host.cuda = cuda
    host.start(0)
    other = host.start(1)
    with open(other.path, "r+b") as page:
        page.seek(layout.IDENTITY.offsets["layout"])
        page.write((99).to_bytes(4, "little"))
    (armed,) = host.play(lambda: host.keeper.arm(ARM))
    (obstacle,) = armed.obstacles
    assert "layout 99" in obstacle
    assert (unknown() in armed.members) == cuda
    assert unknown().library == "nccl"


def test_a_host_whose_ranks_have_no_page_yet_keeps_its_attempt(host: Host) -> None:
    async def later() -> messages.TargetsSet:
        await host.keeper._keep_one("gpt", host.closed())
        return await host.keeper.aim(aim(1))

    armed, aimed = host.play(lambda: host.keeper.arm(ARM), later)
    assert (armed.ranks, aimed.reached) == (0, True)


def test_a_process_that_has_begun_meanwhile_is_asked_before_it_is_a_boundary(host: Host) -> None:
    host.start(0)
    keeper, shut = host.keeper, messages.Shut("gpt", 1)

    async def begins() -> int:
        new = host.start(1)
        assert new.begin() == GO
        return 0

    _, aimed, _, seen = host.play(
        lambda: keeper.arm(ARM), lambda: keeper.aim(aim(1)), begins, lambda: keeper.shut(shut)
    )
    assert aimed.reached
    assert (seen.reached, seen.raised) == (False, {WORLD: 1})
    assert host.made[1].begin() == PARK


def test_a_program_that_was_execed_in_a_process_takes_its_place(host: Host) -> None:
    before = host.start(0)
    before.begin()

    async def another() -> messages.TargetsSet:
        new = Process(host.lib, host.folder, 0)  # the same name, by rename
        host.made.append(new)
        await host.keeper._keep_one("gpt", host.closed())
        await host.keeper.aim(aim(1, world=1))
        assert new.begin() == GO
        new.end()
        return await host.keeper.aim(aim(2, world=1))

    _, aimed = host.play(lambda: host.keeper.arm(ARM), another)
    assert aimed.reached


def test_nothing_is_taken_down_where_the_gate_is_open(host: Host) -> None:
    one = host.start()
    with pytest.raises(StepFailed, match="rank 0"):
        host.play(lambda: host.keeper.tear_down(messages.TearDown("gpt", 1)))
    assert host.want(one) is WantedState.OPEN


def test_where_communicators_are_down_nothing_is_armed(host: Host) -> None:
    one = host.start()
    page = one.ordered()
    at = layout.ANSWER_AT + layout.ANSWER.offsets["down"]
    os.pwrite(page.fd, (1).to_bytes(4, "little"), at)
    page.close()
    with pytest.raises(Refused, match="are down on h0"):
        host.play(lambda: host.keeper.arm(ARM))
    assert host.want(one) is WantedState.OPEN


def test_the_job_goes_on_when_the_orchestrator_has_fallen_silent(host: Host) -> None:
    one = host.start()
    host.silent = 2.1
    host.play(lambda: host.keeper.arm(ARM), lambda: host.keeper._keep_one("gpt", host.closed()))
    assert host.want(one) is WantedState.OPEN
    with pytest.raises(NotFound):
        host.play(lambda: host.keeper.aim(aim(1)))


def test_a_job_that_waits_for_its_teardown_keeps_no_sign_from_another(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_handlers, "HEARTBEAT_S", 0.01)
    keeper, one = host.keeper, host.start()
    (tmp_path / "other").mkdir()
    page = Process(host.lib, tmp_path / "other", 1).ordered()
    gate = HostGate(1, 1000, 1000)
    gate.admit(page)
    other = ClosedGates(1, gate, {page: os.getpid()}, time.monotonic() + 60, {})

    async def signs(count: int) -> None:
        until = page.order()["heartbeat"] + count
        async with asyncio.timeout(20):
            while page.order()["heartbeat"] < until:
                await asyncio.sleep(0.01)

    async def both() -> None:
        keeper._closed["other"] = other
        async with keeper._turns["gpt"]:  # as its teardown
            host.closed().until = 0.0
            keeping = asyncio.ensure_future(keeper.keep())
            await signs(5)
            assert host.want(one) is WantedState.ARMED
        async with asyncio.timeout(20):
            while host.want(one) is not WantedState.OPEN:
                await asyncio.sleep(0.01)
        await signs(2)
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        await keeper._release("other")

    host.play(lambda: keeper.arm(ARM), both)


def test_signs_of_life_need_no_thread_that_images_have_taken(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image that is saved, loaded or compared takes a thread of the agent for seconds."""
    monkeypatch.setattr(gate_handlers, "HEARTBEAT_S", 0.01)
    page, saved = host.start().ordered(), threading.Event()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        await host.keeper.arm(ARM)
        saving = [asyncio.ensure_future(asyncio.to_thread(saved.wait, 20)) for _ in range(3)]
        keeping = asyncio.ensure_future(host.keeper.keep())
        enough = page.order()["heartbeat"] + 5
        try:
            async with asyncio.timeout(5):
                while page.order()["heartbeat"] < enough:
                    await asyncio.sleep(0.01)
        finally:
            saved.set()
            keeping.cancel()
            await asyncio.gather(*saving, keeping, return_exceptions=True)

    asyncio.run(story())
    page.close()


def test_more_processes_than_there_is_room_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_handlers, "MOST_PAGES", 2)
    made = [host.start(rank) for rank in range(4)]
    armed, _ = host.play(lambda: host.keeper.arm(ARM), lambda: host.keeper.open(OPEN))
    assert any("more than 2 processes" in words for words in armed.obstacles)
    assert [host.want(process) for process in made] == [WantedState.OPEN] * 4


def test_a_process_that_ends_is_no_rank_any_more(host: Host) -> None:
    """Also while its parent has not asked for its end."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        host.start(0)
        gone = host.start(1, child.pid)
        assert gone.begin() == GO

        async def ends() -> messages.TargetsSet:
            assert child.stdin is not None
            child.stdin.close()
            while lives(child.pid):
                await asyncio.sleep(0.01)
            return await host.keeper.shut(messages.Shut("gpt", 1))

        _, _, shut = host.play(lambda: host.keeper.arm(ARM), lambda: host.keeper.aim(aim(1)), ends)
        assert Path(f"/proc/{child.pid}").exists()
        assert shut.reached


def test_a_page_that_was_closed_is_an_error_of_that_page(host: Host) -> None:
    page = host.start().ordered()
    page.close()
    page.close()
    with open(host.folder / "another", "w+b") as another:  # takes the descriptor's number
        with pytest.raises(PageError):
            page.heartbeat()
        with pytest.raises(PageError):
            page.give(WantedState.CLOSED, 1, 1)
        assert another.read() == b""


def test_streams_that_are_not_idle_are_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.start()
    keeper = host.keeper

    async def draining() -> messages.Behind:
        shut = asyncio.ensure_future(keeper.shut(messages.Shut("gpt", 1)))
        while host.want(host.made[0]) is not WantedState.CLOSED:
            await asyncio.sleep(0.001)
        behind = await keeper.list_behind(messages.ListBehind("gpt", 1))
        await keeper.open(OPEN)  # does not wait for the streams
        with pytest.raises(LiveshiftError):
            await shut
        return behind

    monkeypatch.setattr(services, "LATE_S", 60.0)
    *_, behind = host.play(lambda: keeper.arm(ARM), lambda: keeper.aim(aim(1)), draining)
    assert behind.lines == ["rank 0 drains its streams"]


def test_nccl_without_a_communicator_that_is_known_is_not_taken_for_tcp(host: Host) -> None:
    page = host.start().ordered()
    library = layout.COMMUNICATORS_AT + layout.COMMUNICATOR.offsets["library"]
    os.pwrite(page.fd, int(layout.Library.GLOO).to_bytes(4, "little"), library)
    kind = next(n for n, name in enumerate(page.kinds) if name.startswith("nccl."))
    counted = layout.COUNTERS_AT + kind * layout.COUNTER.size + layout.COUNTER.offsets["started"]
    assert not page.nccl_unseen()
    os.pwrite(page.fd, (3).to_bytes(8, "little"), counted)
    page.close()
    (armed,) = host.play(lambda: host.keeper.arm(ARM))
    assert {member.library for member in armed.members} == {"gloo", "nccl"}
    assert "NCCL is used on communicators" in armed.obstacles[0]


def test_a_page_does_not_make_its_agent_wait_for_long(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit stands in the page: whoever owns it may write another one there."""
    page = host.start().ordered()

    async def hostile() -> messages.TargetsSet:
        limit = layout.ORDER_AT + layout.ORDER.offsets["limit_ms"]
        os.pwrite(page.fd, b"\xff\xff\xff\xff", limit)
        return await host.keeper.shut(messages.Shut("gpt", 1))

    monkeypatch.setattr(services, "LONGEST_STANDSTILL_S", 0.1)
    monkeypatch.setattr(services, "LATE_S", 0.0)
    keeper = host.keeper
    *_, shut = host.play(lambda: keeper.arm(ARM), lambda: keeper.aim(aim(1)), hostile)
    assert shut.obstacles == ["rank 0: its service thread does not answer"]
    page.close()


@pytest.mark.parametrize(
    ("number", "words"), [(110, "Connection timed out"), (0xFFFFFFFF, "error 4294967295")]
)
def test_a_result_of_the_jobs_choice_is_an_obstacle_in_words(
    host: Host, number: int, words: str
) -> None:
    page = host.start().ordered()

    async def hostile() -> messages.TargetsSet:
        order = page.order()
        answers = {
            "done_attempt": 1,
            "done_version": order["version"],
            "done_want": WantedState.CLOSED,
            "done_result": number,
        }
        for name, value in answers.items():
            at = layout.ANSWER_AT + layout.ANSWER.offsets[name]
            os.pwrite(page.fd, int(value).to_bytes(4, "little"), at)
        return await host.keeper.shut(messages.Shut("gpt", 1))

    keeper = host.keeper
    *_, shut = host.play(lambda: keeper.arm(ARM), lambda: keeper.aim(aim(1)), hostile)
    assert shut.obstacles == [f"rank 0: {words}"]
    page.close()
