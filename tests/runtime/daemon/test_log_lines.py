# SPDX-License-Identifier: Apache-2.0
"""A message of a daemon's log is one line; a traceback below it has its own lines."""

from __future__ import annotations

import logging
import sys

from liveshift.runtime.daemon.log_lines import LogLines


def test_a_text_from_elsewhere_forges_no_line() -> None:
    forged = "why\nERROR liveshift: the key is stolen\x1b[2J"
    made = logging.makeLogRecord({"name": "liveshift", "msg": "m1: %s", "args": (forged,)})
    shown = LogLines("%(name)s: %(message)s").format(made)
    assert shown == "liveshift: m1: why ERROR liveshift: the key is stolen?[2J"


def test_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError("x")
    except ValueError:
        made = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    lines = LogLines("%(message)s").format(made).splitlines()
    assert (lines[0], lines[-1]) == ("failed", "ValueError: x")
    assert len(lines) > 3
