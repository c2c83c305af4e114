# SPDX-License-Identifier: Apache-2.0
"""What a kept image must still be when it is used: the digest of its memory, and a hash of each of
its files.

An image of a suspended job may lie in memory for days, and a bit of it may flip meanwhile. A
restored job would then compute something else. The sums are a file beside the image. An image that
an earlier version of liveshift has saved in a directory has none; it is taken as it is, since its
files had the right SHA-256 when they were loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from ....errors import StepFailed
from .held_note import NOTE

FILE = "sums"

_UNFINISHED = "sums.new"
_OTHERS = (FILE, _UNFINISHED, NOTE)  # the note changes when a loaded image gets another number
_CHUNK = 1 << 20


class _Sums(msgspec.Struct, frozen=True):
    """``memory``: as in digest.h. ``files``: path below the image's directory → xxh3-64. A later
    version may have further fields."""

    memory: bytes
    files: dict[str, int]


def write(images: Path, memory: bytes) -> None:
    """Note what the image in ``images`` is now. Raises OSError."""
    unfinished = images / _UNFINISHED
    unfinished.write_bytes(msgspec.msgpack.encode(_Sums(memory, _files(images))))
    unfinished.replace(images / FILE)


def memory(images: Path) -> bytes:
    """Return the digest of the memory at the time when the image was kept; b"" if the image has no
    sums. Raises OSError, StepFailed."""
    noted = _read(images)
    return noted.memory if noted is not None else b""


def damage(images: Path, memory: Callable[[], bytes]) -> str:
    """Say what of the image is not as it was kept; "" if all is. ``memory`` computes the digest of
    the memory, which takes about 0.1 s per GB. Raises OSError, what ``memory`` raises, and
    StepFailed if the sums cannot be read: that says nothing about the image."""
    if (noted := _read(images)) is None:
        return ""
    found = _files(images)
    for name in sorted(noted.files.keys() | found.keys()):
        if name not in found:
            return f"{name} is gone"
        if found[name] != noted.files.get(name):
            return f"{name} has changed since it was kept"
    if (digest := memory()) != noted.memory:
        return f"its memory has the digest {digest.hex()}, and was kept with {noted.memory.hex()}"
    return ""


def _read(images: Path) -> _Sums | None:
    try:
        return msgspec.msgpack.decode((images / FILE).read_bytes(), type=_Sums)
    except FileNotFoundError:
        return None
    except (ValueError, msgspec.DecodeError) as error:
        raise StepFailed(
            "ship",
            f"{images / FILE} cannot be read, so the image is not compared: {error}",
            hint="remove that file if the image is to be taken as it is",
        ) from error


def _files(images: Path) -> dict[str, int]:
    paths = (path for path in images.rglob("*") if path.is_file())
    names = {str(path.relative_to(images)): path for path in paths}
    return {name: _hash(path) for name, path in names.items() if name not in _OTHERS}


def _hash(path: Path) -> int:
    found = xxhash.xxh3_64()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            found.update(data)
    return found.intdigest()
