# SPDX-License-Identifier: Apache-2.0
"""Loads the C library of this package, ``memory.so``. Each user brings its own declarations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.resources import files
from typing import Any

PAGE = 4096
CHUNK = 1 << 20
"""A chunk of pages has at most this many bytes with its head (chunk.h): the limit of the wire."""

LIBRARY = str(files(__package__) / "memory.so")
"""Tests put a path here, of a library that they have built with a sanitizer."""


_declared: list[Callable[[], object]] = []
"""One function for each call of load(); it makes the two objects."""


class _Later:
    """Has the attributes of what ``make`` returns. It is called when one is first used."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._make(), name)
        setattr(self, name, found)  # from now on it is found without this function
        return found


def load(declarations: str) -> tuple[Any, Any]:
    """Return cffi's object and the library with these functions. They run without Python's lock.

    Both are made when they are first used, by any thread: cffi reads declarations slowly, and an
    agent starts sooner without. Raises OSError then.
    """
    lock = threading.Lock()
    made: list[tuple[Any, Any]] = []

    def both() -> tuple[Any, Any]:
        with lock:  # types of two objects of cffi are not each other's
            if not made:
                import cffi

                ffi = cffi.FFI()
                ffi.cdef(declarations)
                made.append((ffi, ffi.dlopen(LIBRARY)))
            return made[0]

    _declared.append(both)
    return _Later(lambda: both()[0]), _Later(lambda: both()[1])


def warm() -> None:
    """Make all that :func:`load` has put off. An agent does so before a job is paused: the first
    move would pause it for longer than the next ones. Raises OSError."""
    for make in _declared:
        make()
