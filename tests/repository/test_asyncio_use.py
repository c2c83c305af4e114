# SPDX-License-Identifier: Apache-2.0
"""What of asyncio the product leaves alone, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

from liveshift import errors

PACKAGE = Path(errors.__file__).parent
FOLDERS = ("criu_glue", "cuda_snapshot", "launcher", "runtime")


def test_no_daemon_waits_in_a_way_that_can_lose_a_cancellation() -> None:
    """Until Python 3.12 asyncio.wait_for() returns the result when the task is cancelled just after
    that came (https://github.com/python/cpython/issues/86296); a loop around it goes on for ever.
    """
    loops, losing = 0, []
    for folder in FOLDERS:
        for path in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                    continue
                if (node.value.id, node.attr) == ("asyncio", "wait_for"):
                    losing.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
                loops += (node.value.id, node.attr) == ("asyncio", "timeout")
    assert not losing, f"use asyncio.timeout(): {losing}"
    assert loops > 5, "else nothing was read"
