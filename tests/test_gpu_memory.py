# SPDX-License-Identifier: Apache-2.0
"""Device memory in the GPU helper: made, filled, read out, dropped; on the simulated driver."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captured import until
from cuda_process import doubles
from doubles.gpu import build

from liveshift.cuda_snapshot.helper.blocks import Block
from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.cuda_snapshot.helper.ring import SIZES
from liveshift.errors import LiveshiftError, NotFound, Refused

__all__ = ["doubles"]

MIB = 1 << 20
ARENA = 15
UA, UB = (f"GPU-{d * 8}-{d * 4}-{d * 4}-{d * 4}-{d * 12}" for d in "ab")
TWO = f"{UA}:H200:256MiB,{UB}:H200:256MiB"
Helper = Callable[..., GpuHelper]


@pytest.fixture
def helper(
    doubles: build.Doubles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Helper]:
    """Connects to the helper of this test's folder, whose ring is small; ends it."""
    clients: list[GpuHelper] = []

    def start(ring: str = "4x1048576", devices: str = TWO) -> GpuHelper:
        monkeypatch.setenv("SIMCUDA_DEVICES", devices)
        monkeypatch.setenv(SIZES, ring)
        clients.append(GpuHelper.start(tmp_path, doubles.folder))
        return clients[-1]

    yield start
    for client in clients:
        with contextlib.suppress(LiveshiftError):
            for key in client.held():
                client.drop(key)
            client.leave()
        client.close()


def blocks(*sizes: int, gpu: str = UA, start: int = 0x7F0000000000) -> list[Block]:
    made, at = [], start
    for size in sizes:
        made.append(Block(at, size, gpu, ARENA))
        at += size + 4 * MIB
    return made


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def fill(gpu: GpuHelper, key: str, data: bytes, seed: int = 1) -> None:
    """In pieces of all sizes."""
    dice = random.Random(seed)
    view = memoryview(data)
    with gpu.filler(key) as filler:
        while view:
            part = min(len(view), dice.choice([1, 511, 4096, 70_001, MIB, 3 * MIB + 5]))
            filler.write(view[:part])
            view = view[part:]
        figures = filler.finish()
    assert figures.bytes == len(data)
    assert figures.seconds > 0
    assert 0 <= figures.waited_s <= figures.seconds


def drained(gpu: GpuHelper, key: str) -> bytes:
    with gpu.drain(key) as drain:
        data = b"".join(bytes(view) for view in drain)
        assert drain.figures is not None
        assert drain.figures.bytes == drain.total == len(data)
    return data


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


def test_nothing_to_copy(helper: Helper) -> None:
    gpu = helper()
    gpu.create("1/100", [])
    assert drained(gpu, "1/100") == b""
    with gpu.filler("1/100") as filler:
        assert filler.finish().bytes == 0
        with pytest.raises(LiveshiftError, match="no device memory to fill"):
            filler.write(b"x")


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
            room = filler.room()
            part = min(len(room), 50_000, len(data) - at)
            room[:part] = data[at : at + part]
            filler.advance(part)
            at += part
        filler.finish()
    assert drained(gpu, "1/100") == data


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
        with pytest.raises(LiveshiftError, match="more bytes came"):  # noqa: PT012 (either says it)
            filler.write(bytes(1))
            filler.finish()


def test_a_full_gpu_is_said_in_words_and_nothing_stays(helper: Helper) -> None:
    gpu = helper()
    with pytest.raises(LiveshiftError, match=r"GPU-aaaaaaaa-.* has no room for 200\.0 MiB .*56\.0"):
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
    with pytest.raises(Refused, match=r"holds 2\.0 MiB of device memory for 1/100 already"):
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
def test_a_killed_client_loses_nothing_of_the_keys(
    helper: Helper, tmp_path: Path, what: str
) -> None:
    gpu = helper("2x65536")
    gpu.create("1/100", blocks(4 * MIB))
    data = content(4 * MIB)
    fill(gpu, "1/100", data)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), what],
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


def test_a_helper_that_holds_memory_does_not_leave(helper: Helper) -> None:
    gpu = helper()
    gpu.create("1/100", blocks(2 * MIB))
    with pytest.raises(Refused, match=r"holds 2\.0 MiB of device memory for 1/100"):
        gpu.leave()
    gpu.drop("1/100")
    gpu.warm("2/100", [UA])
    assert gpu.held() == {"2/100": 0}
    gpu.leave()


def test_a_warmed_key_is_used_as_any(helper: Helper) -> None:
    gpu = helper()
    gpu.warm("1/100", [UA, UB])
    gpu.warm("1/100", [UA])
    gpu.create("1/100", blocks(2 * MIB))
    fill(gpu, "1/100", content(2 * MIB))
    assert drained(gpu, "1/100") == content(2 * MIB)
