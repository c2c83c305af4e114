# SPDX-License-Identifier: Apache-2.0
"""Labs for the steps that move jobs: hosts that all see this machine's one GPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from device_jobs import Device
from gpu_lab import PROBED_S, GpuLab
from lab_place import lab_name
from lab_session import ROOT, LabSession, a_lab, eventually

from liveshift.cuda_snapshot.helper.client import GpuHelper

from .alone import LABS
from .step import Step


@contextmanager
def lab(step: Step, hosts: int, *options: str) -> Iterator[LabSession]:
    """A lab that ends with the step, also with one that is killed. Each host knows by now whether
    its driver bears the fast path; what it found is among the step's figures."""
    name = lab_name("g")
    with (step.work / LABS).open("a") as labs:
        print(name, file=labs)
    where = ("--shared", str(ROOT)) if str(ROOT).startswith(("/tmp/", "/dev/shm/")) else ()
    libraries = step.machine.driver_folder
    if step.simulated:
        libraries = step.work / "driver"
        libraries.mkdir(exist_ok=True)
    made = ("--hosts", str(hosts), *where, "--gpu", f"libraries={libraries}")
    with a_lab(name, step.work, *made, *options) as session:
        if step.simulated:
            _simulate(step, session, hosts, libraries)
        for index in range(hosts):
            said = _probed(session, f"h{index}", libraries)
            step.figure(f"hosts/h{index}", said or "the fast path is available")
        try:
            yield session
        finally:
            shutil.copytree(session.lab.directory / "log", step.work / "log")  # for --keep


def _simulate(step: Step, session: LabSession, hosts: int, libraries: Path) -> None:
    """Let every host have the one simulated GPU, and a helper that sees it."""
    driver = step.machine.driver_folder
    simulated = GpuLab(session, Device(driver.parent, driver, driver), libraries)
    for host in (f"h{index}" for index in range(hosts)):
        simulated.gpus[host] = (step.machine.uuid,)
        simulated.describe(host, os.environ["SIMCUDA_DEVICES"])
    simulated.install()
    simulated.restart_agents()


def _probed(session: LabSession, host: str, libraries: Path) -> str:
    """Why the host has no fast path, "" if it has."""
    run = session.lab.directory / host / "run"
    eventually(lambda: (run / "gpu.sock").exists(), f"the GPU helper of {host}", 30)
    with GpuHelper.start(run, libraries) as helper:
        eventually(lambda: "probed" not in helper.host().fast_path, f"{host}'s probe", PROBED_S)
        return helper.host().fast_path


def in_capsule(step: Step, **more: str) -> tuple[str, ...]:
    """Put before a command: what lets it find the GPU's libraries, and this suite's modules."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    kept |= {name: str(step.work / folder) for name, folder in caches.items()}
    return ("env", *(f"{name}={value}" for name, value in (kept | more).items()))
