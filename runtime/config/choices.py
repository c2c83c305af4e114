# SPDX-License-Identifier: Apache-2.0
"""The words that keys of the cluster file choose between.

The command line shows some of them in its help, so this file imports nothing.
"""

from __future__ import annotations

from enum import StrEnum


class Spare(StrEnum):
    """Whether a host may receive capsules that move."""

    FLOATING = "floating"  # jobs start here, and any free slot may receive
    DEDICATED = "dedicated"  # kept idle: only receives migrations
    NONE = "none"  # jobs start here; never receives


class Outside(StrEnum):
    """Whose address hosts outside the cluster see."""

    HOST = "host"  # that of the host which the capsule is on: a move breaks such connections
    RELAY = "relay"  # that of one host, through which all of them go: they outlast a move


class FastPath(StrEnum):
    """How device memory leaves a host."""

    AUTO = "auto"  # from the GPU to the wire, where the host's probe says that the driver bears it
    OFF = "off"  # into host memory, by the driver's own checkpoint


class Verify(StrEnum):
    """Which bytes of device memory are compared after a move."""

    SAMPLED = "sampled"
    FULL = "full"
    OFF = "off"


class Compress(StrEnum):
    """Whether memory is compressed on its way."""

    AUTO = "auto"  # while the link is measured to be slower than the compressor
    NEVER = "never"
    ALWAYS = "always"


class Seal(StrEnum):
    """Whether memory is sealed on its way."""

    ON = "on"
    OFF = "off"  # only on a network that the file calls trusted


class Way(StrEnum):
    """How memory goes to the destination."""

    AUTO = "auto"  # what costs the job least (cost/model.py)
    STOP = "stop"  # all of it while the job is paused
    ROUND = "round"  # once while the job trains; what is written meanwhile during the pause
    ROUNDS = "rounds"  # again and again, until rounds find no less than those before


class Severity(StrEnum):
    """Why a host must become empty; each has a deadline of its own in the cluster file."""

    MAINTENANCE = "maintenance"  # an operator wants to work on the host
    FAILING = "failing"  # the host still works: memory errors, a fan, a GPU that retires pages
    NOTICE = "notice"  # the host will be taken away: a spot instance, a power cut
