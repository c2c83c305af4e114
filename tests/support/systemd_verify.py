# SPDX-License-Identifier: Apache-2.0
"""What systemd itself says of our units; for tests that are marked as needing systemd-analyze."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path


def complaints(units: Iterable[Path], empty: Path) -> list[str]:
    """Of these units. In the empty folder a wrong one is made first: it has to be complained of."""
    wrong = empty / "liveshift-wrong.service"
    wrong.write_text("[Service]\nExecStart=/nowhere\n")
    assert _said([wrong]) != [], "systemd-analyze checks nothing here"
    return _said(units)


def _said(units: Iterable[Path]) -> list[str]:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    # Other units of the machine are read along; only what is said of ours counts.
    return [line for line in done.stderr.splitlines() if "liveshift" in line]
