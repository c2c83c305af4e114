# SPDX-License-Identifier: Apache-2.0
"""The pool of threads that scan a process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from liveshift.criu_glue.memory.source.pulling import Pulling


def test_a_scan_that_fails_lets_the_others_end_first() -> None:
    """A scan that goes on would protect pages whose writes the next look has to find."""
    nothing: Any = None
    pulling, failed, done = Pulling(2, nothing), threading.Event(), []

    def fails() -> None:
        failed.set()
        raise OSError("too many open files")

    def lasts() -> None:
        assert failed.wait(10)
        threading.Event().wait(0.2)
        done.append(True)

    try:
        with pytest.raises(OSError, match="too many open files"):
            pulling.scan([fails, lasts])
        assert done == [True]
        pulling.scan([lambda: done.append(True)] * 3)
        assert done == [True] * 4
    finally:
        pulling.close()
