# SPDX-License-Identifier: Apache-2.0
"""The Python mirror of ``page.h``: what each process of a job tells about its collectives.

``page.h`` is the truth about the layout, who writes a field and when; ``FIELDS`` repeats its order
and sizes, and tests/test_page_layout.py holds the two equal. The pages lie in a directory that the
job's own user may write to, so nothing found there is trusted: no link is followed, no pipe waited
for, no size believed.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import LiveshiftError
from .elf import ElfError, shared_library

log = logging.getLogger("liveshift.page")
_complained: set[Path] = set()

MAGIC = b"LIVESHFT"
LAYOUT = 1
SIZE = 4096
LIBRARY = "liveshift_interposer.so"

# Fields of struct liveshift_page in order, with struct's format codes.
FIELDS: tuple[tuple[str, str], ...] = (
    ("magic", "8s"),
    ("layout", "I"),
    ("kinds", "I"),
    ("pid", "i"),
    ("rank", "i"),
    ("world_size", "i"),
    ("local_rank", "i"),
    ("created_ns", "Q"),
    ("version", "24s"),
    ("command", "64s"),
    ("last_started_ns", "Q"),
    ("last_finished_ns", "Q"),
)
HEADER = struct.Struct("<" + "".join(code for _, code in FIELDS))

# Fields of struct liveshift_counter; `counters` follows the header, `reserved` fills the page.
COUNTER_FIELDS: tuple[tuple[str, str], ...] = (("kind", "24s"), ("started", "Q"), ("finished", "Q"))
COUNTER = struct.Struct("<" + "".join(code for _, code in COUNTER_FIELDS))
COUNTERS = 64

PAGES = 4096
"""Pages that are read of one capsule at most: each is the time of a system call or three."""


class PageError(LiveshiftError):
    """A file is not a page, or is one whose layout this version of liveshift doesn't know."""


@dataclass(frozen=True)
class Counter:
    """Calls of one kind of collective since the program's start."""

    started: int
    finished: int


@dataclass(frozen=True)
class Page:
    """One process's page as it was at the moment of reading.

    Times are nanoseconds of CLOCK_MONOTONIC in the process's own time namespace: compare them with
    each other, not with the reader's clock. ``rank``, ``world_size`` and ``local_rank`` are None
    where the job's environment didn't say. A changed ``created_ns`` under the same ``pid`` is a
    new program, whose counters began at 0.
    """

    pid: int
    rank: int | None
    world_size: int | None
    local_rank: int | None
    created_ns: int
    version: str
    command: str
    last_started_ns: int
    last_finished_ns: int
    counters: dict[str, Counter]

    @property
    def started(self) -> int:
        """Collectives begun, of all kinds."""
        return sum(c.started for c in self.counters.values())

    @property
    def finished(self) -> int:
        """Collectives that came back, of all kinds, by return or by exception."""
        return sum(c.finished for c in self.counters.values())

    @property
    def in_flight(self) -> int:
        """Collectives begun and not back; the process counts on while we read, hence the floor."""
        return max(0, self.started - self.finished)


def read(path: Path) -> Page:
    """Read one page.

    Raises FileNotFoundError when there is none, PageError when the file is something else, can't be
    read, or has a layout other than ours.
    """
    raw = _raw(path)
    magic, layout, kinds, pid, *rest = HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise PageError(f"{path} is not a page of the interposer: it begins with {magic!r}")
    if layout != LAYOUT:
        raise PageError(
            f"{path} has page layout {layout}; this version of liveshift reads {LAYOUT}",
            hint="The job runs with the interposer of another version of liveshift, and keeps it "
            "until it ends.",
        )
    if kinds > COUNTERS:
        raise PageError(f"{path} is damaged: {kinds} kinds of collectives, at most {COUNTERS} fit")
    rank, world_size, local_rank, created, version, command, started, finished = rest
    counters = {}
    for i in range(kinds):
        kind, begun, back = COUNTER.unpack_from(raw, HEADER.size + i * COUNTER.size)
        counters[_text(kind)] = Counter(begun, back)
    return Page(
        pid=pid,
        rank=_or_none(rank),
        world_size=_or_none(world_size),
        local_rank=_or_none(local_rank),
        created_ns=created,
        version=_text(version),
        command=_text(command),
        last_started_ns=started,
        last_finished_ns=finished,
        counters=counters,
    )


def pages(directory: Path) -> list[Page]:
    """All pages of a capsule that can be read, by pid; empty where the directory doesn't exist.

    Includes those of processes that have ended. What can't be read is logged and left out: what a
    job writes there must not keep its host from reporting on the others.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        _complain(directory, f"cannot list the pages in {directory}: {error.strerror}")
        return []
    # Other names: a page still being made is called .<pid>.
    numbers = [name for name in names if name.isascii() and name.isdecimal() and name[0] != "0"]
    if len(numbers) > PAGES:
        _complain(directory, f"{len(numbers)} pages in {directory}, at most {PAGES} are read")
    found = []
    for name in sorted(numbers, key=int)[:PAGES]:
        path = directory / name
        try:
            page = read(path)
        except FileNotFoundError:
            continue  # gone since the listing, with its capsule
        except PageError as error:
            _complain(path, error.message)
            continue
        if str(page.pid) == name:
            found.append(page)
        else:
            _complain(path, f"{path} is the page of process {page.pid}")
    return found


def _complain(path: Path, text: str) -> None:
    """Once for each file, and for a thousand of them at most."""
    if path not in _complained and len(_complained) < 1000:
        _complained.add(path)
        log.warning("%s", text)


def library_path() -> Path:
    """The installed interposer, for LD_PRELOAD. Raises LiveshiftError when it isn't installed."""
    path = Path(str(files("liveshift.interposer") / LIBRARY))
    if not path.is_file():
        raise LiveshiftError(
            f"the interposer {path} is not there",
            hint="Install liveshift by pip or meson: a bare source tree has no compiled part.",
        )
    return path


def missing_symbols(libtorch_path: Path) -> list[str]:
    """The required hooked names that this libtorch_cpu.so does not export; empty is good.

    Neither library is loaded. Raises ElfError when one of the files can't be read.
    """
    names = [name for need, name in hooked_symbols() if need == "required"]
    with shared_library(libtorch_path) as torch:
        return [name for name in names if torch.address_of(name) is None]


def hooked_symbols() -> list[tuple[str, str]]:
    """("required" or "optional", mangled name) of each hook, from the library's own table."""
    path = library_path()
    with shared_library(path) as library:
        address = library.address_of("liveshift_interposer_symbols")
        if address is None:
            raise ElfError(f"{path} has no table of hooked names: it is not our interposer")
        table = library.bytes_until(address, b"\0\0").decode()
    return [(need, name) for need, _, name in (entry.partition(" ") for entry in table.split("\0"))]


def _raw(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PageError(f"cannot open the page {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PageError(f"{path} is not a page of the interposer: not a regular file")
        raw = os.pread(fd, SIZE, 0)
    except OSError as error:
        raise PageError(f"cannot read the page {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(raw) < SIZE:
        raise PageError(f"{path} is not a page of the interposer: {len(raw)} of {SIZE} bytes")
    return raw


def _text(padded: bytes) -> str:
    """Decode; what a terminal might obey is replaced, since the job's user chose the bytes."""
    text = padded.split(b"\0", 1)[0].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _or_none(number: int) -> int | None:
    return None if number < 0 else number
