# SPDX-License-Identifier: Apache-2.0
"""Files that a job was writing are cut back with its user's rights, and nothing else is."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from liveshift.criu_glue.files.rights import User
from liveshift.runtime.agent.host.cut_back import cut_back

pytestmark = pytest.mark.root

ALICE, BOB = 1001, 1002
USER = User(ALICE, ALICE)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which every user may make files; pytest's own is closed to them."""
    with tempfile.TemporaryDirectory(prefix="ls-shared-") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


def a_file(path: Path, size: int, owner: int = ALICE, mode: int = 0o644) -> bytes:
    path.write_bytes(b"x" * size)
    os.chown(path, owner, owner)
    path.chmod(mode)
    return bytes(path)


def test_a_file_that_has_grown_is_cut_and_named(shared: Path) -> None:
    grown = a_file(shared / "log", 3000)
    same = a_file(shared / "same", 1000)
    cut, left = cut_back(USER, {grown: 1000, same: 1000, bytes(shared / "gone"): 5})
    assert (cut, left) == ([f"{shared}/log (by 2.00 kB)"], [])
    assert (shared / "log").stat().st_size == (shared / "same").stat().st_size == 1000
    assert cut_back(USER, {grown: 1000, same: 1000}) == ([], []), "once is enough"


def test_a_shorter_file_stays_and_is_named(shared: Path) -> None:
    path = a_file(shared / "log", 10)
    text = f"{shared}/log (it is shorter than it was: 10 bytes, not 1000)"
    assert cut_back(USER, {path: 1000}) == ([], [text])
    assert (shared / "log").stat().st_size == 10


def test_another_users_file_is_not_touched(shared: Path) -> None:
    foreign = a_file(shared / "foreign", 3000, BOB)
    own = a_file(shared / "own", 3000)
    cut, left = cut_back(USER, {foreign: 0, own: 0})
    assert left == [f"{shared}/foreign (Permission denied)"]
    assert cut == [f"{shared}/own (by 3.00 kB)"], "one that fails keeps no other one"
    assert (shared / "foreign").stat().st_size == 3000
    group = a_file(shared / "of the group", 3000, BOB, 0o664)
    assert len(cut_back(User(ALICE, ALICE, (BOB,)), {group: 5})[0]) == 1


def test_a_file_that_has_not_changed_needs_no_rights(shared: Path) -> None:
    """A job may close a file to itself, once it has opened it."""
    path = a_file(shared / "log", 1000, mode=0o444)
    assert cut_back(USER, {path: 1000}) == ([], [])


def test_a_link_is_not_followed(shared: Path) -> None:
    a_file(shared / "target", 3000)
    (shared / "link").symlink_to(shared / "target")
    assert cut_back(USER, {bytes(shared / "link"): 0}) == ([], [])
    assert cut_back(User(0, 0), {bytes(shared / "link"): 0}) == ([], [])
    assert (shared / "target").stat().st_size == 3000


def test_what_is_no_file_is_left_alone(shared: Path) -> None:
    os.mkfifo(shared / "pipe")
    os.chown(shared / "pipe", ALICE, ALICE)
    (shared / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(str(shared / "socket"))
        odd = {bytes(path): 0 for path in shared.iterdir()} | {b"/dev/null": 0, b"/dev/tty": 0}
        assert cut_back(USER, odd) == ([], [])
    assert sorted(path.name for path in shared.iterdir()) == ["directory", "pipe", "socket"]


def test_a_name_that_is_not_utf_8_is_a_name_too(shared: Path) -> None:
    path = bytes(shared) + b"/log\xff"
    with open(path, "wb") as file:
        file.write(bytes(3000))
    os.chown(path, ALICE, ALICE)
    assert cut_back(USER, {path: 1000}) == ([f"{shared}/log\\xff (by 2.00 kB)"], [])
    assert os.stat(path).st_size == 1000


def test_nothing_is_cut_once_the_time_is_over(shared: Path) -> None:
    """The job may write again by then."""
    path = a_file(shared / "log", 3000)
    text = f"{shared}/log (its file system took too long)"
    assert cut_back(USER, {path: 1000}, time.monotonic() - 1) == ([], [text])
    assert (shared / "log").stat().st_size == 3000
    assert cut_back(USER, {path: 1000}, time.monotonic() + 600)[1] == []


def test_the_rights_of_root_come_back(shared: Path) -> None:
    cut_back(USER, {a_file(shared / "log", 10): 5})
    assert os.geteuid() == 0
    (shared / "ours").write_text("root")
    assert (shared / "ours").stat().st_uid == 0
