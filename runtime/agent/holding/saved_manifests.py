# SPDX-License-Identifier: Apache-2.0
"""The files that say which snapshots a directory has: DIR/gpt/s17.json beside DIR/gpt/s17.0 and so
on. The orchestrator makes and signs what is in them (snapshot/saved_snapshot.py); hosts only write
and read it, since a host sees the directory, and the orchestrator's machine perhaps does not.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import msgspec

from ....errors import NotFound, Refused, StepFailed
from .saved_image import SUMS
from .trusted_directory import check_trusted, write_last

_NAME = re.compile(r"s[0-9]{1,18}\.json")


class _Time(msgspec.Struct):
    time: float


class _Capsule(msgspec.Struct):
    image: str


class _Snapshot(msgspec.Struct):
    capsules: dict[str, _Capsule] = msgspec.field(default_factory=dict)


def path_of(directory: Path, job: str, snapshot: str) -> Path:
    return directory / job / f"{snapshot}.json"


def check_free(directory: Path, job: str, snapshot: str) -> None:
    """Raise Refused if the directory has a whole snapshot of that name, such as one of another
    cluster, StepFailed if that cannot be seen."""
    path = path_of(directory, job, snapshot)
    try:
        there = path.exists()
    except OSError as error:  # such as a network file system that does not let root in
        raise StepFailed("hold", f"{path} cannot be looked for: {error}") from error
    if there:
        raise Refused(
            f"{directory} has a snapshot {snapshot} of {job} already",
            hint=f"use another directory; or remove {path}, if that snapshot is not needed",
        )


def drop(directory: Path, job: str, snapshot: str, image: str) -> None:
    """Remove an image of a snapshot that is not whole, and the job's directory if nothing else is
    in it. Raises Refused if that snapshot is whole, or if the directory is not to be trusted."""
    check_trusted(directory)
    check_free(directory, job, snapshot)
    shutil.rmtree(directory / job / image, ignore_errors=True)
    with contextlib.suppress(OSError):
        (directory / job).rmdir()


def write(directory: Path, job: str, snapshot: str, data: bytes) -> None:
    """Say that a snapshot is whole. Raises Refused if one of that name is, StepFailed if the file
    cannot be written, or if the images have been removed meanwhile: the directory may have hung
    until the orchestrator gave this snapshot up, and it goes on when it is back."""
    check_trusted(directory)
    path = path_of(directory, job, snapshot)
    found = msgspec.json.decode(data.partition(b"\n")[0], type=_Snapshot)
    lists = [directory / job / each.image / SUMS for each in found.capsules.values()]
    try:
        write_last(path, data)
        if lacking := [each for each in lists if not each.exists()]:
            path.unlink()
            raise StepFailed("hold", f"there is no {lacking[0]} any more")
    except FileExistsError:
        check_free(directory, job, snapshot)
        raise
    except OSError as error:
        raise StepFailed("hold", f"{directory} cannot be written: {error}") from error


def read(directory: Path, job: str, snapshot: str) -> bytes:
    """Return the manifest of a snapshot of a job; ``snapshot``: "" for the newest one. This does
    not check its signature. Raises NotFound if there is none, StepFailed if it cannot be read."""
    check_trusted(directory)
    paths = [path_of(directory, job, snapshot)] if snapshot else _all(directory / job)
    found: dict[float, bytes] = {}
    for path in paths:
        try:
            data = path.read_bytes()
            found[msgspec.json.decode(data.partition(b"\n")[0], type=_Time).time] = data
        except FileNotFoundError:
            continue
        except (OSError, ValueError, msgspec.DecodeError) as error:
            raise StepFailed(
                "restore",
                f"{path} cannot be read: {error}",
                hint="--snapshot names one of those beside it",
            ) from error
    if not found:
        which = f"snapshot {snapshot}" if snapshot else "whole snapshot"
        raise NotFound(f"{directory} has no {which} of {job}{_others(directory, job)}")
    return found[max(found)]


def _all(place: Path) -> list[Path]:
    """Those of one job, by their numbers. Other files may lie beside them."""
    found = [path for path in place.glob("s*.json") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.stem[1:]))


def _others(directory: Path, job: str) -> str:
    """Name the snapshots or the jobs that the directory has instead."""
    own = [path.stem for path in _all(directory / job)]
    if own:
        return f": it has {', '.join(own)}"
    jobs = sorted(path.name for path in directory.glob("*") if _all(path))
    return f": it has snapshots of {', '.join(jobs)}" if jobs else ""
