# SPDX-License-Identifier: Apache-2.0
"""A lab whose hosts have simulated GPUs of their own, on the doubles of tests/doubles/gpu.

The doubles read a host's GPUs from /run/simcuda/devices, and /run is each lab host's own. The
driver's libraries lie in a folder that the cluster file names; it is empty until the hosts have
their GPUs, so that no daemon takes the doubles' default for what a host has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from device_jobs import Device
from lab_place import shared_place
from lab_session import JOBS, LabSession, NewLab, environment, eventually
from moving_job import Job, Step
from reference_runs import References, read_result
from whereabouts import GONE, every_pid, spaces

from liveshift.cuda_snapshot.helper.client import GpuHelper
from liveshift.launcher import lab as labs
from liveshift.launcher.lab.tasks import Task, kill

DEVICES = "/run/simcuda/devices"
PROBED_S = 60.0
"""How long a host may take until it knows what its driver bears."""

ROUND = 20
"""Jobs end after a multiple of so many steps, at which a reference run remembers its memory: one of
FURTHER steps, all ranks together, serves all shorter ones."""

FURTHER = 160

RANKS = str(JOBS / "ranks.py")
TRAIN = str(JOBS / "device_train.py")
MIB = 1 << 20

_HELPER = "liveshift.cuda_snapshot.helper"
_MEMORY = """
import json, pynvml as nvml
nvml.nvmlInit()
gpus = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
print(json.dumps({nvml.nvmlDeviceGetUUID(g): nvml.nvmlDeviceGetMemoryInfo(g).used for g in gpus}))
"""
_OCCUPY = """
import ctypes, sys
cu = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_ulonglong()
assert cu.cuInit(0) == 0
for word in sys.argv[1:]:
    device, size = map(int, word.split(":"))
    assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cu.cuCtxSetCurrent(context) == 0
    assert cu.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
print("taken", flush=True)
sys.stdin.read()
"""


def uuid(host: int, gpu: int) -> str:
    """Not that of the doubles' default, which no host of ours has."""
    return f"GPU-1ab00000-{host:04x}-4000-8000-{gpu:012x}"


