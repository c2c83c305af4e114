# SPDX-License-Identifier: Apache-2.0
"""What this machine is and what it lacks. ``python -m gpu_suite.machine`` prints it as JSON: the
driver is asked in a process that may hang without harm."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

PLACES = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/local/cuda/lib64")
"""Where the linker may not look: Kubernetes' device plugins mount the driver at the first."""

TOOLS = ("ip", "bridge", "tc", "nft", "nsenter", "unshare", "setpriv", "mount", "cc")
ALL_NAMESPACES = ("--pid", "--fork", "--mount", "--net", "--uts", "--ipc", "--time")


@dataclass(frozen=True)
class Machine:
    """``lacks``: by need, why it is not met. Sizes in bytes; an empty path: there is none."""

    gpu: str
    uuid: str
    driver: str
    cuda: str
    simulated: bool
    gpu_bytes: int
    gpu_free_bytes: int
    ram_bytes: int
    cores: int
    kernel: str
    python: str
    torch: str
    torch_cuda: bool
    libcuda: str
    libcudart: str
    libnccl: str
    lacks: dict[str, str] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)

    @property
    def library_path(self) -> str:
        """For LD_LIBRARY_PATH: where these libraries are, the driver's own last."""
        found = [str(Path(p).parent) for p in (self.libcudart, self.libnccl, self.libcuda) if p]
        return ":".join(dict.fromkeys(found))

    @property
    def driver_folder(self) -> Path:
        return Path(self.libcuda).parent


def probe() -> Machine | None:
    """This machine, by what LD_LIBRARY_PATH and the usual places have; None without a driver."""
    opened = _opened("libcuda.so.1")
    if opened is None:
        return None
    cuda, libcuda = opened
    began = time.perf_counter()
    if cuda.cuInit(0) != 0:
        return None
    init_s = time.perf_counter() - began
    version, total = ctypes.c_int(), ctypes.c_size_t()
    name, uuid = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if cuda.cuDeviceGetName(name, 256, 0) != 0:
        return None
    cuda.cuDeviceGetUuid_v2(uuid, 0)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
    simulated = hasattr(cuda, "simcuda_enqueue")
    asked = _asked_nvml()
    torch, torch_cuda = _torch()
    return Machine(
        gpu=name.value.decode(),
        uuid=f"GPU-{UUID(bytes=uuid.raw)}",
        driver=asked.pop("driver") or ("simulated" if simulated else "unknown"),
        cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        simulated=simulated,
        gpu_bytes=total.value,
        gpu_free_bytes=asked.pop("free", total.value),
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=torch,
        torch_cuda=torch_cuda,
        libcuda=libcuda,
        libcudart=_found("libcudart.so.13"),
        libnccl=_found("libnccl.so.2"),
        lacks=dict(_lacks()),
        seen={"cuInit_s": round(init_s, 3), **asked, **_system()},
    )


def _opened(soname: str) -> tuple[ctypes.CDLL, str] | None:
    for name in (soname, *(f"{place}/{soname}" for place in PLACES)):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        mapped = [
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if soname.partition(".so")[0] + ".so" in line
        ]
        return library, str(Path(mapped[0]).with_name(soname)) if mapped else name
    return None


def _found(soname: str) -> str:
    """On the library path, beside torch (NVIDIA's wheels), or in the toolkit."""
    places = [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        places += sorted(Path(root).glob("*/lib"))
    for place in (*places, *map(Path, PLACES), Path("/usr/lib/x86_64-linux-gnu")):
        if (place / soname).is_file():
            return str(place / soname)
    return ""


def _asked_nvml() -> dict[str, Any]:
    from liveshift.cuda_snapshot import devices

    seen = devices.inventory()
    if not seen.devices:
        return {"driver": seen.driver or "", "nvml": seen.why_none}
    first = seen.devices[0]
    return {
        "driver": seen.driver or "",
        "free": first.free_bytes,
        "gpus": len(seen.devices),
        "persistence": first.persistence,
        "mig": first.mig,
    }


def _torch() -> tuple[str, bool]:
    code = "import torch; print(torch.__version__, int(torch.cuda.is_available()))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        version, usable = done.stdout.split()
    except (subprocess.TimeoutExpired, ValueError):
        return "", False
    return version, usable == "1"


def _lacks() -> Iterator[tuple[str, str]]:
    if os.geteuid() != 0:
        yield "root", "it takes root"
    done = (
        subprocess.run(["unshare", *ALL_NAMESPACES, "true"], capture_output=True, text=True)
        if shutil.which("unshare")
        else None
    )
    if done is None or done.returncode != 0:
        said = done.stderr.strip() if done else "there is no unshare"
        yield "namespaces", f"this machine makes no namespaces: {said}"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        yield "tools", f"missing here: {', '.join(missing)}"
    try:
        from liveshift.criu_glue.criu import tool
        from liveshift.errors import LiveshiftError

        try:
            works, said = tool.find().check()
        except LiveshiftError as error:
            works, said = False, str(error)
        if not works:
            yield "criu", f"no CRIU works here: {said}"
        from liveshift.interposer.library import library_path

        try:
            library_path()
        except LiveshiftError as error:
            yield "interposer", str(error)
    except ImportError as error:
        yield "criu", f"liveshift is not installed: {error}"
    if not _found("libnccl.so.2"):
        yield "nccl", "there is no libnccl.so.2 here"


def _system() -> dict[str, Any]:
    """What else a reader of the figures wants to know; what is not told is left out."""
    seen: dict[str, Any] = {"load": os.getloadavg()[0]}
    for name, path in (
        ("ptrace_scope", "/proc/sys/kernel/yama/ptrace_scope"),
        ("thp", "/sys/kernel/mm/transparent_hugepage/enabled"),
    ):
        if Path(path).is_file():
            seen[name] = Path(path).read_text().strip()
    if shutil.which("nvidia-smi"):
        asked = "pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.current,clocks.max.memory"
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        seen["pcie (gen max, gen now, width, memory clock)"] = done.stdout.strip()
    return seen


def from_json(text: str) -> Machine | None:
    told = json.loads(text)
    return Machine(**told) if told else None


if __name__ == "__main__":
    found = probe()
    print(json.dumps(asdict(found) if found else None))
