# SPDX-License-Identifier: Apache-2.0
"""The tables of the cluster file, except [timeouts] (timeouts.py). Each field of a table is a key,
and its type states the allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ...criu_glue.capsule.sandboxes import LOG_KEEP, LOG_MAX
from .access import Role
from .choices import (
    Compress,
    FastPathChoice,
    Outside,
    RewindOn,
    SealChoice,
    Spare,
    Verify,
    Way,
)
from .environment import NAMES
from .values import (
    AbsolutePath,
    Address,
    Command,
    DomainOrNone,
    Endpoint,
    HostNameOrNone,
    Interval,
    Lifetime,
    PathOrSearch,
    Pattern,
    Port,
    Seconds,
    Size,
    Spelling,
    UserOrGroup,
    Value,
    ValueOrFalse,
    Variable,
    read_size,
    write_size,
)

LEAST = 1_000_000
"""A log file must be able to hold this many bytes, because one record has up to 64 KiB."""

MovableName = Annotated[
    str,
    Meta(
        pattern=rf"\A(?:{'|'.join(NAMES)})\Z",
        description=f"a variable that liveshift gives a default, one of {', '.join(NAMES)}",
    ),
]

Share = Annotated[
    float,
    Meta(ge=0.01, le=0.9, description="a share from 0.01 to 0.9, such as 0.2 for a fifth"),
]

Cost = Annotated[
    float,
    Meta(ge=0.0001, le=0.5, description="a share from 0.0001 to 0.5, such as 0.005"),
]

_LOG_SIZE = Spelling('a size from "1MB" on', partial(read_size, low=LEAST), write_size)


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """A machine of the cluster, from its table [hosts.NAME]."""

    name: str  # from the table's header, so it is no key
    address: Address  # underlay: VXLAN and data
    data_port: Port = 7401
    pages_port: Port = 7402
    slots: Annotated[int, Meta(ge=1, le=64)] = 1  # capsules that may run here at once
    spare: Spare = Spare.FLOATING
    memory: Size | None = None  # bytes for incoming capsules; None: no limit
    domain: DomainOrNone = ""  # what fails together with it; "": nothing else does

    @property
    def data(self) -> Endpoint:
        """The endpoint where this host's agent listens for images."""
        return Endpoint(self.address, self.data_port)

    @property
    def pages(self) -> Endpoint:
        """The endpoint where this host's agent listens for pages of memory."""
        return Endpoint(self.address, self.pages_port)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The table [network]: how capsules reach hosts outside the overlay."""

    outside: Outside = Outside.HOST
    relay: HostNameOrNone = ""  # "": the host with the orchestrator's address


@dataclass(frozen=True, kw_only=True)
class Files:
    """Which files a move leaves alone, and which it takes along.

    A listed path covers its own filesystem, not mounts below it. If one listed path lies inside
    another, the longer path decides.
    """

    shared: tuple[AbsolutePath, ...] = ()
    carried: tuple[AbsolutePath, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Env:
    """Which of the caller's variables reach a job, and which are added (environment.py)."""

    pass_: tuple[Pattern, ...] = ("*",)
    drop: tuple[Pattern, ...] = ()
    set_: Mapping[Variable, Value] = field(default_factory=dict, hash=False)
    # Replaces liveshift's own value; None: set nothing.
    defaults: Mapping[MovableName, ValueOrFalse] = field(default_factory=dict, hash=False)

    def select(self, caller: Mapping[str, str]) -> dict[str, str]:
        """The job's variables: those of the caller that pass and are not dropped, then ``set``."""
        passed = {
            name: value
            for name, value in caller.items()
            if any(fnmatchcase(name, pattern) for pattern in self.pass_)
            and not any(fnmatchcase(name, pattern) for pattern in self.drop)
        }
        return passed | dict(self.set_)


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Where liveshift keeps its own files on every host."""

    state: AbsolutePath = Path("/var/lib/liveshift")  # survives a reboot
    run: AbsolutePath = Path("/run/liveshift")  # sockets, gone with a reboot
    keys: AbsolutePath = Path("/etc/liveshift/keys")
    criu: PathOrSearch = None  # None: search for it


@dataclass(frozen=True, kw_only=True)
class GpuSettings:
    """How ranks that hold GPUs move; the lock's deadline is ``timeouts.gpu_lock``."""

    libraries: PathOrSearch = None
    fast_path: FastPathChoice = FastPathChoice.AUTO
    verify: Verify = Verify.SAMPLED


@dataclass(frozen=True, kw_only=True)
class WireSettings:
    """The table [wire]: the connections between two hosts."""

    streams: Annotated[int, Meta(ge=1, le=32)] = 4  # connections that carry memory at once
    compress: Compress = Compress.AUTO
    seal: SealChoice = SealChoice.ON
    trusted: bool = False  # no other party can read or change its traffic


@dataclass(frozen=True, kw_only=True)
class PrecopySettings:
    """The table [precopy]: what the source sends of memory while the job still trains."""

    enabled: bool = True
    way: Way = Way.AUTO
    slow_down: Share | None = None  # the job may lose at most this share of its speed
    max_pause: Seconds | None = None  # the longest pause of the way taken; None: from timeouts
    rounds: Annotated[int, Meta(ge=1, le=1000)] = 30  # at most this many


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """The table [snapshots]: images of whole jobs, which other hosts keep in their memory."""

    every: Interval = "auto"  # seconds between two snapshots of a job; None: there are none
    cost: Cost = 0.005  # with "auto", snapshots may take this share of a job's speed
    mttf: Lifetime | None = None  # seconds until a host fails, on average; None: failures.py
    memory: Size | None = None  # bytes that each host offers to images; None: half of its memory
    rewind_on: RewindOn = RewindOn.FAULT
    max_rewinds: Annotated[int, Meta(ge=0, le=1000)] = 5  # in an hour, after deaths of processes
    fence: Command = ()  # the orchestrator runs it to switch a host off of a job that is not heard
    fence_after: Seconds = 60.0  # once its hosts have been silent for so long
    on_rewind: Command = ()  # the orchestrator runs it after each rewind and resumption


@dataclass(frozen=True, kw_only=True)
class WithinSettings:
    """Seconds until the host must be empty; None: it has no deadline."""

    maintenance: Seconds | None = None
    failing: Seconds | None = None
    notice: Seconds | None = None

    def of(self, severity: str) -> float:
        """Seconds for this severity; 0 if it has no deadline, or if the severity is ""."""
        return getattr(self, severity) or 0.0 if severity else 0.0


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """The orchestrator keeps the last ``keep_ended`` jobs that have ended, with their output. The
    history keeps the last ``keep_events`` events, and older ones of jobs that are kept."""

    keep_ended: Annotated[int, Meta(ge=1, le=10_000)] = 20
    keep_events: Annotated[int, Meta(ge=1000, le=100_000_000)] = 200_000


@dataclass(frozen=True, kw_only=True)
class Logs:
    """A capsule's output goes into files of ``max`` bytes; the last ``keep`` files are kept. A
    sandbox keeps the values that were set when it was built."""

    max: Annotated[int, _LOG_SIZE] = LOG_MAX
    keep: Annotated[int, Meta(ge=1, le=1000)] = LOG_KEEP


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may do what, besides root and a job's owner. A group is written as "@name"."""

    view: tuple[UserOrGroup, ...] = ()
    operate: tuple[UserOrGroup, ...] = ()
    admin: tuple[UserOrGroup, ...] = ()
    relayed: Role = Role.USER  # the highest role of a request that an agent passes on
