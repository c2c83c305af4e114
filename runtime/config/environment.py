# SPDX-License-Identifier: Apache-2.0
"""A capsule's environment: what makes its processes ranks, and what makes them movable.

Nothing here changes with a move, since every name in it is the capsule's own. The variables of
``MOVABLE`` are defaults: the caller's own value wins, then ``env.defaults`` of the cluster file,
which may also leave a variable alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MASTER_PORT = 29500
INTERFACE = "eth0"
"""The only one in a capsule besides lo."""

LONGEST_STANDSTILL_S = 600
"""No deadline ladder lets a job stand still for longer (timeouts.py)."""

NOT_PASSED = (
    "LD_PRELOAD",
    "LIVESHIFT_SOCKET",
    "LIVESHIFT_LAB",
    "LIVESHIFT_CONNECT",
    "LIVESHIFT_KEY",
    "LIVESHIFT_CONFIG",
    "NOTIFY_SOCKET",
)
"""Variables of the caller that mean something else, or nothing, inside a capsule."""


class Selection(Protocol):
    """What the cluster file says of environments; :class:`.config.Env` is it."""

    @property
    def defaults(self) -> Mapping[str, str | None]: ...

    def select(self, caller: Mapping[str, str]) -> dict[str, str]: ...


@dataclass(frozen=True)
class Place:
    """A capsule as its own processes know it."""

    job: str
    index: int
    count: int
    """Capsules of the job."""
    address: str
    master: str
    """Mobile addresses: its own, and that of the job's first capsule."""
    ranks: bool = True
    """Whether its command gets the variables of a rank; by itself it has no peers to find."""

    @property
    def host_name(self) -> str:
        return f"{self.job}-{self.index}"

    @property
    def capsule(self) -> str:
        return f"{self.job}/{self.index}"


@dataclass(frozen=True)
class Movable:
    """A variable without which a move would fail, be refused, or end the job."""

    name: str
    value: str
    """As in str.format, of the Place's ``host_name``."""
    reason: str
    source: str
    """Where the fact is from: facts are of NCCL 2.26 to 2.32, torch 2.13."""
    fits: Callable[[str], bool] | None = None
    """Whether a caller's value does not defeat moving; None: only ours doesn't."""
    callers: bool = True
    """Whether the caller's own value is kept. One that names the caller's machine is not."""

    def of(self, place: Place) -> str:
        return self.value.format(host_name=place.host_name)

    def accepts(self, value: str) -> bool:
        return self.fits(value) if self.fits else value == self.value


def _longer_than_a_move(value: str) -> bool:
    return value.isascii() and value.isdecimal() and int(value) > LONGEST_STANDSTILL_S


_ONE_INTERFACE = "a capsule has one interface, with the address that moves along"

MOVABLE = (
    Movable(
        "GLOO_SOCKET_IFNAME",
        INTERFACE,
        _ONE_INTERFACE,
        "criu_glue/network/network.py",
        callers=False,
    ),
    Movable(
        "TP_SOCKET_IFNAME", INTERFACE, _ONE_INTERFACE, "criu_glue/network/network.py", callers=False
    ),
    Movable(
        "NCCL_SOCKET_IFNAME",
        INTERFACE,
        _ONE_INTERFACE,
        "criu_glue/network/network.py",
        callers=False,
    ),
    Movable(
        "NCCL_HOSTID",
        "{host_name}",
        "NCCL hashes the machine's name and boot once per process; after a move it would take a"
        " rank for a neighbour of those it left behind. What moves as a whole is one host to NCCL",
        "NCCL src/misc/utils.cc getHostHashOnce; NVIDIA/nccl#2348",
    ),
    Movable(
        "NCCL_RAS_ENABLE",
        "0",
        "NCCL's RAS thread keeps connections of its own after the last communicator is gone, and"
        " takes a paused rank for dead after 60 s",
        "NCCL src/ras/ras.cc, ras_internal.h",
    ),
    Movable(
        "NCCL_IB_DISABLE",
        "1",
        "NCCL's InfiniBand transport holds its devices open until the process ends, and CRIU dumps"
        " none; a capsule reaches its peers by TCP over its mobile address",
        "NCCL src/transport/net_ib.cc; facts on NCCL's lifecycle",
    ),
    Movable(
        "NCCL_NVLS_ENABLE",
        "0",
        "multicast memory (NVLink SHARP) cannot be made again after a restore with drivers before"
        " 610; NCCL decides about it once per process",
        "cuMulticastAddDevice error 101 after restore, drivers 580; NVIDIA/nccl#2115",
    ),
    Movable(
        "NCCL_MNNVL_ENABLE",
        "0",
        "memory shared over a multi-node NVLink domain is tied to the machine",
        "NCCL src/mnnvl.cc",
    ),
    Movable(
        "NCCL_CUMEM_HOST_ENABLE",
        "0",
        "host memory that NCCL shares by driver handles can hang the rebuilding of communicators"
        " after a restore",
        "NVIDIA/nccl#2350",
    ),
    Movable(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "3600",
        "torch ends a process whose NCCL watchdog has made no progress for this long (480 s without"
        " this variable), and a move may hold it up",
        "torch ProcessGroupNCCL.cpp, HeartbeatMonitor",
        fits=_longer_than_a_move,
    ),
    Movable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "every rank asks a key of the store each second, and one rank's trouble then ends them all",
        "torch ProcessGroupNCCL.cpp, exception_dump",
    ),
    Movable(
        "UV_USE_IO_URING",
        "0",
        "an io_uring cannot be dumped; libuv versions that heed this do without it",
        "libuv docs, UV_USE_IO_URING; CRIU",
    ),
)

