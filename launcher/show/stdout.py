# SPDX-License-Identifier: Apache-2.0
"""Tells a stdout that cannot be written, such as a file on a full disk, from all other errors.

Python reports it as an OSError like any other, without a name. A reader that went away
(BrokenPipeError) stays what it is: commands expect it. A stream that the caller has closed
(``>&-``) is /dev/null.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(OSError):
    """stdout cannot be written; what it was to get is lost."""


class _Checked(io.BufferedWriter):
    # Not a FileIO: a Ctrl-C just after its write would let the buffer write the same once more.
    def write(self, data: ReadableBuffer, /) -> int:
        with _named():
            return super().write(data)

    def flush(self) -> None:
        with _named():
            super().flush()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


def open_closed() -> None:
    """Open /dev/null where the caller has closed stdin, stdout or stderr: Python has None there.

    The descriptors 0 to 2 are taken too. Otherwise the next file or socket gets one of them, and
    what a child process prints goes there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the program


def watch() -> None:
    """Let each write to stdout that fails raise OutputError from now on. A stream that a caller of
    :func:`..cli.main` has put in its place is left as it is."""
    ours = sys.stdout
    if ours is not sys.__stdout__ or not isinstance(ours, io.TextIOWrapper):
        return
    ours.flush()
    checked = _Checked(io.FileIO(ours.fileno(), "wb", closefd=False))
    sys.stdout = io.TextIOWrapper(
        checked, ours.encoding, ours.errors, line_buffering=ours.line_buffering
    )


def drop() -> None:
    """Write nothing to stdout any more: Python would try what is left once again as it ends, and
    complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
