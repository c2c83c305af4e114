# SPDX-License-Identifier: Apache-2.0
"""Runs the system's own tools for the lab: ip, tc, nft, nsenter and mount."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from ...errors import LiveshiftError


def run(command: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its stdout. Raises LiveshiftError with what the command printed."""
    try:
        done = subprocess.run(
            command, input=stdin, env=env, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise LiveshiftError(
            f"lab: {command[0]} is not installed",
            hint="the lab needs iproute2, nftables and util-linux",
        ) from None
    if done.returncode != 0:
        output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LiveshiftError(
            f"lab: `{' '.join(command)}` failed: {output}" + (f"\n{stdin}" if stdin else ""),
            hint="`liveshift doctor` checks namespaces, bridges, nftables and privileges",
        )
    return done.stdout


def ip(netns: str, *commands: str) -> None:
    """Run ip commands in a named network namespace, as one batch."""
    run(["ip", "-netns", netns, "-batch", "-"], stdin="".join(f"{c}\n" for c in commands))
