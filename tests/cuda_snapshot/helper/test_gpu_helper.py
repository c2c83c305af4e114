# SPDX-License-Identifier: Apache-2.0
"""The resident GPU helper: what it does to processes, on the simulated driver."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from cuda_process import doubles
from gpu_helper import MIB, A, B, C, StartHelper, StartProcess, busy, helper, process
from waits import until

from liveshift.cuda_snapshot.checkpoint import CudaState, uuid_text
from liveshift.cuda_snapshot.fast_path.probe import PROBING
from liveshift.cuda_snapshot.helper.calls import LOG, Lock
from liveshift.errors import LiveshiftError, StepFailed

__all__ = ["doubles", "helper", "process"]


def test_a_process_goes_through_all_states_to_other_gpus(
    helper: StartHelper, process: StartProcess
) -> None:
    gpu, target = helper(), process()
    address = target.do(f"alloc({3 * MIB})")
    target.do(f"put({address}, b'content')")
    assert gpu.state(target.pid) is CudaState.RUNNING
    assert gpu.used(target.pid) == {A: 3 * MIB}
    gpu.lock(target.pid, 5)
    assert gpu.state(target.pid) is CudaState.LOCKED
    gpu.checkpoint(target.pid)
    assert gpu.state(target.pid) is CudaState.CHECKPOINTED
    assert gpu.used(target.pid) == {}
    gpu.restore(target.pid, [(A, B), (B, A)])
    assert gpu.state(target.pid) is CudaState.LOCKED
    gpu.unlock(target.pid)
    assert gpu.state(target.pid) is CudaState.RUNNING
    assert target.do(f"get({address}, 7)") == b"content"
    assert gpu.used(target.pid) == {B: 3 * MIB}


def test_a_rollback_needs_no_map(helper: StartHelper, process: StartProcess) -> None:
    gpu, target = helper(), process()
    gpu.lock(target.pid, 5)
    gpu.unlock(target.pid)
    gpu.lock(target.pid, 5)
    gpu.checkpoint(target.pid)
    gpu.restore(target.pid)
    gpu.unlock(target.pid)
    assert target.do("alloc(1)") > 0


def test_the_host_is_described(helper: StartHelper, process: StartProcess) -> None:
    # On the module's GPUs the trial of an earlier test's helper may still hold memory.
    first, second = (uuid_text(os.urandom(16)) for _ in range(2))
    two = f"{first}:H200:1GiB,{second}:H200:1GiB"
    gpu = helper(SIMCUDA_DEVICES=two, SIMCUDA_DRIVER="580.159.03")
    target = process(two)
    target.do(f"alloc({MIB})")
    host = gpu.host()
    assert (host.cuda, host.driver, host.can_remap) == ((13, 0), "580.159.03", True)
    assert [each.uuid for each in host.gpus] == [first, second]
    while host.fast_path == PROBING:  # its processes are nobody's
        assert host.gpus[0].processes == {target.pid: MIB}
        host = gpu.host()
    assert host.gpus[0].processes == {target.pid: MIB}
    assert host.why_none is None


def test_what_is_no_cuda_process_has_no_state(helper: StartHelper) -> None:
    gpu = helper()
    assert gpu.state(os.getpid()) is None
    assert gpu.used(os.getpid()) == {}
    with pytest.raises(StepFailed, match=r"gpu lock: process \d+: .*it does not use CUDA"):
        gpu.lock(os.getpid(), 1)
    with pytest.raises(StepFailed, match="gpu restore thread"):
        gpu.hold(os.getpid())


# ---- failures ----------------------------------------------------------------------------------


def test_work_that_does_not_end_leaves_it_running(
    helper: StartHelper, process: StartProcess, tmp_path: Path
) -> None:
    gpu, target, over = helper(), process(), tmp_path / "over"
    assert target.do(f"until_there({str(over)!r})") == 0
    with pytest.raises(
        StepFailed, match=r"gpu lock: .*NOT_READY.*submitted to its GPU did not end.*it runs on"
    ):
        gpu.lock(target.pid, 0.05)
    assert gpu.state(target.pid) is CudaState.RUNNING
    over.touch()
    gpu.lock(target.pid, 20)
    assert gpu.state(target.pid) is CudaState.LOCKED


def test_what_is_out_of_order_is_said_with_the_state(
    helper: StartHelper, process: StartProcess
) -> None:
    gpu, target = helper(), process()
    for call, words in (
        (gpu.checkpoint, "it is not locked; it runs on"),
        (gpu.unlock, "it is not locked; it runs on"),
        (gpu.restore, "it is not checkpointed; it runs on"),
    ):
        with pytest.raises(StepFailed, match=f"ILLEGAL_STATE.*{words}"):
            call(target.pid)
    gpu.lock(target.pid, 5)
    with pytest.raises(StepFailed, match="it is not running; it is locked, and can be unlocked"):
        gpu.lock(target.pid, 5)
    assert gpu.state(target.pid) is CudaState.LOCKED, "whoever locked it, it was not this call"


def test_managed_memory_loses_it_and_shared_memory_does_not(
    helper: StartHelper, process: StartProcess
) -> None:
    gpu, managed, shared = helper(), process(), process()
    assert managed.do(f"alloc({MIB}, 'cuMemAllocManaged', 1)") > 0
    assert shared.do(f"ipc_handle(alloc({MIB}))") == 0
    gpu.lock(managed.pid, 5)
    with pytest.raises(StepFailed, match=r"managed memory.*it is lost and can only be killed"):
        gpu.checkpoint(managed.pid)
    assert gpu.state(managed.pid) is CudaState.FAILED
    gpu.lock(shared.pid, 5)
    with pytest.raises(StepFailed, match=r"shared with another process.*can be unlocked"):
        gpu.checkpoint(shared.pid)
    gpu.unlock(shared.pid)


def test_a_map_must_be_full_and_a_wrong_one_can_be_mended(
    helper: StartHelper, process: StartProcess
) -> None:
    gpu, target = helper(), process()
    gpu.lock(target.pid, 5)
    gpu.checkpoint(target.pid)
    for wrong in ([(A, B)], [(A, B), (B, B)], [(A, C), (B, A)]):
        with pytest.raises(StepFailed, match=r"the map must name every GPU.*it is checkpointed"):
            gpu.restore(target.pid, wrong)
    with pytest.raises(LiveshiftError, match="'MIG-1' is no UUID"):
        gpu.restore(target.pid, [(A, "MIG-1"), (B, A)])
    gpu.restore(target.pid, [(A, A), (B, B)])


def test_a_gpu_without_room_is_not_tried(helper: StartHelper, process: StartProcess) -> None:
    gpu, target, other = helper(), process(), process(CUDA_VISIBLE_DEVICES="1")
    assert target.do(f"alloc({300 * MIB})") > 0
    assert other.do(f"alloc({500 * MIB})") > 0
    gpu.lock(target.pid, 5)
    gpu.checkpoint(target.pid)
    swapped = [(A, B), (B, A)]
    with pytest.raises(
        StepFailed, match=rf"needs 315 MB and 268 MB to spare on {B}, which has 549 MB free"
    ):
        gpu.restore(target.pid, swapped)
    with pytest.raises(StepFailed, match="this host has no GPU"):
        gpu.restore(target.pid, swapped, needed={C: MIB})
    with pytest.raises(StepFailed, match="needs 839 MB"):
        gpu.restore(target.pid, swapped, needed={A: 800 * MIB})
    gpu.restore(target.pid, swapped, needed={B: 268 * MIB})
    gpu.unlock(target.pid)
    assert gpu.used(target.pid) == {B: 300 * MIB}


def test_a_process_that_dies_meanwhile_is_said_to_be_gone(
    helper: StartHelper, process: StartProcess
) -> None:
    gpu, target = helper(), process()
    target.do("slow(60)")
    with ThreadPoolExecutor() as threads:
        locking = threads.submit(gpu.lock, target.pid, 60)
        until(lambda: busy(gpu, target))
        target.end()
        with pytest.raises(StepFailed, match="OPERATING_SYSTEM"):
            locking.result(20)
    assert gpu.state(target.pid) is None


def test_driver_570_restores_where_it_was_only(helper: StartHelper, process: StartProcess) -> None:
    gpu, target = helper(SIMCUDA_DRIVER="570"), process(SIMCUDA_DRIVER="570")
    assert not gpu.host().can_remap
    gpu.lock(target.pid, 5)
    gpu.checkpoint(target.pid)
    with pytest.raises(LiveshiftError, match=r"\(CUDA 12.8\) cannot restore onto other GPUs"):
        gpu.restore(target.pid, [(A, B), (B, A)])
    gpu.restore(target.pid, [(A, A), (B, B)])
    gpu.unlock(target.pid)


# ---- turns -------------------------------------------------------------------------------------


def test_one_operation_at_a_time_and_questions_meanwhile(
    helper: StartHelper, process: StartProcess, tmp_path: Path
) -> None:
    gpu, slow, other, over = helper(), process(), process(), tmp_path / "over"
    assert slow.do(f"until_there({str(over)!r})") == 0
    with ThreadPoolExecutor() as threads:
        locking = threads.submit(gpu.lock, slow.pid, 60)
        until(lambda: busy(gpu, other))
        assert gpu.state(slow.pid) is CudaState.RUNNING
        assert gpu.host().gpus
        with pytest.raises(
            StepFailed,
            match=r"gpu lock: the GPU helper \d+ did not begin within 0.01 s: .* busy with gpu lock"
            r" for \d+ s",
        ):
            gpu.lock(other.pid, 5, turn_s=0.01)
        waiting = threads.submit(gpu.lock, other.pid, 5)
        assert gpu.host().gpus
        assert not waiting.done()
        over.touch()
        waiting.result(20)
        assert gpu.state(slow.pid) is CudaState.LOCKED, "it had its turn first"
        locking.result(20)
    assert gpu.state(other.pid) is CudaState.LOCKED


def test_what_a_client_asked_for_that_has_gone_is_not_done(
    helper: StartHelper, process: StartProcess, tmp_path: Path
) -> None:
    gpu, slow, other, over = helper(), process(), process(), tmp_path / "over"
    assert slow.do(f"until_there({str(over)!r})") == 0
    with ThreadPoolExecutor() as threads:
        locking = threads.submit(gpu.lock, slow.pid, 60)
        until(lambda: busy(gpu, other))
        with gpu.connection() as connection:
            connection.channel.send(msgspec.msgpack.encode(Lock(other.pid, 60, 5)))
            connection.usable = False  # it is closed
        over.touch()
        locking.result(20)
    until(lambda: "its client has gone" in (tmp_path / LOG).read_text())
    assert gpu.state(other.pid) is CudaState.RUNNING
