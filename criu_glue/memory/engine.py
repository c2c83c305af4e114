# SPDX-License-Identifier: Apache-2.0
"""The C library of this package, ``memory.so``. Who uses a part of it brings its declarations."""

from __future__ import annotations

import os
from importlib.resources import files
from typing import Any

import cffi

PAGE = 4096
CHUNK = 1 << 20
"""The most bytes of a chunk of pages, its head included (chunk.h), which is what the wire takes."""


def load(declarations: str) -> tuple[cffi.FFI, Any]:
    """The library with these functions; they run without Python's lock."""
    ffi = cffi.FFI()
    ffi.cdef(declarations)
    return ffi, ffi.dlopen(str(files(__package__) / "memory.so"))


def raised(number: int, what: str) -> OSError:
    """The error that a function meant by returning ``-errno``."""
    return OSError(-number, os.strerror(-number), what)
