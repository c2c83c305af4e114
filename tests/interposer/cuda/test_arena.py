# SPDX-License-Identifier: Apache-2.0
"""The arena and device sessions: a program on the simulated CUDA, the helper's part played here."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sanitizers
from arena_process import GPUS, Built, Holder, Session, moved
from cuda_process import CHECKPOINTED, RUNNING, CudaProcess
from sanitizers import BUILT

from liveshift.cuda_snapshot import threads
from liveshift.cuda_snapshot.hold import ThreadHold, spared_threads
from liveshift.interposer.device_session import Op
from liveshift.interposer.layout import MemoryKind, WantedState

MIB = 1 << 20
INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, NOT_SUPPORTED, CAPTURE_UNSUPPORTED = 1, 2, 600, 801, 900

Start = Callable[..., Holder]


MORE = {"thread": pytest.mark.long}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=MORE.get(name, ())) for name in sanitizers.SANITIZERS],
)
def built(request: pytest.FixtureRequest) -> Built:
    return Built(request.param)


@pytest.fixture
def start(built: Built, tmp_path: Path) -> Iterator[Start]:
    begun: list[Holder] = []

    def start(**options: Any) -> Holder:
        begun.append(Holder(built, tmp_path, **options))
        return begun[-1]

    yield start
    for holder in begun:
        with holder.process as process:  # closes its pipes
            process.kill()


@pytest.fixture
def helper() -> Iterator[CudaProcess]:
    """Who calls the driver's checkpoint."""
    from doubles.gpu import build

    process = CudaProcess(build.build(BUILT), GPUS)
    assert process.do("init()") == 0
    yield process
    process.end()


def test_what_is_large_enough_is_movable_and_known_once(start: Start) -> None:
    holder = start()
    free = holder("free-memory")
    addresses = [holder("malloc", size) for size in (2 * MIB, 20 * MIB, 34 * MIB - 4096)]
    assert all(address > 0 and address % (2 * MIB) == 0 for address in addresses)
    others = [holder("malloc", MIB), holder("malloc", 3 * MIB), holder("async", 4 * MIB)]
    rows = {row.address: row for row in holder.rows()}
    assert [rows[a].size for a in addresses] == [2 * MIB, 20 * MIB, 34 * MIB]
    assert {rows[a].kind for a in addresses} == {MemoryKind.ARENA}
    assert [rows[a].kind for a in others] == [MemoryKind.DEVICE, MemoryKind.DEVICE, MemoryKind.POOL]
    assert len(rows) == 6  # none as physical, mapped or reserved memory besides
    assert free - holder("free-memory") >= 56 * MIB
    for address in addresses:
        assert holder("put", address, 2 * MIB, 5) == 0
        assert holder("same", address, 2 * MIB, 5) == 0
    ways = ["free", "freeasync", "driverfree", "free", "free", "free"]
    for address, way in zip([*addresses, *others], ways, strict=True):
        assert holder(way, address) == 0
    assert holder.rows() == []
    assert holder("free-memory") == free
    assert holder.end() == ""


@pytest.mark.parametrize("setting", [None, "0", "", "yes"])
def test_it_is_off_unless_asked_for(start: Start, setting: str | None) -> None:
    holder = start(arena=setting)
    address = holder("malloc", 4 * MIB)
    assert [row.kind for row in holder.rows()] == [MemoryKind.DEVICE]
    assert holder("free", address) == 0
    assert holder.end() == ""


def test_errors_are_cudas(start: Start) -> None:
    holder = start()
    address = holder("malloc", 4 * MIB)
    assert holder("malloc", 1 << 40) == -OUT_OF_MEMORY
    assert holder("error") == -OUT_OF_MEMORY  # noted, as cudaMalloc does
    assert holder("free", address + 512) == -INVALID_VALUE
    assert holder("free", address) == 0
    assert holder("free", address) == -INVALID_VALUE
    assert holder("free", 0) == 0
    assert holder.end() == ""


