# SPDX-License-Identifier: Apache-2.0
"""Device memory in the GPU helper: made, filled, read out, dropped; on the simulated driver."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_process import doubles
from doubles.gpu import build
from gpu_helper import end_helper
from gpu_memory_helper import ARENA, MIB, TWO, UA, UB, Helper, drained, fill, helper, helpers
from hypothesis import given
from hypothesis import strategies as st
from waits import until

from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.cuda_snapshot.helper.calls import LOG
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.cuda_snapshot.helper.copying import Cursor
from liveshift.cuda_snapshot.helper.device_memory import Piece
from liveshift.errors import LiveshiftError, NotFound, Refused

__all__ = ["doubles", "helper", "helpers"]


def blocks(*sizes: int, gpu: str = UA, start: int = 0x7F0000000000) -> list[Block]:
    made, at = [], start
    for size in sizes:
        made.append(Block(at, size, gpu, ARENA))
        at += size + 4 * MIB
    return made


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


# ---- bytes in, bytes out -----------------------------------------------------------------------


@pytest.mark.parametrize("ring", ["2x4096", "3x65536", "4x1048576", "16x16777216"])
def test_what_goes_in_comes_out(helper: Helper, ring: str) -> None:
    gpu = helper(ring)
    sizes = (2, 4, 2) if ring == "2x4096" else (2, 6, 40, 2)
    total = sum(sizes) * MIB
    gpu.create("1/100", blocks(*(size * MIB for size in sizes)))
    assert gpu.held() == {"1/100": total}
    data = content(total)
    fill(gpu, "1/100", data)
    assert drained(gpu, "1/100") == data
    assert drained(gpu, "1/100") == data
    gpu.drop("1/100")
    gpu.drop("1/100")
    assert gpu.held() == {}


def test_blocks_of_one_key_on_two_gpus(helper: Helper) -> None:
    gpu = helper("3x1048576")
    mixed = [*blocks(2 * MIB, 4 * MIB), *blocks(6 * MIB, gpu=UB, start=0x7E0000000000)]
    mixed.insert(1, Block(0x7D0000000000, 2 * MIB, UB, ARENA))
    gpu.create("1/100", mixed)
    data = content(14 * MIB)
    fill(gpu, "1/100", data)
    assert drained(gpu, "1/100") == data


def test_several_keys_at_once_share_two_rings(helper: Helper) -> None:
    gpu = helper("2x65536")
    datas = {f"1/{n}": content(6 * MIB, n) for n in range(5)}
    for n, key in enumerate(datas):
        gpu.create(key, blocks(2 * MIB, 4 * MIB, gpu=UA if n % 2 else UB))
    failed: list[BaseException] = []

    def one(key: str, data: bytes) -> None:
        try:
            fill(gpu, key, data)
            assert drained(gpu, key) == data
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=item) for item in datas.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert gpu.held() == dict.fromkeys(datas, 6 * MIB)


def test_a_third_copy_waits_for_a_ring(helper: Helper) -> None:
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(2 * MIB))
    data = content(2 * MIB)
    fill(gpu, "1/100", data)
    got: list[bytes] = []
    third = threading.Thread(target=lambda: got.append(drained(gpu, "1/100")))
    with gpu.drain("1/100") as one, gpu.drain("1/100") as two:
        assert next(one) == next(two) == data[:65536]
        third.start()
        third.join(0.2)
        assert third.is_alive()
        one.close()
        third.join(30)
        assert b"".join([data[:65536], *map(bytes, two)]) == data
    assert got == [data]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    takes=st.lists(st.integers(1, 25), min_size=240, max_size=240),
)
def test_all_bytes_have_their_turn_once(sizes: list[int], takes: list[int]) -> None:
    pieces = [Piece(Block(0, size, UA, ARENA), UA, n, None) for n, size in enumerate(sizes)]
    cursor = Cursor(pieces, lambda piece: piece.handle * 1000)
    seen: list[int] = []
    for size in takes:
        left = cursor.left
        runs = cursor.next_runs(size)
        assert sum(run.size for run in runs) == min(size, left)
        assert cursor.left == left - min(size, left)
        for run in runs:
            seen += range(run.address, run.address + run.size)
    assert seen == [n * 1000 + at for n, size in enumerate(sizes) for at in range(size)]


def test_nothing_to_copy(helper: Helper) -> None:
    gpu = helper()
    gpu.warm("1/100", [UA])
    for copy in (gpu.drain, gpu.filler):
        with pytest.raises(NotFound, match="holds only contexts for 1/100"):
            copy("1/100")


def test_a_slow_client_keeps_the_ring_full_and_loses_nothing(helper: Helper) -> None:
    """The helper copies ahead into the free slots only: it must not overwrite a view in use."""
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(4 * MIB))
    data = content(4 * MIB)
    fill(gpu, "1/100", data)
    at = 0
    with gpu.drain("1/100") as drain:
        for view in drain:
            before = hashlib.sha256(view).digest()
            gpu.host()  # a round trip: the helper has had time to go on
            assert hashlib.sha256(view).digest() == before
            assert view == data[at : at + len(view)]
            at += len(view)
        assert drain.figures is not None
        assert drain.figures.waited_s > 0
    assert at == len(data)


def test_a_writer_may_put_bytes_into_the_slot_itself(helper: Helper) -> None:
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(2 * MIB))
    data = content(2 * MIB)
    with gpu.filler("1/100") as filler:
        at = 0
        while at < len(data):
            space = filler.space()
            part = min(len(space), 50_000, len(data) - at)
            space[:part] = data[at : at + part]
            filler.advance(part)
            at += part
        filler.finish()
    assert drained(gpu, "1/100") == data


def test_several_threads_write_in_any_order_within_the_ring(helper: Helper) -> None:
    gpu, chunk = helper("4x65536"), 10_000
    gpu.create("1/100", blocks(2 * MIB, 4 * MIB))
    data = content(6 * MIB)
    dice = random.Random(3)
    with gpu.filler("1/100") as filler, ThreadPoolExecutor(4) as pool:
        for begin in range(0, len(data), filler.reach):
            end = min(begin + filler.reach, len(data))
            places = list(range(begin, end, chunk))
            dice.shuffle(places)
            parts = [(at, memoryview(data)[at : min(at + chunk, end)]) for at in places]
            for done in [pool.submit(filler.write_at, *part) for part in parts]:
                done.result()
        assert filler.finish().bytes == len(data)
    assert drained(gpu, "1/100") == data


def test_bytes_too_far_ahead_or_outside_or_twice_are_refused(helper: Helper) -> None:
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(2 * MIB))
    with gpu.filler("1/100") as filler:
        with pytest.raises(LiveshiftError, match="further ahead than the 65536 bytes of the ring"):
            filler.write_at(2 * 65536, memoryview(bytes(10)))
        with pytest.raises(LiveshiftError, match="outside of 2097152 bytes"):
            filler.write_at(2 * MIB - 5, memoryview(bytes(10)))
        filler.write_at(0, memoryview(bytes(65536)))
        filler.write_at(65536 + 100, memoryview(bytes(100)))
        for twice in (
            5,
            65536 + 50,
            65536 + 199,
        ):  # a slot that has gone, and one that has not
            with pytest.raises(LiveshiftError, match="came twice"):
                filler.write_at(twice, memoryview(bytes(60)))
        left = 2 * MIB - 65536 - 100
        with pytest.raises(LiveshiftError, match=f"{left} of {2 * MIB} bytes .* are missing"):
            filler.finish()


# ---- what goes wrong ---------------------------------------------------------------------------


def test_missing_bytes_are_noticed(helper: Helper) -> None:
    gpu = helper()
    gpu.create("1/100", blocks(4 * MIB))
    filler = gpu.filler("1/100")
    filler.write(bytes(3 * MIB + 17))
    with pytest.raises(LiveshiftError, match=rf"{MIB - 17} of {4 * MIB} bytes .* are missing"):
        filler.finish()
    with pytest.raises(LiveshiftError, match="never filled"):
        drained(gpu, "1/100")
    fill(gpu, "1/100", content(4 * MIB))  # from the beginning
    assert drained(gpu, "1/100") == content(4 * MIB)


def test_too_many_bytes_are_refused(helper: Helper) -> None:
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(2 * MIB))
    with gpu.filler("1/100") as filler:
        filler.write(bytes(2 * MIB))
        with pytest.raises(LiveshiftError, match=f"1 bytes at {2 * MIB} are outside of {2 * MIB}"):
            filler.write(bytes(1))
        filler.finish()


def test_a_full_gpu_is_said_in_words_and_nothing_stays(helper: Helper) -> None:
    gpu = helper()
    with pytest.raises(LiveshiftError, match=r"GPU-aaaaaaaa-.* has no room for 210 MB .*58\.7"):
        gpu.create("1/100", blocks(200 * MIB, 200 * MIB))
    assert gpu.held() == {}
    gpu.create("1/100", blocks(250 * MIB))
    gpu.drop("1/100")


def test_keys_and_gpus_that_are_not_there(helper: Helper) -> None:
    gpu = helper()
    with pytest.raises(NotFound, match="1/100"):
        drained(gpu, "1/100")
    with pytest.raises(NotFound, match="1/100"):
        gpu.filler("1/100")
    with pytest.raises(NotFound, match=r"no GPU-cccc.*it has GPU-aaaa"):
        gpu.create("1/100", blocks(2 * MIB, gpu=UA.replace("a", "c")))
    assert gpu.held() == {}
    gpu.create("1/100", blocks(2 * MIB))
    with pytest.raises(Refused, match=r"holds 2\.10 MB of device memory for 1/100 already"):
        gpu.create("1/100", blocks(2 * MIB))


def test_a_dropped_key_ends_its_copies(helper: Helper) -> None:
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(8 * MIB))
    fill(gpu, "1/100", content(8 * MIB))
    with gpu.drain("1/100") as drain:
        next(drain)
        gpu.drop("1/100")
        with pytest.raises(LiveshiftError, match="dropped"):
            list(drain)
    assert gpu.held() == {}
    with pytest.raises(NotFound):
        gpu.drain("1/100")
    until(lambda: roomy(gpu))


def roomy(gpu: GpuHelper) -> bool:
    """Whether the whole GPU can be had."""
    try:
        gpu.create("room", blocks(256 * MIB))
    except LiveshiftError:
        return False
    gpu.drop("room")
    return True


def test_who_stops_in_the_middle_gives_its_slots_back(helper: Helper) -> None:
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(4 * MIB))
    data = content(4 * MIB)
    fill(gpu, "1/100", data)
    for _ in range(5):  # more often than there are rings
        with gpu.drain("1/100") as drain:
            assert next(drain) == data[:65536]
    for _ in range(5):
        with gpu.filler("1/100") as filler:
            filler.write(data[:100_000])
    fill(gpu, "1/100", data)
    assert drained(gpu, "1/100") == data


KILLED = """
import pathlib, sys
from liveshift.cuda_snapshot.helper.client import GpuHelper
gpu = GpuHelper.start(pathlib.Path(sys.argv[1]))
if sys.argv[2] == "drain":
    user = gpu.drain("1/100")
    next(user)
