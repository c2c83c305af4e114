# SPDX-License-Identifier: Apache-2.0
"""A lock that allows one daemon of a kind for each state directory.

It is flock(2) on a file that also names the holder's pid. The kernel drops the lock when its holder
ends. A clean release removes the file. After a crash the file stays, but is not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ...errors import LiveshiftError, Refused


@contextlib.contextmanager
def held(state: Path, daemon: str) -> Iterator[None]:
    """Hold ``state`` for a daemon ("agent", "orchestrator") during the with block. Make it if
    it is missing.

    Raises Refused with the holder's pid when another daemon holds it, LiveshiftError when the lock
    cannot be made. Directories that were made for it are removed again if they are empty.
    """
    new = [folder for folder in (state, *state.parents) if not folder.exists()]
    path = state / f"{daemon}.lock"
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = _take(path, daemon)
    except OSError as error:
        raise LiveshiftError(f"cannot lock {state} for the {daemon}: {error}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while locked: a waiting daemon then sees that it is gone
        os.close(lock)
        with contextlib.suppress(OSError):
            for folder in new:
                folder.rmdir()


def _take(path: Path, daemon: str) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(path, lock):
                with contextlib.suppress(OSError):  # a full disk: the lock holds without the pid
                    os.truncate(lock, 0)
                    os.write(lock, f"{os.getpid()}\n".encode())
                return lock
        except BlockingIOError:
            pid = os.pread(lock, 32, 0).decode().strip() or "unknown"
            os.close(lock)
            raise Refused(
                f"another {daemon} runs with the state directory {path.parent}: pid {pid}",
                hint="it goes on, and nothing was changed; to replace it, stop it first. A second"
                " cluster on this machine needs its own paths.state and paths.run",
            ) from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its holder has just removed it


def _is(path: Path, lock: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(lock))
    return False