def test_peers_may_touch_it_when_they_may_touch_cudas(start: Start) -> None:
    holder = start()
    holder("device", 1)
    early = holder("malloc", 2 * MIB)
    holder("device", 0)
    assert [holder("access", early, device) for device in (0, 1)] == [0, 3]
    assert holder("peer", 1) == 0  # device 0 may access the memory of 1
    holder("device", 1)
    late = holder("malloc", 2 * MIB)
    assert [holder("access", a, 0) for a in (early, late)] == [3, 3]
    with holder.session() as session:  # what comes back is as it was
        session.take_back(session.give_up())
        session.end()
    assert [holder("access", a, 0) for a in (early, late)] == [3, 3]
    holder("device", 0)
    assert holder("unpeer", 1) == 0
    assert [holder("access", a, 0) for a in (early, late)] == [0, 0]
    assert [holder("access", a, 1) for a in (early, late)] == [3, 3]
    assert holder.end() == ""


def test_devices_that_are_both_used_can_copy_to_each_other(start: Start) -> None:
    """cudaMemcpy between them would be staged for memory of cudaMalloc, peers or not."""
    holder = start()
    first = holder("malloc", 2 * MIB)
    assert holder("access", first, 1) == 0
    holder("device", 1)
    second = holder("malloc", 2 * MIB)
    assert [holder("access", first, d) for d in (0, 1)] == [3, 3]
    assert [holder("access", second, d) for d in (0, 1)] == [3, 3]
    assert holder("reset") == 0
    assert [holder("access", first, d) for d in (0, 1)] == [3, 0]
    assert holder.end() == ""


@pytest.mark.parametrize(("ranked", "kind"), [(None, MemoryKind.DEVICE), ("0", MemoryKind.ARENA)])
def test_devices_that_are_no_peers(start: Start, ranked: str | None, kind: MemoryKind) -> None:
    """A process that may use both gets none; one of a job's ranks uses one of those it sees."""
    holder = start(gpus=GPUS.replace(":H200:", ":B200:", 1), local_rank=ranked)
    holder("malloc", 2 * MIB)
    assert [row.kind for row in holder.rows()] == [kind]
    assert holder.end() == ""


def test_a_capture_goes_as_with_cudas(start: Start) -> None:
    holder = start()
    block = holder("malloc", 2 * MIB)
    assert holder("capture", 0) == 0
    assert holder("malloc", 2 * MIB) == -CAPTURE_UNSUPPORTED  # and has spoilt it
    assert holder("captured") < 0
    assert holder("capture", 0) == 0
    assert holder("free", block) == -CAPTURE_UNSUPPORTED
    assert holder("captured") < 0
    assert holder("same", block, 16, 0) != -INVALID_VALUE  # it is still there
    assert holder("capture", 2) == 0
    holder("mode", 2)  # as PyTorch does around its cudaMalloc
    more = holder("malloc", 4 * MIB)
    assert more > 0
    assert holder("free", block) == 0
    holder("mode", 0)
    assert holder("captured") == 0
    free = holder("free-memory")
    assert {row.address for row in holder.rows(MemoryKind.ARENA)} == {more}
    assert holder("free", more) == 0  # now the one before can go, too
    assert holder("free-memory") == free + 6 * MIB
    assert holder.end() == ""


def test_a_reset_takes_the_devices_blocks_along(start: Start) -> None:
    holder = start()
    holder("malloc", 2 * MIB)
    holder("device", 1)
    other = holder("malloc", 2 * MIB)
    holder("device", 0)
    assert holder("reset") == 0
    assert [row.address for row in holder.rows(MemoryKind.ARENA)] == [other]
    with holder.session() as session:
        assert [block.address for block in session.arena()] == [other]
        session.end()
    again = holder("malloc", 2 * MIB)
    assert holder("put", again, 4096, 1) == holder("same", again, 4096, 1) == 0
    assert holder.end() == ""


