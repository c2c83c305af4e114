# SPDX-License-Identifier: Apache-2.0
"""Where directories go at the host that restores a capsule, and when a rewind puts files back."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
from image_edits import encode
from inbox_scene import Host, Plan, Resident, SandboxDouble

from liveshift.criu_glue.capsule.mounts import Placement
from liveshift.criu_glue.files import trees
from liveshift.criu_glue.files.trees import Tree
from liveshift.errors import StepFailed
from liveshift.runtime.agent.arrival.image_place import SandboxPlace

OLD, NEW = 1e9, 2e9
REGULAR = 1


class Scratch:
    """A carried directory with a log, which the capsule has open, and a file that it has not."""

    def __init__(self, top: Path, *, back: bool = True, name: str = "r4.1") -> None:
        self.carried = top / "scratch"
        self.images = top / name
        resident: Any = Resident(SandboxDouble(Plan(top / "tmp", top / "log"), top / "root"))
        for path in (self.carried, self.images, top / "tmp", top / "nothing"):
            path.mkdir()
        placement = Placement((), (str(self.carried),))
        self.place = SandboxPlace(self.images, resident, placement, back=back)

    def write(self, top: Path, content: str, when: float) -> None:
        (top / "runs").mkdir(parents=True, exist_ok=True)
        for name in ("runs/log", "other"):
            (top / name).write_text(content)
            os.utime(top / name, (when, when))

    def has_open(self, name: str) -> None:
        """CRIU's image says that the capsule has this file open."""
        path = os.fsencode(self.carried / name)
        regular = encode([(1, 7), (2, os.O_WRONLY), (3, 0), (5, b""), (6, path), (8, 4)])
        raw = encode([(1, REGULAR), (2, 7), (3, regular)])
        head = struct.pack("<II", 0x54564319, 0x56303138)
        (self.images / "files.img").write_bytes(head + struct.pack("<I", len(raw)) + raw)

    def take(self, source: Path, pass_: int = 1) -> None:
        tree, name = Tree("x", source), f"carried:{self.carried}"
        write, end = self.place.tree(f"tree:{pass_}:{name}", name)
        trees.pack(tree, trees.listing(tree), lambda data: write(memoryview(data)))
        end()

    def found(self) -> tuple[str, str]:
        return (self.carried / "runs/log").read_text(), (self.carried / "other").read_text()


def test_an_open_file_goes_back_where_the_capsule_has_used_it_since(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    scratch.write(tmp_path / "image", "then", OLD)
    scratch.write(scratch.carried, "later", NEW)
    scratch.has_open("runs/log")
    scratch.take(tmp_path / "image")
    assert scratch.found() == ("then", "later")


def test_elsewhere_a_newer_file_is_another_jobs(tmp_path: Path) -> None:
    """That shows when both passes have come: the second one may bring a newer file."""
    scratch = Scratch(tmp_path, back=False)
    scratch.write(tmp_path / "image", "then", OLD)
    scratch.write(scratch.carried, "later", NEW)
    scratch.has_open("runs/log")
    scratch.take(tmp_path / "image")
    with pytest.raises(StepFailed, match="runs/log, which the capsule had open at the snapshot"):
        scratch.take(tmp_path / "nothing", 2)
    assert scratch.found() == ("later", "later")


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("name", ["r4.1", "m4"])
def test_the_second_pass_overrules_the_first_one(tmp_path: Path, name: str, newer: bool) -> None:
    """The job may have copied an older file with its time."""
    scratch = Scratch(tmp_path, back=False, name=name)
    scratch.write(tmp_path / "image", "then", OLD)
    scratch.write(tmp_path / "changes", "a little later", OLD + (5 if newer else -5))
    scratch.has_open("runs/log")
    for _ in range(2):  # an attempt may be repeated
        scratch.take(tmp_path / "image")
        scratch.take(tmp_path / "changes", 2)
    assert scratch.found() == ("a little later", "a little later")


def test_in_a_move_a_newer_file_only_stays(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, back=False, name="m4")
    scratch.write(tmp_path / "image", "then", OLD)
    scratch.write(scratch.carried, "later", NEW)
    scratch.has_open("runs/log")
    scratch.take(tmp_path / "image")
    scratch.take(tmp_path / "nothing", 2)
    assert scratch.found() == ("later", "later")


def test_a_directory_that_was_missing_here_is_as_at_its_source(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, back=False, name="m4")
    scratch.write(tmp_path / "image", "then", OLD)
    (tmp_path / "image").chmod(0o2775)
    scratch.carried.rmdir()
    scratch.place.check_tree(f"carried:{scratch.carried}")  # agents ask before anything comes
    scratch.take(tmp_path / "image")
    assert scratch.carried.stat().st_mode & 0o7777 == 0o2775


def test_what_a_failed_move_has_put_here_is_the_capsules_own(tmp_path: Path) -> None:
    failed = Scratch(tmp_path, back=False, name="m4")
    failed.write(tmp_path / "image", "then", NEW)
    failed.take(tmp_path / "image")
    own = failed.place.of_the_capsule
    assert {"runs", "runs/log", "other"} <= own[str(failed.carried)].keys()
    later = SandboxPlace(
        failed.images, failed.place._resident, failed.place._placement, lambda: own
    )
    failed.place = later
    failed.write(tmp_path / "changes", "an older copy", OLD)
    failed.take(tmp_path / "changes")
    assert failed.found() == ("an older copy", "an older copy")


def test_a_file_that_only_begins_like_a_carried_path_is_another_one(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    scratch.write(tmp_path / "image", "then", OLD)
    scratch.write(scratch.carried, "later", NEW)
    scratch.has_open("../scratch-2/runs/log")
    scratch.take(tmp_path / "image")
    assert scratch.found() == ("later", "later")


def test_where_nothing_is_all_of_the_image_comes(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, back=False)
    scratch.write(tmp_path / "image", "then", OLD)
    scratch.has_open("runs/log")
    scratch.take(tmp_path / "image")
    assert scratch.found() == ("then", "then")


def test_an_image_that_is_damaged_puts_nothing_back(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    scratch.write(tmp_path / "image", "then", OLD)
    (scratch.images / "files.img").write_bytes(b"not an image")
    with pytest.raises(StepFailed, match="without the magic words"):
        scratch.take(tmp_path / "image")
    assert list(scratch.carried.iterdir()) == []


def test_a_path_that_is_not_carried_here_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path / "host")
    with pytest.raises(StepFailed, match="is not carried to this host"):
        host.inbox.place.tree("tree:1:carried:/etc", "carried:/etc")
