# SPDX-License-Identifier: Apache-2.0
"""The programs that make networks: ip, bridge and nft, each call one batch."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from ...errors import LiveshiftError
from . import nft_library

HINT = "`liveshift doctor` checks VXLAN, bridges and nftables on this host"


def ip(*commands: str, netns: str | None = None) -> None:
    """Commands of ip(8) in one go; the first that fails ends it."""
    where = ["-netns", netns] if netns else []
    run(["ip", *where, "-batch", "-"], "\n".join(commands) + "\n")


def nft(rules: str, netns: str | None = None) -> None:
    """Rules in one transaction: all of them at once, or none."""
    inside = ["ip", "netns", "exec", netns] if netns else []
    if inside or (done := nft_library.run(rules)) is None:
        run([*inside, "nft", "-f", "-"], rules)
        return
    well, said = done
    if not well:
        raise LiveshiftError(f"network: nftables refused: {said.strip()}\n{rules}", hint=HINT)


def nft_elements(*what: str) -> list[Any] | None:
    """What a set or map holds, as nft's JSON has it; None when there is no such thing."""
    said = _listed(" ".join(what))
    if said is None:
        return None
    (found,) = (e for e in json.loads(said)["nftables"] if "metainfo" not in e)
    return list(next(iter(found.values())).get("elem", []))


def _listed(what: str) -> str | None:
    if (answer := nft_library.run(f"list {what}", nft_library.JSON)) is not None:
        well, said = answer
        return said if well else None
    command = ["nft", "-j", "list", *what.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def links(*selection: str) -> list[dict[str, Any]]:
    """What the kernel says of devices (asked by netlink: /sys may show another namespace's).

    Empty when the one that is selected does not exist.
    """
    done = subprocess.run(
        ["ip", "-json", "link", "show", *selection], capture_output=True, text=True, check=False
    )
    return list(json.loads(done.stdout or "[]")) if done.returncode == 0 else []


def run(command: list[str], stdin: str | None = None) -> str:
    """What the command printed; raises LiveshiftError with what it complained of."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LiveshiftError(
            f"network: `{' '.join(command)}` failed: {said}" + (f"\n{stdin}" if stdin else ""),
            hint=HINT,
        )
    return done.stdout
