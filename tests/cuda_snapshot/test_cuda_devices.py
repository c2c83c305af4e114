# SPDX-License-Identifier: Apache-2.0
"""GPUs by NVML and the driver's checkpoint functions: none, simulated ones, broken ones.

The simulated NVML is a module of the same name found first by the child process that asks; the
simulated driver is a small shared library. Both answer as the real ones do by their headers.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from doubles.gpu.build import compiler

from liveshift.cuda_snapshot import checkpoint, devices, driver

NVML = """
import types
class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value
NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 3, 4
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_FUNCTION_NOT_FOUND = 12, 13
NVML_DEVICE_MIG_ENABLE = 1
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "580.159.03"
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(handle): return types.SimpleNamespace(total=150 << 30, free=140 << 30)
def nvmlDeviceGetPciInfo(handle): return types.SimpleNamespace(busId=f"00000000:0{handle}:00.0")
def nvmlDeviceGetCudaComputeCapability(handle): return (9, 0)
def nvmlDeviceGetMigMode(handle):
    if handle == 1: raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return [1, 0]
def nvmlDeviceGetPersistenceMode(handle): return 1
def nvmlDeviceGetComputeRunningProcesses(handle):
    if handle == 1: raise NVMLError(NVML_ERROR_NO_PERMISSION)
    held = {70: 1 << 30, 71: None}
    return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held.items()]
def nvmlDeviceGetMPSComputeRunningProcesses(handle): return []
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a simulated NVML that the asking child will import."""
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "pynvml.py").write_text(NVML)
    return tmp_path / "pynvml.py"


def test_this_host_is_described_without_an_error() -> None:
    told = devices.inventory()
    assert bool(told.devices) == (told.why_none is None)
    if not Path("/dev/nvidiactl").exists():
        assert told.devices == ()
        assert told.why_none


def test_gpus_are_described(nvml: Path) -> None:
    told = devices.inventory()
    assert (told.driver, told.why_none) == ("580.159.03", None)
    first, second = told.devices
    assert first == devices.NvmlGpu(
        index=0,
        uuid="GPU-0",
        name="NVIDIA H200",
        memory_bytes=150 << 30,
        free_bytes=140 << 30,
        pci_bus_id="00000000:00:00.0",
        compute_capability=(9, 0),
        mig=True,
        persistence=True,
        processes={70: 1 << 30, 71: None},
        mps=False,
    )
    assert told.used(70) == {"GPU-0": 1 << 30}
    assert told.used(71) == told.used(72) == {}
    assert second.mig is None, "a GPU without MIG has no mode"
    assert second.processes is None, "not everybody may see them"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def nvmlInit(): raise NVMLError(12)", "no NVIDIA driver"),
        ("def nvmlInit(): raise NVMLError(18)", "can't be started: NVML error 18"),
        ("def nvmlDeviceGetCount(): return 0", "sees no GPU"),
        ("def nvmlDeviceGetUUID(handle): raise NVMLError(15)", "can't describe the GPUs"),
        ("import os; os._exit(3)", "ended with 3"),
    ],
)
def test_why_there_is_none_is_said(nvml: Path, body: str, words: str) -> None:
    nvml.write_text(NVML + body + "\n")
    told = devices.inventory()
    assert told.devices == ()
    assert words in str(told.why_none)


def test_a_hanging_nvml_is_given_up(nvml: Path) -> None:
    nvml.write_text(NVML + "def nvmlInit():\n    import time\n    time.sleep(600)\n")
    begin = time.monotonic()
    told = devices.inventory(deadline_s=0.5)
    assert time.monotonic() - begin < 5
    assert "did not answer within 0.5 s" in str(told.why_none)
    assert devices._stuck == [], "the child was killed"


FUNCTIONS = tuple(checkpoint._FUNCTIONS)
DRIVER = """
int cuDriverGetVersion(int *version) { *version = %d; return %d; }
%s
"""


def _library(folder: Path, version: int, result: int, functions: tuple[str, ...]) -> str:
    source = folder / "driver.c"
    bodies = "\n".join(f"int {name}(void) {{ return 0; }}" for name in functions)
    source.write_text(DRIVER % (version, result, bodies))
    library = folder / "libcuda.so.1"
    subprocess.run([*compiler(), "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_a_driver_that_can_checkpoint(tmp_path: Path) -> None:
    found = checkpoint.survey(_library(tmp_path, 13000, 0, FUNCTIONS))
    assert found == checkpoint.Driver((13, 0), (), None)


def test_an_older_driver_says_what_is_missing(tmp_path: Path) -> None:
    found = checkpoint.survey(_library(tmp_path, 12060, 0, ()))
    assert found.cuda == (12, 6)
    assert found.missing == FUNCTIONS


def test_a_driver_that_answers_with_an_error(tmp_path: Path) -> None:
    found = checkpoint.survey(_library(tmp_path, 0, 803, FUNCTIONS))
    assert found.cuda is None
    assert "SYSTEM_DRIVER_MISMATCH (803)" in str(found.why_none)
    assert found.missing == ()


def test_no_driver_and_no_library(tmp_path: Path) -> None:
    assert "no CUDA driver" in str(checkpoint.survey("libliveshift-none.so.1").why_none)
    (tmp_path / "junk.so").write_text("no ELF")
    assert "no CUDA driver" in str(checkpoint.survey(str(tmp_path / "junk.so")).why_none)


def test_results_are_checked_by_name() -> None:
    driver.check(0, "anything")
    with pytest.raises(driver.CudaError, match=r"lock failed: CUDA_ERROR_NOT_READY \(600\)"):
        driver.check(600, "lock")
    with pytest.raises(driver.CudaError, match=r"CUDA_ERROR_\? \(12345\)"):
        driver.check(12345, "lock")