else:
    user = gpu.filler("1/100")
    user.write(bytes(500_000))
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("what", ["drain", "fill"])
def test_a_killed_client_loses_nothing_of_the_keys(helper: Helper, what: str) -> None:
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(4 * MIB))
    data = content(4 * MIB)
    fill(gpu, "1/100", data)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(helper.directory), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"there\n"
            os.kill(client.pid, signal.SIGKILL)
    assert gpu.held() == {"1/100": 4 * MIB}
    if what == "drain":
        assert drained(gpu, "1/100") == data
    fill(gpu, "1/100", data[::-1])
    assert drained(gpu, "1/100") == data[::-1]


def test_a_helper_that_holds_memory_does_not_leave(doubles: build.Doubles, tmp_path: Path) -> None:
    helper = Helper(tmp_path, doubles.folder)
    gpu = helper()
    gpu.create("1/100", blocks(2 * MIB))
    end_helper(gpu)
    why = "must stay: it holds 2.10 MB of device memory for 1/100"
    until(lambda: why in (helper.directory / LOG).read_text())
    assert gpu.held() == {"1/100": 2 * MIB}
    gpu.drop("1/100")
    gpu.warm("2/100", [UA])
    assert gpu.held() == {"2/100": 0}  # only contexts: those are soon made again
    helper.end(leave=True)
    until(lambda: not (helper.directory / "gpu.sock").exists())


