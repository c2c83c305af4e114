# SPDX-License-Identifier: Apache-2.0
"""The simulated CUDA: it keeps the contract, and it has the real one's limits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from checkout import ROOT
from contract import run as contract
from cuda_process import CHECKPOINTED, FAILED, LOCKED, RUNNING, CudaProcess, doubles
from doubles.gpu import build
from waits import until

from liveshift.criu_glue.criu import tool

__all__ = ["doubles"]

MIB = 1 << 20
A, B, C = (digit * 32 for digit in "abc")
NOT_READY, NOT_SUPPORTED, ILLEGAL_STATE, OS_CALL_FAILED = 600, 801, 401, 304
Start = Callable[..., CudaProcess]


def gpus(*uuids: str, size: str = "1GiB", chip: str = "H200") -> str:
    return ",".join(f"GPU-{uuid}:{chip}:{size}" for uuid in uuids)


@pytest.fixture
def start(doubles: build.Doubles) -> Iterator[Start]:
    """Starts processes that call cuInit, and ends them."""
    started: list[CudaProcess] = []

    def one(
        devices: str = gpus(A), prefix: tuple[str, ...] = (), **environment: str
    ) -> CudaProcess:
        process = CudaProcess(doubles, devices, prefix, **environment)
        started.append(process)
        assert process.do("init()") == 0
        return process

    yield one
    for process in started:
        process.end()


# ---- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", contract.PROGRAMS)
def test_the_double_keeps_the_contract(doubles: build.Doubles, name: str, tmp_path: Path) -> None:
    result = contract.run(name, tmp_path, [doubles.libcuda, doubles.libcudart])
    assert result.code == 0, result.output
    assert "on simulated: liveshift simulated GPU" in result.output
    assert result.passed


@pytest.mark.parametrize("name", ["memory", "streams", "resolve"])
def test_the_runtime_of_cuda_12_keeps_it_too(
    doubles: build.Doubles, name: str, tmp_path: Path
) -> None:
    twelve = doubles.folder / "libcudart.so.12"
    result = contract.run(name, tmp_path, [doubles.libcuda, twelve])
    assert result.code == 0, result.output
    assert result.passed


def test_what_we_declare_is_what_nvidia_declares(tmp_path: Path) -> None:
    """requirements-test.lock has its headers; without them this test fails."""
    headers = distribution("nvidia-cuda-runtime").locate_file("nvidia/cu13/include")
    source = contract.HERE / "abi.c"
    said = []
    for name, flags in (("ours", []), ("theirs", ["-DREAL_HEADERS", f"-I{headers}"])):
        program = build.program(source, tmp_path / name, [], flags)
        said.append(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) > 80


# ---- devices -----------------------------------------------------------------------------------


def test_the_inventory_and_what_is_visible_of_it(start: Start) -> None:
    host = f"{gpus(A)},{gpus(B, size='256MiB')}"
    both = start(host)
    assert both.do("uuids()") == [A, B]
    second = start(host, CUDA_VISIBLE_DEVICES="1")
    assert second.do("uuids()") == [B]
    assert second.do("free_and_total()") == (256 * MIB, 256 * MIB)
    assert second.do("bus()") == both.do("bus(1)") != both.do("bus(0)")
    assert start(host, CUDA_VISIBLE_DEVICES="GPU-bbbb,GPU-aaaa").do("uuids()") == [B, A]
    assert start(host, CUDA_VISIBLE_DEVICES="0,7,1").do("uuids()") == [A]


def test_the_inventory_may_be_a_file(start: Start, tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text(gpus(A) + "\n" + gpus(B) + "\n")
    assert start(str(tmp_path / "gpus")).do("uuids()") == [A, B]


def test_memory_runs_out_and_comes_back(start: Start) -> None:
    one = start(gpus(A, size="64MiB"))
    first = one.do(f"alloc({40 * MIB})")
    assert one.do(f"alloc({40 * MIB})") == -2
    assert one.do(f"cu.cuMemFree_v2(ctypes.c_ulonglong({first}))") == 0
    assert one.do(f"alloc({40 * MIB})") > 0


def test_versions_follow_the_driver(start: Start) -> None:
    for driver, version, lock, reserve in (
        ("580", 13000, 0, 0),
        ("570", 12080, 0, 0),
        ("560", 12060, 1, 0),
    ):
        one = start(SIMCUDA_DRIVER=driver)
        assert one.do("version()") == version
        assert one.do("resolve('cuCheckpointProcessLock', 13000)") == lock
        assert one.do("resolve('cuMemAddressReserve', 12000)") == reserve
    assert one.do(f"lock({one.pid})") == NOT_SUPPORTED


# ---- checkpoints -------------------------------------------------------------------------------


def checkpointed(helper: CudaProcess, target: CudaProcess) -> None:
    assert helper.do(f"lock({target.pid}, 10000)") == 0
    assert helper.do(f"checkpoint({target.pid})") == 0


def test_the_memory_moves_to_another_gpu_and_the_bus_id_stays(start: Start) -> None:
    target, here, there = start(gpus(A)), start(gpus(A)), start(gpus(B, size="2GiB"))
    address = target.do(f"alloc({3 * MIB})")
    target.do(f"put({address}, b'content')")
    assert here.do(f"held({target.pid})") == 3 * MIB
    bus = target.do("bus()")
    checkpointed(here, target)
    assert here.do(f"held({target.pid})") == 0
    for wrong in (None, {}, {A: A}, {B: B}, {A: C}, {B: A}):
        assert there.do(f"restore({target.pid}, {wrong})") == 1
    assert there.do(f"restore({target.pid}, {{{A!r}: {B!r}}})") == 0
    assert there.do(f"state({target.pid})") == LOCKED
    assert there.do(f"unlock({target.pid})") == 0
    assert target.do(f"get({address}, 7)") == b"content"
    assert target.do("uuids()") == [B]
    assert target.do("bus()") == bus
    assert target.do("free_and_total()") == (2045 * MIB, 2048 * MIB)


def test_a_map_names_every_gpu_also_what_is_hidden(start: Start) -> None:
    target, helper = start(gpus(A, B), CUDA_VISIBLE_DEVICES="0"), start(gpus(A, B))
    checkpointed(helper, target)
    assert helper.do(f"restore({target.pid}, {{{A!r}: {A!r}}})") == 1
    assert helper.do(f"restore({target.pid}, {{{A!r}: {B!r}, {B!r}: {B!r}}})") == 1
    assert helper.do(f"restore({target.pid}, {{{A!r}: {B!r}, {B!r}: {A!r}}})") == 0
    assert helper.do(f"unlock({target.pid})") == 0
    assert target.do("uuids()") == [B]


def test_another_chip_is_refused(start: Start) -> None:
    target, helper = start(gpus(A)), start(f"{gpus(A)},{gpus(B, chip='H100')}")
    checkpointed(helper, target)
    assert helper.do(f"restore({target.pid}, {{{A!r}: {B!r}}})") == 1
    assert helper.do(f"restore({target.pid})") == 0


def test_too_little_memory_leaves_it_checkpointed_for_good(start: Start) -> None:
    target, helper = start(gpus(A)), start(f"{gpus(A)},{gpus(B, size='32MiB')}")
    assert target.do(f"alloc({33 * MIB})") > 0
    checkpointed(helper, target)
    assert helper.do(f"restore({target.pid}, {{{A!r}: {B!r}}})") == 2
    assert helper.do(f"restore({target.pid}, {{{A!r}: {A!r}}})") == OS_CALL_FAILED
    assert helper.do(f"unlock({target.pid})") == ILLEGAL_STATE
    assert helper.do(f"state({target.pid})") == CHECKPOINTED


def test_what_others_hold_counts(start: Start) -> None:
    target, other, helper = start(gpus(A)), start(gpus(B)), start(gpus(A, B))
    assert other.do(f"alloc({1000 * MIB})") > 0
    assert target.do(f"alloc({100 * MIB})") > 0
    checkpointed(helper, target)
    assert helper.do(f"restore({target.pid}, {{{A!r}: {B!r}}})") == 2


def test_a_touch_of_checkpointed_memory_kills(start: Start) -> None:
    for allocate in (f"alloc({MIB})", f"mapped({2 * MIB}, False)", f"mapped({2 * MIB}, True)"):
        target, helper = start(), start()
        address = target.do(allocate)
        assert target.do(f"touch({address})") == b"\0"
        checkpointed(helper, target)
        target.begin(f"touch({address})")
        assert target.wait() == -signal.SIGSEGV


def test_driver_570_knows_no_map(start: Start) -> None:
    target, helper = start(SIMCUDA_DRIVER="570"), start(SIMCUDA_DRIVER="570")
    checkpointed(helper, target)
    assert helper.do(f"restore({target.pid}, {{{A!r}: {A!r}}})") == 1
    assert helper.do(f"restore({target.pid})") == 0
    assert helper.do(f"unlock({target.pid})") == 0


def test_ipc_and_managed_memory_are_refused(start: Start) -> None:
    helper = start()
    for prepare in (
        f"ipc_handle(alloc({MIB}))",
        f"export(physical({2 * MIB}, True))",
    ):
        target = start()
        assert target.do(prepare) == 0
        assert helper.do(f"lock({target.pid})") == 0
        assert helper.do(f"checkpoint({target.pid})") == NOT_SUPPORTED
        assert helper.do(f"state({target.pid})") == LOCKED
        assert helper.do(f"unlock({target.pid})") == 0
        assert target.do(f"alloc({MIB})") > 0
    target = start()
    assert target.do(f"alloc({MIB}, 'cuMemAllocManaged', 1)") > 0
    assert helper.do(f"lock({target.pid})") == 0
    assert helper.do(f"checkpoint({target.pid})") == NOT_SUPPORTED
    assert helper.do(f"state({target.pid})") == FAILED
    for operation in ("unlock", "checkpoint", "restore", "lock"):
        assert helper.do(f"{operation}({target.pid})") == ILLEGAL_STATE


def test_a_helper_that_is_killed_leaves_its_operation_to_end(start: Start) -> None:
    target, first, second = start(), start(), start()
    assert target.do("slow(0.3)") == 0
    first.begin(f"lock({target.pid})")
    until(lambda: lock_has_begun(target))
    first.signal(signal.SIGKILL)
    assert second.do(f"lock({target.pid})") == ILLEGAL_STATE  # after that of the first
    assert second.do(f"state({target.pid})") == LOCKED


def lock_has_begun(target: CudaProcess) -> bool:
    """Whether new calls wait."""
    target.begin("free_and_total()")
    if target.answered(0.05):
        target.answer()
        return False
    return True


def test_a_target_that_dies_ends_the_operation(start: Start) -> None:
    target, helper = start(), start()
    target.signal(signal.SIGSTOP)
    helper.begin(f"lock({target.pid}, 100)")
    assert not helper.answered(0.3), "a lock's time limit doesn't hold for a stopped process"
    target.signal(signal.SIGKILL)
    assert helper.answer() == OS_CALL_FAILED


@pytest.mark.root
def test_it_is_reached_through_a_pid_namespace(start: Start) -> None:
    target, helper = start(prefix=("unshare", "--pid", "--fork")), start()
    inside = int(Path(f"/proc/{target.pid}/task/{target.pid}/children").read_text())
    assert target.do("os.getpid()") == 1
    address = target.do(f"alloc({MIB})")
    target.do(f"put({address}, b'content')")
    code, thread = helper.do(f"number('cuCheckpointProcessGetRestoreThreadId', {inside})")
    assert code == 0
    assert Path(f"/proc/{inside}/task/{thread}").exists()
    for operation in ("lock", "checkpoint", "restore", "unlock"):
        assert helper.do(f"{operation}({inside})") == 0
    assert target.do(f"get({address}, 7)") == b"content"


@pytest.mark.root
def test_whoever_has_no_right_to_the_process_is_refused(start: Start) -> None:
    target = start()
    stranger = start()  # as root: another user may be unable to read what lies in this checkout
    assert stranger.do("os.setgroups([]) or os.setresuid(65534, 65534, 65534)") is None
    assert stranger.do(f"lock({target.pid})") == 800
    assert stranger.do(f"state({stranger.pid})") == RUNNING


def test_a_forked_child_is_no_cuda_process(start: Start) -> None:
    target, helper = start(), start()
    child = target.do("os.fork() or os.execvp('sleep', ['sleep', '60'])")
    try:
        until(lambda: helper.do(f"state({child})") == -1)  # once it has come to its exec
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.root
def test_a_checkpointed_process_is_dumped_by_criu_and_restored(
    doubles: build.Doubles, start: Start, tmp_path: Path
) -> None:
    """A program that waits on its streams, moved to another GPU through a CRIU image."""
    criu = tool.find()
    images, said = tmp_path / "images", tmp_path / "said"
    images.mkdir()
    program = build.program(
        ROOT / "tests" / "doubles" / "gpu" / "dumped.c",
        tmp_path / "dumped",
        [doubles.libcuda, doubles.libcudart],
    )
    environment = {"LD_LIBRARY_PATH": str(doubles.folder), "SIMCUDA_DEVICES": gpus(A)}
    with said.open("w") as out:
        target = subprocess.Popen(
            [program],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    helper, there = start(gpus(A)), start(gpus(B))
    pid = target.pid
    until(lambda: said.read_text().count("round") >= 3)
    assert helper.do(f"lock({pid}, 10000)") == 0
    assert helper.do(f"checkpoint({pid})") == 0
    log = images / "log"
    dump = criu.command(
        "dump", "--tree", str(pid), "--images-dir", str(images), "--log-file", str(log), "-v4"
    )
    done = subprocess.run(dump, check=False, timeout=60, capture_output=True)
    assert done.returncode == 0, log.read_text()[-4000:]
    target.wait(timeout=10)
    rounds = said.read_text().count("round")
    restore = criu.command(
        "restore", "--images-dir", str(images), "--log-file", str(log), "-v4", "--restore-detached"
    )
    done = subprocess.run(restore, check=False, timeout=60, capture_output=True)
    assert done.returncode == 0, log.read_text()[-4000:]
    try:
        assert there.do(f"state({pid})") == CHECKPOINTED
        assert there.do(f"restore({pid}, {{{A!r}: {B!r}}})") == 0
        assert said.read_text().count("round") == rounds
        assert there.do(f"unlock({pid})") == 0
        until(lambda: said.read_text().count("round") >= rounds + 3)
        assert "wrong" not in said.read_text()
        assert f"on {B}" in said.read_text().splitlines()[-2]
    finally:
        os.kill(pid, signal.SIGKILL)
        shutil.rmtree(images)
