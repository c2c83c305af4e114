# SPDX-License-Identifier: Apache-2.0
"""The destination checks the directories that come along with a capsule: whether there is space for
them, and whether they are directories other than the source's own."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...criu_glue.survey.along import measure, overlap, place_of
from ...criu_glue.survey.found import Along, Survey
from ...units import size, some
from ..cost.prediction import AHEAD, seconds_ahead
from ..model.preflight_findings import PreflightFinding

SHOWN = 3
"""A message names at most this many files and counts the rest."""


WARN_S = 0.1
"""The plan warns if files alone make the pause longer by at least this many seconds."""


def too_long(along: Iterable[Along], limit: float) -> list[PreflightFinding]:
    """What the source reports if the directories take longer than ``limit`` seconds, which is all
    that a pre-copy may take (timeouts.precopy)."""
    along = tuple(along)
    if (needs := seconds_ahead(along)) <= limit:
        return []
    total, files = sum(each.size for each in along), sum(each.files for each in along)
    largest = max(along, key=lambda each: seconds_ahead([each])).path
    return [
        (
            f"{size(total)} in {files} files go along, which takes about {needs:.0f} s, and a"
            f" pre-copy has {limit:.0f} s (timeouts.precopy)",
            f"remove what the job does not need of {largest}, keep it on a path of files.shared, or"
            f" raise timeouts.precopy by {needs - limit:.0f} s",
        )
    ]


def while_paused(survey: Survey) -> list[tuple[str, str]]:
    """A (what, found) row about open files that lie in none of the directories: they are sent
    whole while the job is paused."""
    seconds = survey.single_size / AHEAD
    if seconds < WARN_S:
        return []
    return [
        (
            "warning",
            f"{size(survey.single_size)} of files that are open for writing go over while the job"
            f" is paused, about {seconds:.1f} s: {some(survey.single_files, SHOWN)};"
            " list their directory under files.shared or files.carried",
        )
    ]


def check(
    along: tuple[Along, ...], capsules: Path, host: str, output: int = 0
) -> tuple[tuple[str, str], list[PreflightFinding]]:
    """Return a (what, found) row and the obstacles. A capsule's own /tmp and ``output`` (bytes)
    will lie below ``capsules``; a carried path keeps its place."""
    total, files = sum(each.size for each in along), sum(each.files for each in along)
    found = f"{size(total)} in {files} files, about {seconds_ahead(along):.1f} s while it trains"
    return ("files along", found), list(_obstacles(along, capsules, host, output))


def _obstacles(
    along: tuple[Along, ...], capsules: Path, host: str, output: int
) -> Iterator[PreflightFinding]:
    needed: defaultdict[Path, int] = defaultdict(int)
    needed[_file_system(capsules)] += output
    for each in along:
        if each.path == "/tmp":
            if capsules.exists() and overlap(each.place, place_of(capsules)):
                yield (
                    f"the directory of capsules, {capsules}, is the same at the source and on"
                    f" {host}: the capsule's /tmp would be unpacked into itself",
                    "give each host a paths.state of its own, on a local file system",
                )
            else:
                needed[_file_system(capsules)] += each.size
            continue
        here = measure(each.path, Path(each.path))
        if overlap(each.place, here.place):
            yield (
                f"the carried path {each.path} is the same directory at the source and on {host}",
                "list it under files.shared instead of files.carried",
            )
        else:
            needed[_file_system(Path(each.path))] += max(0, each.size - here.size)
    for where, much in needed.items():
        s = os.statvfs(where)
        if much > (free := s.f_bfree * s.f_frsize):
            yield (
                f"{host} has {size(free)} free where {size(much)} of files are to come, on the"
                f" file system of {where}",
                f"free some space there, or remove what the job does not need of"
                f" {', '.join(each.path for each in along)}",
            )


def _file_system(path: Path) -> Path:
    """The mount point at or above ``path``, which need not exist yet."""
    path = path.absolute()
    while not os.path.ismount(path):
        path = path.parent
    return path