def test_a_warmed_key_is_used_as_any(helper: Helper) -> None:
    gpu = helper()
    gpu.warm("1/100", [UA, UB])
    gpu.warm("1/100", [UA])
    gpu.create("1/100", blocks(2 * MIB))
    fill(gpu, "1/100", content(2 * MIB))
    assert drained(gpu, "1/100") == content(2 * MIB)


# ---- what the helper keeps for itself ----------------------------------------------------------

INSIDE = """
import ctypes, socket, sys, threading
from liveshift.cuda_snapshot.cuda import Cuda
from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.cuda_snapshot.helper.channel import Channel
from liveshift.cuda_snapshot.helper.contexts import Contexts
from liveshift.cuda_snapshot.helper.device_memory import DeviceMemory
from liveshift.cuda_snapshot.helper.ring import Busy, CopyRings
from liveshift.cuda_snapshot.helper.ring_client import Drain, Filler
from liveshift.cuda_snapshot.helper.transfers import Transfers

contexts = Contexts(Cuda())
memory, rings = DeviceMemory(contexts), CopyRings(contexts, 3, 65536)
transfers = Transfers(contexts, memory, rings)
libcuda = ctypes.CDLL("libcuda.so.1")
gpus = contexts.cuda.uuids()

def copied(serve, client):
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(Channel(theirs), "k"))
    thread.start()
    with client(Channel(ours)) as user:
        if client is Filler:
            user.write(bytes(4 << 20))
            user.finish()
        else:
            next(user)
    thread.join()

def active():
    found = []
    for device in range(2):
        flags, there = ctypes.c_uint(), ctypes.c_int()
        places = ctypes.byref(flags), ctypes.byref(there)
        assert libcuda.cuDevicePrimaryCtxGetState(device, *places) == 0
        found.append(there.value)
    return found

assert active() == [0, 0]
for first in (0, 1):
    pair = [gpus[first], gpus[1 - first]]
    memory.create("k", [Block(n << 30, 2 << 20, gpu, 15) for n, gpu in enumerate(pair)])
    assert active() == [1, 1]
    copied(transfers.fill, Filler)
    copied(transfers.drain, Drain)
    pinned = [ring.pinned_on for ring in rings._idle]
    assert pinned == [pair[0]], pinned  # for the next copy
    with memory.use("k") as holding:
        memory.bring_to(holding, holding.pieces[0], pair[1])
        assert {piece.gpu for piece in holding.pieces} == {pair[1]}
    memory.drop("k")
    rings.unpin_idle(memory.gpus())
    assert active() == [0, 0], active()
    assert [ring.pinned_on for ring in rings._idle] == [None]
with rings.one(gpus[0], 0) as one, rings.one(gpus[1], 0) as two:
    assert one is not two
    try:
        rings.one(gpus[0], 0.01).__enter__()
    except Busy as error:
        print(error)
    else:
        raise AssertionError("a third ring")
with rings.one(gpus[0], 0), rings.one(gpus[0], 0) as again:
    assert again in (one, two)
rings.unpin_idle(set())
for failing in ([Block(0, 2 << 20, gpus[0], 15), Block(1, 1 << 30, gpus[1], 15)],
                [Block(0, 2 << 20, gpus[1], 15), Block(1, 3, gpus[0], 15)]):
    try:
        memory.create("k", failing)
    except Exception as error:
        print(error)
    else:
        raise AssertionError("it worked")
    assert active() == [0, 0]
    assert memory.held() == {}
"""


def test_contexts_go_with_the_last_memory(doubles: build.Doubles) -> None:
    """One costs its GPU some 500 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", INSIDE],
        env={**os.environ, "SIMCUDA_DEVICES": TWO, "LD_LIBRARY_PATH": str(doubles.folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "has no room for 1.07 GB" in done.stdout
    assert "2 other copies of device memory on this host did not end within 0.01 s" in done.stdout