def test_ipc_turns_it_off_with_a_word(start: Start) -> None:
    holder = start()
    block = holder("malloc", 2 * MIB)
    assert holder("ipc", block + 4096) < 0
    later = holder("malloc", 2 * MIB)
    assert holder("ipc", later) == 0
    kinds = {row.address: row.kind for row in holder.rows(MemoryKind.ARENA, MemoryKind.DEVICE)}
    assert kinds == {block: MemoryKind.ARENA, later: MemoryKind.DEVICE}
    assert holder("free", block) == 0
    said = holder.end()
    assert said.count("\n") == 1
    assert "LIVESHIFT_DEVICE_ARENA=0" in said


def test_a_child_has_nothing_of_it(start: Start) -> None:
    holder = start()
    block = holder("malloc", 2 * MIB)
    assert holder("fork", block) == 0
    assert holder("free", block) == 0
    assert holder.end() == ""


def test_the_service_thread_comes_with_device_memory(start: Start) -> None:
    holder = start(arena="0")
    holder("free", 0)
    assert "liveshift" not in holder.threads()
    holder("malloc", MIB)
    holder("malloc", MIB)
    holder.order(WantedState.CLOSED)
    assert holder.done() == (0, "")  # so it has begun, and given itself its name
    assert holder.threads().count("liveshift") == 1
    assert holder.end() == ""


def test_a_session_lists_what_there_is_and_where(start: Start) -> None:
    holder = start()
    small = holder("malloc", MIB)
    pool = holder("async", 4 * MIB)
    holder("device", 1)
    block = holder("malloc", 2 * MIB)
    with holder.session() as session:
        assert session.hello.value == holder.pid
        found = {one.address: one for one in session.list()}
        again = session.ask(Op.NEXT, argument=0)
        session.end()
    assert {a: MemoryKind(one.kind) for a, one in found.items()} == {
        small: MemoryKind.DEVICE,
        pool: MemoryKind.POOL,
        block: MemoryKind.ARENA,
    }
    assert again in found.values()
    assert [found[a].device for a in (small, pool, block)] == [0, 0, 1]
    assert [found[a].uuid.hex()[:8] for a in (small, block)] == ["00000001", "00000002"]
    assert {one.value for one in found.values()} == {1}
    assert holder.end() == ""


def test_memory_that_the_driver_no_longer_knows_is_not_listed(start: Start) -> None:
    """Its row is still there, as where a thread is stopped just behind freeing it."""
    holder = start()
    addresses = [holder("malloc", MIB) for _ in range(3)]
    assert holder("unseen-free", addresses[1]) == 0
    assert len(holder.rows(MemoryKind.DEVICE)) == 3
    with holder.session() as session:
        assert {one.address for one in session.list()} == {addresses[0], addresses[2]}
        session.end()
    assert holder.end() == ""


def test_a_checksum_tells_bytes_and_their_order(start: Start) -> None:
    holder = start()
    size = 10 * MIB
    blocks = [holder("malloc", size) for _ in range(2)]
    odd = holder("malloc", 70_000)
    for address in blocks:
        assert holder("put", address, size, 1) == 0
    assert holder("put", odd, 70_000, 9) == 0

    def sums(samples: int) -> list[int]:
        with holder.session() as session:
            listed = {one.address: one for one in session.list()}
            return [session.checksum(listed[a], samples) for a in (*blocks, odd)]

    whole, sampled = sums(0), sums(16)
    assert whole[0] == whole[1] != whole[2]
    assert sampled[0] == sampled[1] != whole[0]
    assert sums(0) == whole
    assert sums(16) == sampled
    holder("put", blocks[1] + 16, 8, 77)  # within the first sample
    assert sums(0)[0] == whole[0] != sums(0)[1]
    assert sums(16)[0] == sampled[0] != sums(16)[1]
    holder("put", blocks[1], size, 1)
    assert sums(0)[1] == whole[0]
    holder("put", blocks[1] + size - 1, 1, 78)
    assert sums(0)[1] != whole[0]
    assert sums(16)[1] != sampled[0]
    assert sums(0)[0] == whole[0]
    assert holder.end() == ""


