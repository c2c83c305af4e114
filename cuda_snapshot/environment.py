# SPDX-License-Identifier: Apache-2.0
"""The environment of liveshift's own processes that use the CUDA driver."""

from __future__ import annotations

import os
from pathlib import Path

LEFT_OUT = ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
"""These variables are meant for jobs: the interposer must not load into our processes, and a map of
GPUs names all GPUs of the host."""


def environment(libraries: Path | None) -> dict[str, str]:
    """Our own environment without the variables that are meant for jobs. If ``libraries`` is given,
    the process looks there first for the driver's libraries."""
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML numbers GPUs in this order
    if libraries is not None:
        before = kept.get("LD_LIBRARY_PATH")
        folder = libraries.absolute()  # the process may start in another folder than ours
        kept["LD_LIBRARY_PATH"] = f"{folder}:{before}" if before else str(folder)
    return kept
