# SPDX-License-Identifier: Apache-2.0
"""Where the checkout is to which these tests belong."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTERPOSER = ROOT / "interposer"
SUPPORT = ROOT / "tests" / "support"