def test_requests_that_do_not_fit_are_refused_in_words(start: Start) -> None:
    holder = start()
    small = holder("malloc", MIB)
    block = holder("malloc", 2 * MIB)
    with holder.session() as session:
        for op in (Op.EXPORT, Op.RELEASE, Op.MAP):
            assert session.ask(op, small).result == -errno.ENOENT
        assert session.ask(Op.MAP, block, 2 * MIB).result == -errno.EALREADY
        assert session.ask(Op.CHECKSUM, 0x1000, 64).result > 0
        assert "no device" in session.ask(Op.CHECKSUM, 0x1000, 64).failure
        session.connection.send(b"\x63" + bytes(31))
        assert session.reply().result == -errno.ENOSYS
        session.good(Op.SYNC)
        session.good(Op.EXPORT, block)
        (fd,) = session.descriptors
        session.good(Op.RELEASE, block)
        assert session.ask(Op.RELEASE, block).result == -errno.EALREADY
        assert session.ask(Op.EXPORT, block).result == -errno.EALREADY
        assert session.ask(Op.MAP, block, 4 * MIB, fd=fd).result == -errno.EINVAL
        assert session.ask(Op.MAP, block, 2 * MIB).result == -errno.EBADF
        assert [one.value for one in session.arena()] == [0]
        with open("/dev/null") as wrong:
            assert session.ask(Op.MAP, block, 2 * MIB, fd=wrong.fileno()).result > 0
        session.good(Op.MAP, block, 2 * MIB, fd=fd)
        os.close(fd)
        assert [one.value for one in session.arena()] == [1]
        session.end()
    assert holder("free", block) == 0
    assert holder.end() == ""


def test_a_helper_that_goes_away_ends_the_session(start: Start) -> None:
    holder = start()
    holder("malloc", 2 * MIB)
    with holder.session() as session:
        session.list()
    with holder.session() as session:
        assert len(session.arena()) == 1
        session.end()
    holder.order(WantedState.DEVICES)  # and nobody listens
    result, why = holder.done()
    assert result == errno.ENOENT
    assert "cannot connect" in why
    with holder.session() as session:
        session.end()
    assert holder.end() == ""


def test_another_order_ends_the_session(start: Start) -> None:
    holder = start()
    holder("malloc", 2 * MIB)
    with holder.session(ends_well=False) as session:
        holder.order(WantedState.CLOSED)
        assert session.connection.recv(1) == b""
    assert holder.done() == (0, "")  # the later order's
    assert holder.end() == ""


def checkpointed(helper: CudaProcess, pid: int) -> None:
    assert helper.do(f"lock({pid}, 10000)") == 0
    assert helper.do(f"checkpoint({pid})") == 0
    assert helper.do(f"state({pid})") == CHECKPOINTED
    assert helper.do(f"held({pid})") == 0


def restored(helper: CudaProcess, pid: int) -> None:
    assert helper.do(f"restore({pid})") == 0
    assert helper.do(f"unlock({pid})") == 0
    assert helper.do(f"state({pid})") == RUNNING


def given_up(session: Session) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    session.good(Op.SYNC)
    sums = {one.address: session.checksum(one) for one in session.list()}
    taken = session.give_up()
    session.end()
    return sums, taken


def test_memory_goes_and_comes_back_as_it_was_again_and_again(
    start: Start, helper: CudaProcess
) -> None:
    holder = start()
    blocks = {holder("malloc", size): size for size in (2 * MIB, 20 * MIB, 6 * MIB)}
    plain = holder("malloc", MIB)
    for n, (address, size) in enumerate(blocks.items()):
        assert holder("put", address, size, n) == 0
    assert holder("put", plain, MIB, 99) == 0
    for time in range(3):
        with holder.session() as session:
            sums, taken = given_up(session)
        assert taken.keys() == blocks.keys()
        assert helper.do(f"held({holder.pid})") < 2 * MIB  # only what is the driver's
        checkpointed(helper, holder.pid)
        if time > 0:
            taken = moved(taken)
        restored(helper, holder.pid)
        with holder.session() as session:
            session.take_back(taken)
            assert {one.address: session.checksum(one) for one in session.list()} == sums
            session.end()
        for n, (address, size) in enumerate(blocks.items()):
            assert holder("same", address, size, n) == 0
        assert holder("same", plain, MIB, 99) == 0
    for address in (*blocks, plain):
        assert holder("free", address) == 0
    assert holder.rows() == []
    assert holder.end() == ""


