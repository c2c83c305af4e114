# SPDX-License-Identifier: Apache-2.0
"""Loads the C library of this package, ``memory.so``. Each user brings its own declarations."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import cffi

PAGE = 4096
CHUNK = 1 << 20
"""A chunk of pages has at most this many bytes with its head (chunk.h): the limit of the wire."""

LIBRARY = str(files(__package__) / "memory.so")
"""Tests put a path here, of a library that they have built with a sanitizer."""


def load(declarations: str) -> tuple[cffi.FFI, Any]:
    """Return cffi's object and the library with these functions. They run without Python's lock."""
    ffi = cffi.FFI()
    ffi.cdef(declarations)
    return ffi, ffi.dlopen(LIBRARY)