class GpuLab:
    """``session`` is the lab as in other tests; ``gpus`` are the UUIDs of each host's GPUs."""

    def __init__(self, session: LabSession, device: Device, libraries: Path) -> None:
        self.session = session
        self.device = device
        self.libraries = libraries
        self.gpus: dict[str, tuple[str, ...]] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}

    # ---- making it ----

    def give(self, host: str, *sizes: int) -> None:
        """Let a host have one GPU of each of these sizes, in MiB; for daemons that start later."""
        index = int(host.removeprefix("h"))
        self.gpus[host] = tuple(uuid(index, gpu) for gpu in range(len(sizes)))
        self.sizes[host] = tuple(size * MIB for size in sizes)
        gpus = zip(self.gpus[host], sizes, strict=True)
        self.describe(host, *(f"{gpu}:H200:{size}MiB" for gpu, size in gpus))

    def describe(self, host: str, *entries: str) -> None:
        """Let a host have what these entries of the doubles' inventory say."""
        words = [*self.entry(host), "sh", "-c", f"mkdir -p ${{0%/*}}; cat >{DEVICES}", DEVICES]
        subprocess.run(words, input="\n".join(entries), text=True, check=True)

    def install(self) -> None:
        """Put the driver's libraries where the hosts look for them."""
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (self.libraries / name).symlink_to(self.device.cuda / name)

    def restart_agents(self) -> None:
        """With helpers of their own, of which no older one is left; waits for what they find."""
        for host in self.gpus:
            self.session.stop_agent(host)
            kill(self.helpers(host))
        for host in self.gpus:
            self.session.start_agent(host)
        for host in self.gpus:
            self.wait_probed(host)

    def wait_probed(self, host: str) -> None:
        """Until the host's helper knows whether its driver bears the fast path: it must."""
        run = self.session.lab.directory / host / "run"
        eventually(lambda: (run / "gpu.sock").exists(), f"the GPU helper of {host}", 20)
        with GpuHelper.start(run, self.libraries) as helper:
            why = ""

            def known() -> bool:
                nonlocal why
                why = helper.host().fast_path
                return "being probed" not in why

            eventually(known, f"{host} to be probed", PROBED_S)
        assert why == "", f"{host}: {why}"

    # ---- looking at it ----

    def entry(self, host: str) -> list[str]:
        return labs.entry(self.session.lab.machine(host))

    def helpers(self, host: str) -> list[Task]:
        """The helper processes of a host, found among the machine's."""
        init = self.session.lab.machine(host).init
        assert init is not None
        space = os.stat(f"/proc/{init.pid}/ns/pid").st_ino
        found = []
        for pid in every_pid():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if _HELPER in words and space in spaces(pid):
                    found += [task] if (task := Task.of(pid)) else []
            except GONE:
                pass
        return found

    def kill_helpers(self, host: str) -> None:
        found = self.helpers(host)
        assert found, f"{host} has no GPU helper"
        kill(found)

    def used(self, host: str) -> dict[str, int]:
        """Device bytes in use by GPU, as NVML tells them on the host."""
        done = subprocess.run(
            [*self.entry(host), *self._with_driver(), sys.executable, "-c", _MEMORY],
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, int] = json.loads(done.stdout)
        assert tuple(found) == self.gpus[host]
        return found

    def wait_empty(self, host: str) -> None:
        """Nobody must hold memory of the host's GPUs, soon."""
        eventually(lambda: not any(self.used(host).values()), f"{host}'s GPUs to be empty", 20)

    def wait_forgotten(self, host: str) -> None:
        """The host's helper must hold no device memory for anybody, soon."""
        run = self.session.lab.directory / host / "run"
        with GpuHelper.start(run, self.libraries) as helper:
            eventually(lambda: not helper.held(), f"{host}'s helper to hold nothing", 20)

    @contextmanager
    def occupied(self, host: str, left: int, gpu: str = "") -> Iterator[None]:
        """Somebody else takes the memory of a GPU of the host, by its UUID, or of all of them, but
        for ``left`` bytes of each."""
        found = zip(self.used(host).items(), self.sizes[host], strict=True)
        sizes = [
            f"{index}:{size - used - left}"
            for index, ((each, used), size) in enumerate(found)
            if gpu in ("", each) and size - used > left
        ]
        words = [*self._with_driver(), sys.executable, "-c", _OCCUPY, *sizes]
        with self.somebody(host, "taken", *words):
            yield

    @contextmanager
    def somebody(self, host: str, ready: str, *words: str) -> Iterator[None]:
        """A program on the host that says ``ready``, and ends when its standard input does."""
        with subprocess.Popen(
            [*self.entry(host), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            try:
                assert program.stdout.readline() == f"{ready}\n"
                yield
            finally:
                program.stdin.close()
                program.wait(10)

    def _with_driver(self) -> tuple[str, ...]:
        return ("env", f"LD_LIBRARY_PATH={self.libraries}")

    # ---- jobs ----

    def train(self, *more: str, ranks: int = 1, steps: int = 3000) -> tuple[str, ...]:
        """jobs/device_train.py, ``ranks`` of it in one capsule, until there is enough."""
        tree = (sys.executable, RANKS, str(ranks)) if ranks > 1 else ()
        return (
            *self.device.environment,
            *tree,
            sys.executable,
            TRAIN,
            "--out",
            "{out}",
            "--steps",
            str(steps),
            "--pace",
            "0.25",  # a step takes a core for a third of this
            "--enough",
            "{out}/enough",
            "--round",
            str(ROUND),
            *more,
        )

    def start(self, name: str, *more: str, nnodes: int = 1, ranks: int = 1) -> Job:
        """Such a job, under way."""
        job = self.session.start(name, self.train(*more, ranks=ranks), nnodes=nnodes)
        for rank in range(nnodes * ranks):
            job.wait_step(5, rank)
        return job

    def where(self, job: Job, rank: int = 0) -> str:
        """The UUID of the GPU that a rank used in its last step."""
        last: Step = job.steps(rank)[-1]
        return str(last["gpu"])

    def assert_whole(self, job: Job, references: References, ranks: int = 1) -> None:
        """End the job; its losses, and each byte of its device memory, are those of a run of as
        many steps that nobody disturbed."""
        job.stop()
        steps = len(job.steps())
        result = job.result(ranks)
        words, further = [*job.argv, "--remember"], max(steps, FURTHER // ranks)
        if (idle := "--forked-workers") in words:  # they compute nothing
            del words[words.index(idle) : words.index(idle) + 2]
        for option, value in (("--steps", str(further)), ("--enough", "/none")):
            words[words.index(option) + 1] = value
        reference = references.directory(words, job.nnodes)
        result.assert_equals(read_result(reference, ranks, steps))


def gpu_lab(
    new_lab: NewLab, place: Path, sizes: Mapping[str, tuple[int, ...]], *options: str
) -> GpuLab:
    """A lab whose hosts have GPUs of these sizes, in MiB; ``options`` are those of ``lab up``.

    It ends as every lab does, and the helpers with it: they are in the hosts' pid namespaces.
    """
    device = Device.built(place / "doubles")
    libraries = place / f"driver-{len(list(place.glob('driver-*')))}"
    libraries.mkdir()
    hosts = ("--hosts", str(len(sizes)), "--gpu", f"libraries={libraries}")
    made = GpuLab(new_lab(*hosts, *options), device, libraries)
    for host, each in sizes.items():
        made.give(host, *each)
    made.install()
    made.restart_agents()
    return made


@cache
def gpu_references(place: Path) -> References:
    """Runs of the same jobs without liveshift, for a whole test session, on a machine of three
    GPUs."""
    devices = ",".join(f"{uuid(0xFFFF, gpu)}:H200:4GiB" for gpu in range(3))
    directory = shared_place(place, "gpu-references")
    return References(directory, environment(SIMCUDA_DEVICES=devices))