NAMES = tuple(variable.name for variable in MOVABLE)


def environment(
    place: Place, selection: Selection, caller: Mapping[str, str], interposer: Path, pages: str
) -> dict[str, str]:
    """The variables that the capsule's command starts with; ``pages`` is where the interposer makes
    its pages inside the capsule."""
    env = selection.select(caller)
    for name in NOT_PASSED:
        env.pop(name, None)
    for variable in MOVABLE:
        value = selection.defaults.get(variable.name, variable.of(place))
        if value is not None and not (variable.callers and variable.name in env):
            env[variable.name] = value
    preload = caller.get("LD_PRELOAD", "")  # it goes on being preloaded, after ours
    if place.ranks:
        env |= _of_a_rank(place)
    return env | {
        "HOSTNAME": place.host_name,
        "LD_PRELOAD": ":".join(filter(None, (str(interposer), preload))),
        "LIVESHIFT_PAGES": pages,
        "LIVESHIFT_CAPSULE": place.capsule,
        "LIVESHIFT_ADDRESS": place.address,
    }


RANK_MAKES = ("RANK", "WORLD_SIZE")
"""By these a program takes itself for one of several ranks (torch's env:// needs both)."""


def _of_a_rank(place: Place) -> dict[str, str]:
    """What tells a process which of the job's ranks it is, and where they meet.

    torchrun takes its arguments from PET_* (torch.distributed.argparse_util), so its command line
    stays untouched; plain python finds RANK and company. A job of one capsule has none of these:
    programs take RANK as a sign that a launcher has started them as one of several ranks, and
    torchrun's own defaults are right for one node.
    """
    count, index, port = str(place.count), str(place.index), str(MASTER_PORT)
    return {
        "PET_NNODES": count,
        "PET_NODE_RANK": index,
        "PET_MASTER_ADDR": place.master,
        "PET_MASTER_PORT": port,
        "RANK": index,
        "WORLD_SIZE": count,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": place.master,
        "MASTER_PORT": port,
    }


def in_effect(defaults: Mapping[str, str | None]) -> Iterator[tuple[str, str | None, str]]:
    """Name, value (None: left alone) and reason of every movable variable, by ``env.defaults``; the
    capsule's name stands in it as JOB-N."""
    for variable in MOVABLE:
        own = variable.value.format(host_name="JOB-N")
        yield variable.name, defaults.get(variable.name, own), variable.reason


def remarks(caller: Mapping[str, str], *, ranks: bool = True) -> Iterator[str]:
    """A line for each of the caller's variables that is in the way of moving, for the caller.

    ``ranks``: as in Place; without, the caller's own variables of a rank are passed on, as any
    command does that runs another one, and named.
    """
    if not ranks and (own := [f"{name}={caller[name]}" for name in RANK_MAKES if name in caller]):
        yield (
            f"{' and '.join(own)} of your environment {'are' if own[1:] else 'is'} passed on: the"
            " command may take itself for one of several ranks (`unset` what is not meant for it)"
        )
    for variable in MOVABLE:
        value = caller.get(variable.name)
        if value is None or variable.accepts(value):
            continue
        said = f"{variable.name}={value} of your environment is "
        if variable.callers:
            yield said + f"kept, and in the way of moving this job: {variable.reason}"
        else:
            yield said + f"not used: {variable.reason}"
