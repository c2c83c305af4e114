# SPDX-License-Identifier: Apache-2.0
"""One whole run (`make demo`, `make test`) on a machine at a time.

They measure times and make labs: two at once would fail each other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from ..errors import Refused

LOCK = Path("/run/liveshift-whole-run.lock")
HOLDER = "LIVESHIFT_WHOLE_RUN"
"""In the environment of what a whole run starts: it is part of that one."""
HANDED = "handed to {}"
"""What it says if scripts/alone.sh took the lock before it became the process with this id."""


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Hold the machine for ``what``; raises Refused with the holder's name and pid.

    Whoever may not write there (no root) goes on without: they can make no lab anyway.
    """
    if os.environ.get(HOLDER) == HANDED.format(os.getpid()):
        with _named():
            yield
        return
    if os.environ.get(HOLDER):
        yield
        return
    try:
        file = _locked(what)
    except PermissionError:
        yield
        return
    with file:
        file.truncate(0)
        file.write(f"{what} (process {os.getpid()}, in {os.getcwd()})")
        file.flush()
        with _named():
            yield


@contextmanager
def _named() -> Iterator[None]:
    """What is started meanwhile finds this process as the holder; then the file goes."""
    os.environ[HOLDER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[HOLDER]
        LOCK.unlink(missing_ok=True)


def _locked(what: str) -> TextIO:
    """The file, held by us."""
    while True:
        file = LOCK.open("a+")  # its content is its holder's until it is ours
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another whole run"
            raise Refused(
                f"{what} cannot start: {holder} runs on this machine",
                hint="wait for its end, or interrupt it; both would disturb each other",
            ) from None
        with suppress(FileNotFoundError):  # its last holder has just removed it
            if os.path.samestat(os.fstat(file.fileno()), LOCK.stat()):
                return file
        file.close()
