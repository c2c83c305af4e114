# SPDX-License-Identifier: Apache-2.0
"""Whether the software of a host fits an image that another one has written. The same rule holds
for a move and for an image that was kept, in memory or in a directory. Pure functions.

What certainly cannot work is refused: CRIU reads images of earlier versions, and not of later ones;
another major version of liveshift writes other images. What may work is let pass with a warning. A
kernel of another version may lack what the processes use, or show it in another way. Nothing but a
restore can find that out.
"""

from __future__ import annotations

import re

from ..messages import HostFacts
from .preflight_findings import PreflightFinding


def findings(source: HostFacts, here: HostFacts, host: str) -> list[PreflightFinding]:
    """Return what of the versions on ``host`` prevents a restore there, each with a remedy.
    ``source``: the host that writes the image, or has written it."""
    found: list[PreflightFinding] = []
    theirs, ours = release(source.criu), release(here.criu)
    if theirs and ours and theirs > ours:
        text = (
            f"the image is of CRIU {source.criu}, and {host} has CRIU {here.criu}, which cannot"
            " read images of a later version"
        )
        least = ".".join(map(str, theirs))
        found.append((text, f"install CRIU {least} or later on {host}, or choose another host"))
    theirs, ours = release(source.liveshift), release(here.liveshift)
    if theirs and ours and theirs[0] != ours[0]:
        text = f"the image is of liveshift {source.liveshift}, and {host} has {here.liveshift}"
        remedy = f"install liveshift {theirs[0]}.x on {host}, or choose another host"
        found.append((text, remedy))
    return found


def warnings(source: HostFacts, here: HostFacts, host: str) -> list[str]:
    """Return, as text, which differences may make a restore on ``host`` fail."""
    found: list[str] = []
    for what, theirs, ours in (
        ("Linux", source.kernel, here.kernel),
        ("liveshift", source.liveshift, here.liveshift),
    ):
        releases = release(theirs), release(ours)
        if all(releases) and releases[0] != releases[1]:
            found.append(
                f"the image is of a host with {what} {theirs}, and {host} has {ours}: the restore"
                " may fail"
            )
    return found


def release(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version such as 6.12.9-cloud or 4.2; None if it does not
    begin with two. Two versions with the same ones count as equal."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None
