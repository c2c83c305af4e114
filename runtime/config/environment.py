# SPDX-License-Identifier: Apache-2.0
"""A capsule's environment: what makes its processes ranks, and what makes them movable.

A move changes none of these values, because every name in them is the capsule's own. The variables
of ``MOVABLE`` are defaults: the caller's own value wins, then ``env.defaults`` of the cluster file.
``env.defaults`` may also leave a variable unset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .timeouts import LONGEST_STANDSTILL_S

if TYPE_CHECKING:
    from .tables import Env

MASTER_PORT = 29500
INTERFACE = "eth0"
"""The capsule's only network interface besides lo."""

NOT_PASSED = (
    "LD_PRELOAD",
    "LIVESHIFT_SOCKET",
    "LIVESHIFT_LAB",
    "LIVESHIFT_CONNECT",
    "LIVESHIFT_KEY",
    "LIVESHIFT_CONFIG",
    "NOTIFY_SOCKET",
)
"""The caller's variables that have another meaning, or none, inside a capsule."""


@dataclass(frozen=True)
class CapsuleIdentity:
    """A capsule as its own processes know it."""

    job: str
    index: int
    count: int
    """The number of capsules in the job."""
    address: str
    master: str
    """Mobile address of the job's first capsule; ``address`` is this capsule's own."""
    ranks: bool = True
    """Whether the command gets the variables of a rank. A lone capsule needs none."""

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
    """A template for str.format, which may use the CapsuleIdentity's ``host_name``."""
    reason: str
    source: str
    """The source of this fact. Facts hold for NCCL 2.26 to 2.32 and torch 2.13."""
    fits: Callable[[str], bool] | None = None
    """Whether a caller's value still allows moves; None: only our value does."""
    callers: bool = True
    """Whether the caller's own value is kept. A value that names the caller's machine is not."""

    def of(self, place: CapsuleIdentity) -> str:
        return self.value.format(host_name=place.host_name)

    def accepts(self, value: str) -> bool:
        return self.fits(value) if self.fits else value == self.value


def _longer_than_a_move(value: str) -> bool:
    return value.isascii() and value.isdecimal() and int(value) > LONGEST_STANDSTILL_S


MOVABLE = (
    *(
        Movable(
            name,
            INTERFACE,
            "a capsule has one interface, with the address that moves along",
            "criu_glue/network/network.py",
            callers=False,
        )
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
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
        "NCCL_SET_THREAD_NAME",
        "1",
        "before a move liveshift looks for threads that NCCL has left, and knows them by name; NCCL"
        " gives them none by itself",
        "NCCL src/misc/param.cc; seen with NCCL 2.28.9 (E7 of the GPU suite)",
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
    Movable(
        "GODEBUG",
        "multipathtcp=0",
        "programs in Go listen by MPTCP where the kernel has it, and CRIU dumps no such socket;"
        " they use TCP then",
        "release notes of Go 1.24, net; criu sk-inet.c",
        fits=lambda _: True,  # the survey refuses a socket that is one; most programs have none
    ),
    Movable(
        "ASAN_OPTIONS",
        "verify_asan_link_order=0",
        "a program that gcc has built with AddressSanitizer ends at its start where a preloaded"
        " library, such as the interposer, comes before the sanitizer's; add this to options of"
        " your own",
        "compiler-rt lib/asan/asan_linux.cpp, AsanCheckDynamicRTPrereqs; tried with gcc 12",
        fits=lambda _: True,  # most programs are not built so, and move with any options
    ),
)

NAMES = tuple(variable.name for variable in MOVABLE)


def environment(
    place: CapsuleIdentity,
    selection: Env,
    caller: Mapping[str, str],
    interposer: Path,
    pages: str,
) -> dict[str, str]:
    """The variables with which the capsule's command starts.

    ``pages``: the folder inside the capsule where the interposer makes its pages.
    """
    env = selection.select(caller)
    for name in NOT_PASSED:
        env.pop(name, None)
    for variable in MOVABLE:
        value = selection.defaults.get(variable.name, variable.of(place))
        if value is not None and not (variable.callers and variable.name in env):
            env[variable.name] = value
    # The caller's libraries are still preloaded, but after ours: one that has functions of NCCL or
    # gloo itself, such as another libnccl, would take the place of our hooks if it came first.
    preload = caller.get("LD_PRELOAD", "")
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
"""With these variables a program takes itself for one of several ranks (torch's env:// needs
both)."""


def _of_a_rank(place: CapsuleIdentity) -> dict[str, str]:
    """The variables that say which of the job's ranks a process is, and where the ranks meet.

    torchrun takes its arguments from PET_* (torch.distributed.argparse_util), so its command line
    need not change; plain python finds RANK and the like. A job of one capsule gets none of these.
    Programs take RANK as a sign that a launcher started them as one of several ranks, and
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
    """Yield name, value (None: left unset) and reason of every movable variable under
    ``env.defaults``. The values show the capsule's name as JOB-N."""
    for variable in MOVABLE:
        own = variable.value.format(host_name="JOB-N")
        yield variable.name, defaults.get(variable.name, own), variable.reason


def remarks(caller: Mapping[str, str], *, ranks: bool = True) -> Iterator[str]:
    """Yield a line for each of the caller's variables that prevents moves, for the caller.

    ``ranks``: as in CapsuleIdentity. Without it the caller's own variables of a rank are passed on,
    as by any command that runs another one, and a line names them.
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
        text = f"{variable.name}={value} of your environment is "
        if variable.callers:
            yield text + f"kept, and in the way of moving this job: {variable.reason}"
        else:
            yield text + f"not used: {variable.reason}"
