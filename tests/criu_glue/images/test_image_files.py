# SPDX-License-Identifier: Apache-2.0
"""The files that an image opens are such as the user of its capsule may open."""

from __future__ import annotations

import os

import pytest
from capsule_images import ALICE, ROOT, Image, plain, rich
from image_edits import encode

from liveshift.criu_glue.images import image_rights
from liveshift.criu_glue.images.protobuf import ProtobufMessage
from liveshift.errors import StepFailed

__all__ = ["plain", "rich"]

pytestmark = pytest.mark.root  # only root can act as another user


def test_files_that_the_user_could_not_open(plain: Image) -> None:
    plain.make("etc/shadow", 0o600)
    plain.make("etc/passwd", 0o644)
    plain.make("tmp/mine", 0o600, ALICE.uid)
    for number, (path, flags) in enumerate(
        (
            ("/etc/passwd", os.O_RDONLY),
            ("/tmp/mine", os.O_RDWR),
            ("/no", os.O_RDWR),
            ("/etc/shadow", os.O_PATH),
            ("/etc", os.O_RDONLY | os.O_DIRECTORY),
        )
    ):
        plain.reg(500 + number, path, flags)
    plain.check()
    plain.reg(600, "/etc/shadow", os.O_RDONLY)
    with pytest.raises(
        StepFailed, match="a task of it would open '/etc/shadow' for reading, which"
    ):
        plain.check()
    plain.check(ROOT)


def test_files_that_the_user_could_not_write(plain: Image) -> None:
    plain.make("etc/passwd", 0o644)
    plain.reg(500, "/etc/passwd", os.O_RDWR)
    with pytest.raises(StepFailed, match="open '/etc/passwd' for writing"):
        plain.check()


def test_links_lead_where_they_do_in_the_sandbox(plain: Image) -> None:
    plain.make("etc/shadow", 0o600)
    (plain.sandbox / "tmp" / "mine").symlink_to("/etc/shadow")
    plain.reg(500, "/tmp/mine", os.O_RDONLY)
    with pytest.raises(StepFailed, match="open '/tmp/mine' for reading"):
        plain.check()


@pytest.mark.parametrize("path", ["etc/shadow", "xetc/shadow", "", "/etc\0/x"])
def test_paths_that_are_none(plain: Image, path: str) -> None:
    plain.reg(500, path, os.O_RDONLY)
    with pytest.raises(StepFailed, match="no absolute path"):
        plain.check()


@pytest.mark.parametrize("flag", [os.O_CREAT, os.O_TRUNC, os.O_EXCL, os.O_TMPFILE])
def test_nothing_is_made_by_opening(plain: Image, flag: int) -> None:
    plain.reg(500, "/tmp/x", os.O_RDWR | flag)
    with pytest.raises(StepFailed, match="that would make '/tmp/x'"):
        plain.check()


def test_two_files_of_one_number(plain: Image) -> None:
    plain.reg(500, "/tmp/x", os.O_RDONLY)
    plain.reg(500, "/etc/shadow", os.O_RDONLY)
    with pytest.raises(StepFailed, match="two files of number 500"):
        plain.check()


def test_a_mapping_opens_its_file_anew(plain: Image) -> None:
    plain.make("etc/passwd", 0o644)
    plain.reg(500, "/etc/passwd", os.O_RDONLY)
    vma = encode([(1, 4096), (2, 8192), (3, 0), (4, 500), (5, 3), (6, 1), (7, 1 | 1 << 7), (8, 0)])
    (mm,) = plain.entries("mm-1001")
    for writes in (encode([(10, os.O_RDWR)]), b""):  # CRIU takes the second for writing too
        plain.write("mm-1001", [mm + encode([(14, vma + writes)])])
        with pytest.raises(StepFailed, match="open '/etc/passwd' for writing"):
            plain.check()
    plain.write("mm-1001", [mm + encode([(14, vma + encode([(10, os.O_RDONLY)]))])])
    plain.check()
    plain.write("mm-1001", [mm + encode([(14, vma + encode([(10, os.O_RDWR | os.O_CREAT)]))])])
    with pytest.raises(StepFailed, match="with a mapping of file 500"):
        plain.check()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (10, "packet socket"),
        (12, "fanotify"),
        (14, "namespace"),
        (15, "tun device"),
        (16, "plugin"),
        (19, "BPF map"),
        (0, "kind 0"),
        (99, "kind 99"),
        (65535, "kind 65535"),
    ],
)
def test_kinds_of_files_that_a_user_has_not(plain: Image, kind: int, words: str) -> None:
    plain.add_file((1, kind), (2, 500))
    with pytest.raises(StepFailed, match=f"with .*{words}"):
        plain.check()


def test_raw_sockets(rich: Image) -> None:
    rich.change_file(lambda entry: entry.uint(1) == image_rights.INETSK, (4, 4), 3)
    with pytest.raises(StepFailed, match="with a raw socket"):
        rich.check()


def test_unix_sockets_are_bound_where_the_user_may(rich: Image) -> None:
    def named(entry: ProtobufMessage) -> bool:
        return entry.uint(1) == image_rights.UNIXSK and b"/tmp/u.sock" in bytes(
            entry.raw(16) or b""
        )

    rich.change_file(named, (16, 11), b"/etc/u.sock\0")
    with pytest.raises(StepFailed, match=r"make '/etc/u\.sock'"):
        rich.check()
