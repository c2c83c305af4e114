# SPDX-License-Identifier: Apache-2.0
"""A process with an arena, and a device session with it, as a host's helper holds one."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import sanitizers
from doubles.gpu import build
from doubles.gpu.build import kept
from sanitizers import BUILT

from liveshift.interposer import device_session, library
from liveshift.interposer.device_session import Op, SessionReply
from liveshift.interposer.layout import MemoryKind, WantedState, text_of
from liveshift.interposer.orders import OrderedPage, open_ordered
from liveshift.interposer.page import Allocation, opened

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60
GPUS = ",".join(f"GPU-{n:08x}-0000-0000-0000-000000000000:H200:1GiB" for n in (1, 2))


class Built:
    """The doubles and ``arena/holder`` on them; sanitized, with the interposer linked."""

    def __init__(self, name: str) -> None:
        flags = sanitizers.flags(name)
        self.doubles = build.build(BUILT, flags)
        self.linked = sanitizers.interposer(flags) if flags else None
        source = HERE / "arena" / "holder.c"
        own = [*flags, f"-Wl,-rpath,{self.doubles.folder}"]
        own += sanitizers.first(self.linked) if self.linked else []

        def make(part: Path) -> None:
            libraries = [self.doubles.libcudart, self.doubles.libcuda]
            build.program(source, part / "arena_holder", libraries, own)

        sources = [source, *build.INCLUDE.glob("*.h")]
        self.program = kept(BUILT, "arena_holder", sources, own, make) / "arena_holder"


class Holder:
    """One run of it under the interposer. Calling it does a command and gives its answer: a number,
    negative for CUDA's errors."""

    def __init__(
        self,
        built: Built,
        pages: Path,
        arena: str | None = "1",
        gpus: str = GPUS,
        local_rank: str | None = None,
        **environment: str,
    ) -> None:
        self.pages = pages
        old = {
            k: v for k, v in os.environ.items() if not k.startswith(("LIVESHIFT_", "LD_", "LOCAL_"))
        }
        environment = old | sanitizers.OPTIONS | {"SIMCUDA_DEVICES": gpus} | environment
        environment |= {"LIVESHIFT_PAGES": str(pages)}
        if arena is not None:
            environment["LIVESHIFT_DEVICE_ARENA"] = arena
        if local_rank is not None:
            environment["LOCAL_RANK"] = local_rank
        if built.linked is None:
            environment["LD_PRELOAD"] = str(library.library_path())
        self.process = subprocess.Popen(
            [str(built.program)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._attempt = 0
        self.version = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def __call__(self, word: str, *numbers: int) -> int:
        self.begin(word, *numbers)
        return self.answer()

    def begin(self, word: str, *numbers: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join([word, *(f"{n:x}" for n in numbers)]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"it ended: {self.end()}")
        return int(line)

    def end(self) -> str:
        """What it said on stderr; it must have ended well."""
        _, said = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, said
        return said

    def rows(self, *kinds: MemoryKind) -> list[Allocation]:
        with opened(self.pages / str(self.pid)) as page:
            return [row for row in page.allocations() if not kinds or row.kind in kinds]

    def threads(self) -> list[str]:
        """Their names."""
        tasks = Path(f"/proc/{self.pid}/task")
        return [(task / "comm").read_text().strip() for task in tasks.iterdir()]

    @contextmanager
    def page(self) -> Iterator[OrderedPage]:
        directory = os.open(self.pages, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with closing(open_ordered(self.pages / str(self.pid), directory)) as page:
                yield page
        finally:
            os.close(directory)

    @contextmanager
    def session(self, ends_well: bool = True) -> Iterator[Session]:
        """One device session; afterwards the order must have been answered well."""
        at = self.pages / device_session.socket_name(self.pid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(at))
            try:
                listening.listen(1)
                listening.settimeout(PATIENCE_S)
                self.order(WantedState.DEVICES)
                connection, _ = listening.accept()
            finally:
                at.unlink()
        with connection:
            yield Session(connection)
        if ends_well:
            done = self.done()
            assert done == (0, ""), done

    def order(self, want: WantedState) -> None:
        self.version += 1
        with self.page() as page:
            if self._attempt == 0:
                self._attempt = 1
                page.arm(1, lease_ms=0, limit_ms=PATIENCE_S * 1000)
            page.give(want, self._attempt, self.version)

    def done(self) -> tuple[int, str]:
        """How the last order was carried out, once it has been: errno and words."""
        until = time.monotonic() + PATIENCE_S
        with self.page() as page:
            while time.monotonic() < until:
                answer = page.answer()
                if answer["done_want"] and answer["done_version"] == self.version:
                    return answer["done_result"], text_of(answer["message"])
                time.sleep(0.001)
        raise AssertionError("the order was not carried out")


Replies = list[SessionReply]  # Session has a method of that name


class Session:
    """The helper's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(PATIENCE_S)
        self.hello = self.reply()
        assert (self.hello.op, self.hello.kind) == (Op.HELLO, device_session.PROTOCOL)

    def reply(self) -> SessionReply:
        packet, fds, _, _ = socket.recv_fds(self.connection, 4096, 4)
        self.descriptors = list(fds)
        return device_session.reply(packet)

    def ask(
        self, op: Op, address: int = 0, size: int = 0, argument: int = 0, *, fd: int | None = None
    ) -> SessionReply:
        packet = device_session.request(op, address, size, argument)
        socket.send_fds(self.connection, [packet], [] if fd is None else [fd])
        answered = self.reply()
        assert answered.op == op
        return answered

    def good(self, op: Op, *arguments: int, fd: int | None = None) -> SessionReply:
        answered = self.ask(op, *arguments, fd=fd)
        assert answered.failure == ""
        return answered

    def end(self) -> None:
        self.connection.send(device_session.request(Op.END))
        assert self.connection.recv(1) == b""

    def list(self) -> Replies:
        found: Replies = []
        while not (one := self.ask(Op.NEXT, argument=len(found))).ended:
            assert one.failure == ""
            found.append(one)
        return found

    def arena(self) -> Replies:
        return [one for one in self.list() if one.kind == MemoryKind.ARENA]

    def checksum(self, block: SessionReply, samples: int = 0) -> int:
        return self.good(Op.CHECKSUM, block.address, block.size, samples).value

    def give_up(self) -> dict[int, tuple[int, int]]:
        """Export and release the whole arena: address → size and descriptor."""
        taken = {}
        for block in self.arena():
            if block.value:
                self.good(Op.EXPORT, block.address)
                (fd,) = self.descriptors
                taken[block.address] = (block.size, fd)
        for address in taken:
            self.good(Op.RELEASE, address)
        return taken

    def take_back(self, taken: dict[int, tuple[int, int]]) -> None:
        for address, (size, fd) in taken.items():
            self.good(Op.MAP, address, size, fd=fd)
            os.close(fd)


def moved(taken: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """The same bytes in other memory, as on another GPU: the double's descriptors are files."""
    result = {}
    for address, (size, fd) in taken.items():
        other = os.memfd_create("another GPU")
        os.ftruncate(other, size)
        at = 0
        while at < size:
            at += os.copy_file_range(fd, other, min(size - at, 1 << 24), at, at)
        os.close(fd)
        result[address] = (size, other)
    return result