def test_a_checkpoint_does_without_a_session(start: Start, helper: CudaProcess) -> None:
    """The plain path: memory that was never exported is like any other."""
    holder = start()
    block = holder("malloc", 4 * MIB)
    assert holder("put", block, 4 * MIB, 3) == 0
    checkpointed(helper, holder.pid)
    restored(helper, holder.pid)
    assert holder("same", block, 4 * MIB, 3) == 0
    with holder.session() as session:
        session.good(Op.EXPORT, block)
        os.close(session.descriptors[0])
        session.end()
    # The descriptor is closed, but the driver remembers: what was exported must be released.
    assert helper.do(f"lock({holder.pid}, 10000)") == 0
    assert helper.do(f"checkpoint({holder.pid})") == NOT_SUPPORTED
    assert helper.do(f"unlock({holder.pid})") == 0
    assert holder.end() == ""


def test_whoever_sees_memory_in_the_page_sees_its_service_thread_too(start: Start) -> None:
    """A move holds all threads but those that it knows by name."""
    for _ in range(10):
        holder = start()
        holder("free-memory")  # makes the context
        assert "liveshift" not in holder.threads()
        holder.begin("malloc", 4 * MIB)
        while not (holder.pages / str(holder.pid)).exists() or not holder.rows():
            pass
        assert "liveshift" in holder.threads()
        assert holder.answer() > 0
        holder.process.kill()


# Not under the thread sanitizer: its functions stand on the stack between the driver and its
# callers, so who is inside cannot be told.
@pytest.mark.parametrize("built", ["plain", "address"], indirect=True)
def test_threads_that_are_stopped_outside_of_the_driver_do_no_harm(
    start: Start, helper: CudaProcess
) -> None:
    """As a move does it, with threads that allocate, free, write and compare all the time.

    A thread of the driver may need a lock of malloc that a held thread has: then the driver's lock
    fails, and so does the move, and the process goes on with its memory.
    """
    holder = start()
    holder("free-memory")  # makes the context
    code, restore_thread = helper.do(
        f"number('cuCheckpointProcessGetRestoreThreadId', {holder.pid})"
    )
    assert code == 0
    moves, given, failed = 12, 0, 0
    assert holder("churn") == 0
    for _ in range(moves):
        before = holder("rounds")
        while holder("rounds") < before + 8:  # some time, by what the threads do
            pass
        hold = ThreadHold(holder.pid, lambda pid: spared_threads(pid, restore_thread))
        hold.begin_outside(60, 60)
        with holder.session() as session:
            taken = session.give_up()
            session.end()
        given += len(taken)
        if (code := helper.do(f"lock({holder.pid}, 10000)")) == NOT_READY:
            failed += 1
            with holder.session() as session:
                session.take_back(taken)
                session.end()
            hold.end()
            continue
        assert code == 0
        assert helper.do(f"checkpoint({holder.pid})") == 0
        threads.stop(holder.pid, 60)
        hold.end()
        hold.begin(60)
        os.kill(holder.pid, signal.SIGCONT)
        restored(helper, holder.pid)
        with holder.session() as session:
            session.take_back(moved(taken))
            session.end()
        hold.end()
    assert given > moves
    assert failed < moves / 4
    assert holder("rest") > 0
    assert holder.rows() == []
    with holder.session() as session:
        assert session.list() == []
        session.end()
    assert holder.end() == ""
