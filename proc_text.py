# SPDX-License-Identifier: Apache-2.0
"""Reads files of /proc in which the names of tasks and files stand.

Such names are bytes that a job chooses. The kernel cuts the name of a thread after 15 bytes, in the
middle of a character too (prctl(2), PR_SET_NAME), and it escapes line feeds only (proc(5)).
"""

from __future__ import annotations

import os
from pathlib import Path


def read(path: str | Path) -> str:
    """The text of a file of /proc. What is no UTF-8 in it is kept as in the names of files
    (os.fsdecode). Raises OSError."""
    with open(path, "rb") as file:
        return os.fsdecode(file.read())


def lines(path: str | Path) -> list[str]:
    """Its lines, without line feeds; none if the file is empty, as many are once their task has
    ended. str.splitlines would split inside names, too."""
    text = read(path)
    return text.removesuffix("\n").split("\n") if text else []
