# SPDX-License-Identifier: Apache-2.0
"""Errors of the GPU in the kernel's log: "NVRM: Xid …" (docs.nvidia.com/deploy/xid-errors)."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

_XID = re.compile(r"Xid \([^)]*\): (\d+), (?:pid=\S+, )?(?:name=\S+, )?(.*)")


def errors() -> Counter[str]:
    """How often each error is in the log now; empty if the log cannot be read."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace").stdout
    except OSError:
        return Counter()
    return Counter(f"Xid {found[1]}: {found[2].strip()}" for found in _XID.finditer(log))
