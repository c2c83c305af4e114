# SPDX-License-Identifier: Apache-2.0
"""Programs on the simulated NCCL under the interposer, and a coordinator of the plainest kind.

The coordinator gives the orders that page.h describes, by the pages alone: what the runtime does
over hosts, in one function that waits. It knows nothing of how the interposer is made.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import sanitizers
from doubles.gpu.build import INCLUDE, build, kept, program
from doubles.gpu.build_nccl import DEFAULT, build_nccl
from sanitizers import BUILT

from liveshift.interposer import library, page
from liveshift.interposer.layout import CommunicatorState, Library, WantedState
from liveshift.interposer.orders import OrderedPage, open_ordered

SOURCES = Path(__file__).resolve().parent / "nccl_adapter"

TWO_DEVICES = ",".join(
    f"GPU-{n * 8}-{n * 4}-{n * 4}-{n * 4}-{n * 12}:H200:1GiB" for n in ("1", "2")
)


class Abandoned(Exception):
    """An attempt that didn't come to its end; the gates are open again."""


class Refused(Exception):
    """A process says that something can't be torn down; nothing was."""


@pytest.fixture(scope="session")
def world() -> World:
    """The simulated CUDA, and NCCL 2.29.7."""
    return World(flags=sanitizers.chosen())


@pytest.fixture(scope="session")
def world_2_32() -> World:
    return World(23203, sanitizers.chosen())


