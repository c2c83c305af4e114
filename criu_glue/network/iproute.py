# SPDX-License-Identifier: Apache-2.0
"""Runs the programs that configure networks: ip, bridge and nft. Each call is one batch."""

from __future__ import annotations

import functools
import json
import subprocess
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ...errors import LiveshiftError
from . import nft_library

HINT = "`liveshift doctor` checks VXLAN, bridges and nftables on this host"

P = ParamSpec("P")
T = TypeVar("T")
_turn = threading.RLock()


def in_turn(work: Callable[P, T]) -> Callable[P, T]:
    """For functions that read the kernel's tables and then change them: one thread at a time."""

    @functools.wraps(work)
    def wait_and_do(*args: P.args, **kwargs: P.kwargs) -> T:
        with _turn:
            return work(*args, **kwargs)

    return wait_and_do


def ip(*commands: str, netns: str | None = None) -> None:
    """Run several commands of ip(8) in one batch, which ends at the first failure.

    Raises LiveshiftError."""
    where = ["-netns", netns] if netns else []
    run(["ip", *where, "-batch", "-"], "\n".join(commands) + "\n")


def nft(rules: str, netns: str | None = None) -> None:
    """Load rules of nftables in one transaction: all of them or none. Raises LiveshiftError."""
    inside = ["ip", "netns", "exec", netns] if netns else []
    if inside or (done := nft_library.run(rules)) is None:
        run([*inside, "nft", "-f", "-"], rules)
        return
    well, said = done
    if not well:
        raise LiveshiftError(f"network: nftables refused: {said.strip()}\n{rules}", hint=HINT)


def nft_elements(*what: str) -> list[Any] | None:
    """The elements of a set or map in nft's JSON form; None if there is no such object."""
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
    """What the kernel reports of network devices; [] if the selected one does not exist.

    ip(8) asks by netlink, because /sys may show the devices of another namespace.
    """
    done = subprocess.run(
        ["ip", "-json", "link", "show", *selection], capture_output=True, text=True, check=False
    )
    return list(json.loads(done.stdout or "[]")) if done.returncode == 0 else []


def run(command: list[str], stdin: str | None = None) -> str:
    """Run a command and return its output; raises LiveshiftError with its error message."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LiveshiftError(
            f"network: there is no program {command[0]} on this host", hint=HINT
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LiveshiftError(
            f"network: `{' '.join(command)}` failed: {said}" + (f"\n{stdin}" if stdin else ""),
            hint=HINT,
        )
    return done.stdout
