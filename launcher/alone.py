# SPDX-License-Identifier: Apache-2.0
"""Allows one whole run (`make demo`, `make test`) at a time on a machine.

Whole runs measure times and make labs, so two at once would make each other fail.
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
"""This environment variable marks all that a whole run starts as a part of that run."""
HANDED = "handed to {}"
"""The value of ``HOLDER`` if scripts/alone.sh took the lock and then became the process with this
id."""


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Hold the machine for ``what``. Raises Refused with the holder's name and pid.

    A user who may not write the lock file (no root) goes on without it: such a user can make no
    lab anyway.
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
    """Name this process as the holder to all it starts. Remove the lock file at the end."""
    os.environ[HOLDER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[HOLDER]
        LOCK.unlink(missing_ok=True)


def _locked(what: str) -> TextIO:
    """Return the lock file, locked by this process. Raises Refused if another process holds it."""
    while True:
        file = LOCK.open("a+")  # "a+": until we hold the lock, the content belongs to its holder
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
        with suppress(FileNotFoundError):  # the last holder has just removed it
            if os.path.samestat(os.fstat(file.fileno()), LOCK.stat()):
                return file
        file.close()
