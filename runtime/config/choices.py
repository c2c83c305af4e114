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
    """Which address hosts outside the cluster see."""

    HOST = "host"  # the address of the capsule's host: a move breaks such connections
    RELAY = "relay"  # the relay's address; all connections pass the relay and outlast a move


class FastPathChoice(StrEnum):
    """How device memory leaves a host."""

    AUTO = "auto"  # from the GPU to the wire, if the host's probe finds that the driver bears it
    OFF = "off"  # the driver's own checkpoint copies it into host memory


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


class SealChoice(StrEnum):
    """Whether memory is sealed on its way."""

    ON = "on"
    OFF = "off"  # only on a network that the file calls trusted


class Way(StrEnum):
    """How memory goes to the destination."""

    AUTO = "auto"  # the way that costs the job least (cost/model.py)
    STOP = "stop"  # all memory goes while the job is paused
    ROUND = "round"  # memory goes once while the job trains; written pages go during the pause
    ROUNDS = "rounds"  # memory goes again and again, until rounds stop getting smaller


class Severity(StrEnum):
    """Why a host must become empty; the cluster file has a deadline for each severity."""

    MAINTENANCE = "maintenance"  # an operator wants to work on the host
    FAILING = "failing"  # the host still works: memory errors, a fan, a GPU that retires pages
    NOTICE = "notice"  # the host will be taken away: a spot instance, a power cut


class RewindOn(StrEnum):
    """Which ends of a command take a job with a snapshot back to it."""

    FAULT = "fault"  # the death of a rank by a signal, or what follows from a fault
    ANY = "any"  # also an exit code other than 0
