# SPDX-License-Identifier: Apache-2.0
"""What the processes that use the driver for liveshift are started with."""

from __future__ import annotations

import os
from pathlib import Path

LEFT_OUT = ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
"""A job's interposer has no business there; and a map of GPUs names those of the whole host."""


def environment(libraries: Path | None) -> dict[str, str]:
    """Our own, without what is meant for jobs; the driver's libraries are looked for in
    ``libraries`` first where it is given."""
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML counts
    if libraries is not None:
        before = kept.get("LD_LIBRARY_PATH")
        folder = libraries.absolute()  # they may be started in another folder than ours
        kept["LD_LIBRARY_PATH"] = f"{folder}:{before}" if before else str(folder)
    return kept