class World:
    """The libraries, and programs compiled for them."""

    def __init__(self, version: int = DEFAULT, flags: Sequence[str] = ()) -> None:
        """With flags, such as a sanitizer's, the interposer is built with them as well, and linked
        instead of preloaded: the sanitizer's own library has to come first."""
        self.flags = list(flags)
        self.libcuda = build(BUILT, flags).libcuda
        self.libcudart = self.libcuda.parent / "libcudart.so.13"
        self.libnccl = build_nccl(BUILT, version, flags)
        self.linked = sanitizers.interposer(flags) if flags else None

    def program(self, name: str) -> Path:
        libraries = [self.libnccl, self.libcudart, self.libcuda]
        flags = self.flags
        if self.linked is not None:
            flags = [*flags, *sanitizers.first(self.linked)]
        sources = [*SOURCES.glob("*.[ch]"), *INCLUDE.glob("*.h")]

        def make(part: Path) -> None:
            program(SOURCES / f"{name}.c", part / name, libraries, flags)

        return kept(BUILT, name, sources, (*libraries, *flags), make) / name

    @contextmanager
    def ranks(
        self,
        name: str,
        count: int,
        folder: Path,
        *arguments: str,
        preload: bool = True,
        **extra: str,
    ) -> Iterator[Ranks]:
        """`count` processes of a program that go on while the context lasts."""
        (folder / "pages").mkdir(parents=True)
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("NCCL_", "SIMCUDA_", "LIVESHIFT_"))
        }
        environment |= {
            "LD_LIBRARY_PATH": f"{self.libcuda.parent}:{self.libnccl.parent}",
            "LIVESHIFT_PAGES": str(folder / "pages"),
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_RAS_ENABLE": "0",
            "WORLD_SIZE": str(count),
        } | sanitizers.OPTIONS
        if preload and self.linked is None:
            environment["LD_PRELOAD"] = str(library.library_path())
        with ExitStack() as stack:
            processes = []
            for rank in range(count):
                own = {"NCCL_HOSTID": f"rank{rank}", "RANK": str(rank)}
                out = stack.enter_context(open(folder / f"out{rank}", "wb"))
                process = subprocess.Popen(
                    [self.program(name), folder, str(rank), str(count), *arguments],
                    env=environment | own | extra,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
                processes.append(process)
                stack.callback(_end, process)
            yield Ranks(processes, folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.kill()
    process.wait()


class Ranks:
    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        self.processes = processes
        self.folder = folder
        self.attempt = 0
        self.count = len(processes)
        self.told = [0] * self.count

    def tell(self, command: str, ranks: Iterable[int] | None = None) -> None:
        """Send a command to a commanded rank. Do not wait for the answer."""
        for rank in ranks if ranks is not None else range(len(self.processes)):
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write(command.encode() + b"\n")
            stdin.flush()
            self.told[rank] += 1

    def answers(self, ranks: Iterable[int] | None = None, timeout_s: float = 20.0) -> list[str]:
        """To the last command."""
        found = []
        for rank in ranks if ranks is not None else range(len(self.processes)):

            def answered(rank: int = rank) -> bool:
                return self.answered(rank) >= self.told[rank]

            await_true(answered, timeout_s, self.everything)
            found.append(self._answers(rank)[-1])
        return found

    def answered(self, rank: int) -> int:
        """How many commands it has answered."""
        return len(self._answers(rank))

    def _answers(self, rank: int) -> list[str]:
        values = (line.partition(": ")[2] for line in self.said(rank))
        return [value for value in values if value.lstrip("-").isdigit()]

    def ask(self, command: str, ranks: Iterable[int] | None = None) -> list[str]:
        ranks = list(ranks) if ranks is not None else None
        self.tell(command, ranks)
        return self.answers(ranks)

    def said(self, rank: int) -> list[str]:
        return (self.folder / f"out{rank}").read_text().splitlines()

    def await_line(self, line: str, timeout_s: float = 20.0) -> None:
        """Until every rank has printed it."""
        await_true(
            lambda: all(line in self.said(rank) for rank in range(len(self.processes))),
            timeout_s,
            lambda: f"{line!r} in {self.everything()}",
        )

    def everything(self) -> str:
        return "\n".join(f"{r}: {self.said(r)[-6:]}" for r in range(len(self.processes)))

    @property
    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def finish(self, timeout_s: float = 60.0) -> list[str]:
        """The last line of each, which must have ended well."""
        until = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running: {self.everything()}") from None
        assert [p.returncode for p in self.processes] == [0] * len(self.processes), (
            self.everything()
        )
        return [self.said(rank)[-1] for rank in range(len(self.processes))]

    def page(self, rank: int) -> page.PageFile:
        with page.opened(self.folder / "pages" / str(self.processes[rank].pid)) as file:
            return file

    @contextmanager
    def pages(self) -> Iterator[list[OrderedPage]]:
        directory = os.open(self.folder / "pages", os.O_RDONLY)
        with ExitStack() as stack:
            stack.callback(os.close, directory)
            opened = []
            for process in self.processes:
                path = self.folder / "pages" / str(process.pid)
                opened.append(open_ordered(path, directory))
                stack.callback(opened[-1].close)
            yield opened

    @contextmanager
    def attempts(self, limit_s: float = 10.0, lease_ms: int = 0) -> Iterator[Attempt]:
        """One attempt to quiesce; what it leaves closed is opened, but for what is down."""
        self.attempt += 1
        with self.pages() as pages:
            attempt = Attempt(self, pages, self.attempt, limit_s)
            for each in pages:
                each.arm(self.attempt, lease_ms=lease_ms, limit_ms=int(limit_s * 1000))
            try:
                yield attempt
            finally:
                for each in pages:
                    if not each.answer()["down"] and each.order()["want"] != WantedState.OPEN:
                        each.open()

    def move(self, limit_s: float = 10.0) -> None:
        """The whole way: to a boundary, down, and up again. Raises Abandoned, Refused."""
        with self.attempts(limit_s) as attempt:
            attempt.reach()
            attempt.close()
            attempt.order(WantedState.TEARDOWN)
            attempt.rebuild()

    def move_until_the_end(self, seed: int, limit_s: float = 3.0) -> int:
        """Move at random moments until the program ends; how often it went the whole way."""
        return self.move_while(lambda: self.running, seed, limit_s)

    def move_until_line(self, line: str, seed: int) -> int:
        """The same until a rank has printed the line; the last move may be over a little later."""
        return self.move_while(
            lambda: self.running and all(line not in self.said(r) for r in range(self.count)), seed
        )

    def move_while(self, wanted: Callable[[], bool], seed: int, limit_s: float = 3.0) -> int:
        """Begin moves at random moments while they are wanted; how many went the whole way."""
        chance = random.Random(seed)
        moved = 0
        while wanted():
            time.sleep(chance.random() * 0.06)
            # the end of the program, or a communicator that was being made
            with suppress(Abandoned):
                self.move(limit_s)
                moved += 1
        return moved


def await_true(
    condition: Callable[[], bool], timeout_s: float, what: Callable[[], str], abandon: bool = False
) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise Abandoned(what()) if abandon else AssertionError(f"not in time: {what()}")
        time.sleep(0.001)


class Attempt:
    def __init__(
        self, ranks: Ranks, pages: Sequence[OrderedPage], number: int, limit_s: float
    ) -> None:
        self.ranks = ranks
        self.pages = pages
        self.number = number
        self.limit_s = limit_s
        self.version = 0
        self.targets: dict[int, int] = {}
        self.served = list(pages)

    def reach(self) -> None:
        """Bring all to the least boundary."""
        self._wait(lambda: all(p.answer()["groups"] == 0 for p in self.pages), "groups")
        self._raise_targets()
        self._wait(self._reached, "the boundary")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        def where() -> str:
            if not self.ranks.running:
                return "a rank has ended"
            return f"{what} of {self.state()}"

        def met_or_over() -> bool:
            if not self.ranks.running:
                raise Abandoned("a rank has ended")
            return condition()

        await_true(met_or_over, self.limit_s, where, abandon=True)

    def state(self) -> list[list[tuple[int, ...]]]:
        return [
            [
                (c.id % 1000, c.sender, c.receiver, c.announced, c.returned, c.raised, c.target)
                for c in p.clocks()
                if not c.announced == c.returned == c.target
            ]
            for p in self.pages
        ]

    def _raise_targets(self) -> None:
        known = self.version == 0  # what has begun anywhere counts; later, what was let through
        for each in self.pages:
            for clock in each.clocks():
                number = max(clock.announced if known else 0, clock.raised)
                self.targets[clock.id] = max(self.targets.get(clock.id, 0), number)
        self.version += 1
        for each in self.pages:
            rows = {c.row: self.targets.get(c.id, 0) for c in each.clocks()}
            each.set_targets(rows)
        for each in self.pages:
            each.give(WantedState.TARGET, self.number, self.version)

    def _reached(self) -> bool:
        settled = True
        for each in self.pages:
            each.heartbeat()
            before = each.answer()
            clocks = each.clocks()
            after = each.answer()
            if before["changes"] != after["changes"]:
                return False
            if any(
                c.raised > self.targets.get(c.id, 0) or c.target < self.targets.get(c.id, 0)
                for c in clocks
            ):
                self._raise_targets()
                return False
            settled &= (
                after["groups"] == 0
                and after["untracked"] == 0
                and all(c.returned == c.target and c.raised <= c.target for c in clocks)
            )
        return settled

    def close(self) -> None:
        """Shut, and drained. Raises Refused where something can't be torn down."""
        while True:
            for each in self.pages:
                each.give(WantedState.CLOSED, self.number, self.version)
            if self._reached():
                break
            self._raise_targets()
            self._wait(self._reached, "the boundary")
        self.served = [page for page in self.pages if nccl(page)]
        self.done(WantedState.CLOSED)

    def order(self, want: WantedState, pages: Iterable[OrderedPage] | None = None) -> None:
        for each in pages if pages is not None else self.served:
            each.give(want, self.number, self.version)
        self.done(want)

    def done(self, want: WantedState) -> None:
        """The service threads of all processes that have communicators have done it."""
        for each in self.served:

            def answered(each: OrderedPage = each) -> bool:
                a = each.answer()
                mine = (a["done_attempt"], a["done_version"], a["done_want"])
                return mine == (self.number, self.version, want)

            self._wait_long(answered, f"{want.name} of rank {each.rank}")
        problems = []
        for each in self.pages:
            answer = each.answer()
            if answer["done_want"] == want and answer["done_result"]:
                words = answer["message"].split(b"\0")[0].decode()
                name = errno.errorcode.get(answer["done_result"], "?")
                problems.append(f"rank {each.rank}: {name}: {words}")
        if problems:
            raise Refused("; ".join(problems))

    def _wait_long(self, condition: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            if not self.ranks.running:
                raise Abandoned("a rank has ended")
            return condition()

        await_true(met, self.limit_s + 15, lambda: f"{what}: {self.ranks.everything()}")

    def rebuild(self) -> None:
        """Fresh ids, the ids to the others, up again, open."""
        self.order(WantedState.FRESH_IDS)
        self.spread()
        self.order(WantedState.REBUILD)
        for each in self.pages:
            if not self.ranks.running:
                raise Abandoned("a rank has ended")
            assert not each.answer()["down"]
            each.open()

    def spread(self) -> None:
        fresh: dict[int, bytes] = {}
        for each in self.pages:
            for row in nccl(each):
                if row.rank == 0 and row.fresh_attempt == self.number:
                    fresh[row.id] = row.fresh_id
        down = [row for each in self.pages for row in nccl(each) if row.state is DOWN]
        whole = {row.id for row in down if sum(r.id == row.id for r in down) == row.size}
        order = {key: place for place, key in enumerate(sorted(fresh.keys() & whole), 1)}
        for each in self.pages:
            for row in nccl(each):
                if row.state is DOWN:
                    each.set_rebuild(row.row, order.get(row.id, 0), fresh.get(row.id, b""))


DOWN = CommunicatorState.DOWN


def nccl(each: page.PageFile) -> list[page.Communicator]:
    """Its communicators that are not ended."""
    return [
        row
        for row in each.communicators()
        if row.library is Library.NCCL and row.state is not CommunicatorState.ENDED
    ]
