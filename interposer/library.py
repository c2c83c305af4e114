# SPDX-License-Identifier: Apache-2.0
"""The interposer's library file: where it is installed, and which functions it hooks."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ..errors import LiveshiftError
from .elf import ElfError, shared_library

LIBRARY = "liveshift_interposer.so"


def library_path() -> Path:
    """The installed interposer, for LD_PRELOAD. Raises LiveshiftError when it isn't installed."""
    path = Path(str(files("liveshift.interposer") / LIBRARY))
    if not path.is_file():
        raise LiveshiftError(
            f"the interposer {path} does not exist",
            hint="Install liveshift by pip or meson: a bare source tree has no compiled part.",
        )
    return path


def missing_symbols(libtorch_path: Path, need: str = "required") -> list[str]:
    """The hooked names of this need that this libtorch_cpu.so does not export; an empty list is
    good.

    ``required``: names without which the interposer sees no collectives of a gloo job;
    ``identity``: names without which there is no boundary. This loads neither library. Raises
    ElfError when it can't read one of the files.
    """
    names = [name for its, name in hooked_symbols() if its == need]
    with shared_library(libtorch_path) as torch:
        return [name for name in names if torch.address_of(name) is None]


def hooked_symbols() -> list[tuple[str, str]]:
    """(need, mangled name) of each hook, from the library's own table; see entry_points.h."""
    path = library_path()
    with shared_library(path) as library:
        address = library.address_of("liveshift_interposer_symbols")
        if address is None:
            raise ElfError(f"{path} has no table of hooked names: it is not our interposer")
        table = library.bytes_until(address, b"\0\0").decode()
    return [(need, name) for need, _, name in (entry.partition(" ") for entry in table.split("\0"))]
