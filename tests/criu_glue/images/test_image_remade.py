# SPDX-License-Identifier: Apache-2.0
"""What a restore makes anew, or removes: deleted files, memory files, links, control groups."""

from __future__ import annotations

import stat
import struct
from pathlib import Path

import pytest
from capsule_images import ALICE, Image, plain, rich
from image_edits import encode

from liveshift.criu_glue.files import statx
from liveshift.criu_glue.images import image_check, image_rights
from liveshift.criu_glue.images.image_kinds import KINDS
from liveshift.criu_glue.images.protobuf import ProtobufMessage
from liveshift.errors import StepFailed

__all__ = ["plain", "rich"]

pytestmark = pytest.mark.root  # only root can act as another user


@pytest.mark.parametrize(
    ("mode", "uid", "words"),
    [
        (stat.S_IFREG | 0o4755, 0, "of a program that runs as user 0"),
        (stat.S_IFREG | 0o2755, 64001, "of a program that runs as user 64001, group 0"),
        (stat.S_IFCHR | 0o666, 64001, "of a device"),
        (stat.S_IFBLK | 0o666, 64001, "of a device"),
    ],
)
def test_deleted_files_and_memory_files(rich: Image, mode: int, uid: int, words: str) -> None:
    for name, fields_ in (("ghost-file-1", (3, 1, 2)), ("memfd", (9, 2, 3))):
        kept = rich.file(name).read_bytes()
        for field, value in zip(fields_, (mode, uid, 0), strict=True):
            rich.change(name, (field,), value)
        with pytest.raises(StepFailed, match=f"{name}.img' is an image {words}"):
            rich.check()
        rich.file(name).write_bytes(kept)


def test_a_deleted_file_comes_back_where_the_user_may_make_one(plain: Image) -> None:
    def deleted(entry: ProtobufMessage) -> bool:
        return b"/tmp/deleted" in bytes(entry.raw(3) or b"")

    plain.change_file(deleted, (3, 6), b"/etc/cron.d")
    with pytest.raises(StepFailed, match=r"make '/etc/cron\.d', which its user 64001 may not do"):
        plain.check()


def deleted_path(plain: Image) -> bytes:
    (number,) = [ProtobufMessage(raw).uint(1) for raw in plain.entries("remap-fpath")]
    files = [ProtobufMessage(raw) for raw in plain.entries("files")]
    (regular,) = [entry.message(3) for entry in files if entry.uint(2) == number]
    assert regular is not None
    return bytes(regular.raw(6) or b"")


@pytest.mark.parametrize(
    ("path", "then"),
    [
        (b"/usr/lib/libx.so", b"/tmp/libx.so"),
        (b"/usr/lib/" + b"x" * 250, b"/tmp/" + b"x" * 200),
        (b"/tmp/deep/libx.so", b"/tmp/deep/libx.so"),
        (b"/dev/shm/x", b"/dev/shm/x"),
        (b"/etc/..", b"/tmp/.."),
    ],
)
def test_a_file_without_a_name_comes_back_in_the_capsules_own_tmp(
    plain: Image, path: bytes, then: bytes
) -> None:
    (plain.sandbox / "tmp" / "deep").mkdir()
    (plain.sandbox / "tmp" / "deep").chmod(0o1777)
    (number,) = [ProtobufMessage(raw).uint(1) for raw in plain.entries("remap-fpath")]
    plain.change_file(lambda entry: entry.uint(2) == number, (3, 6), path)
    others = plain.entries("files")
    for _ in range(2):  # an attempt that failed begins again
        image_check.prepare(plain.directory, ALICE, plain.sandbox)
        assert deleted_path(plain) == then
    assert len([raw for raw in plain.entries("files") if raw not in others]) == (then != path)


def test_so_does_one_of_what_is_mounted_below_it(
    plain: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout below the host's /tmp is mounted there in a capsule, and is not the capsule's."""
    (plain.sandbox / "tmp" / "checkout" / "lib").mkdir(parents=True)
    real = statx.stat

    def mounted(path: str | Path) -> statx.Stat:
        found = real(path)
        return found._replace(mount=found.mount + 1) if "checkout" in str(path) else found

    monkeypatch.setattr(statx, "stat", mounted)
    (number,) = [ProtobufMessage(raw).uint(1) for raw in plain.entries("remap-fpath")]
    for path in (b"/tmp/checkout/lib/libx.so", b"/tmp/checkout/gone/too/libx.so"):
        plain.change_file(lambda entry: entry.uint(2) == number, (3, 6), path)
        image_check.prepare(plain.directory, ALICE, plain.sandbox)
        assert deleted_path(plain) == b"/tmp/libx.so"


@pytest.mark.parametrize(
    ("path", "mode"),
    [(b"/etc/cron.d", stat.S_IFDIR), (b"/etc/x", stat.S_IFIFO), (b"/tmp/../etc/x", stat.S_IFREG)],
)
def test_what_does_not_come_back_there_needs_its_users_rights(
    plain: Image, path: bytes, mode: int
) -> None:
    (number,) = [ProtobufMessage(raw).uint(1) for raw in plain.entries("remap-fpath")]
    plain.change_file(lambda entry: entry.uint(2) == number, (3, 6), path)
    (ghost,) = [file.stem for file in plain.directory.glob("ghost-file-*.img")]
    plain.change(ghost, (3,), mode | 0o644)
    with pytest.raises(StepFailed, match=r"make '.*etc/.*', which its user 64001 may not do"):
        image_check.prepare(plain.directory, ALICE, plain.sandbox)


LINK = "/dev/shm/link_remap.7"


def give_a_link(plain: Image, link: str, number: int = 777) -> None:
    """The image's deleted file becomes one that is restored by another name of it."""
    plain.change("remap-fpath", (3,), image_rights.LINKED)
    plain.change("remap-fpath", (2,), number)
    plain.reg(777, link, 0)


def test_a_file_whose_name_is_gone_is_restored_by_the_name_that_criu_gave_it(plain: Image) -> None:
    plain.make(LINK, 0o600, ALICE.uid)
    give_a_link(plain, LINK)
    plain.check()


def test_nothing_but_such_names_is_removed_by_a_restore(plain: Image) -> None:
    for kind in (None, 0):
        plain.change("remap-fpath", (3,), kind)
        with pytest.raises(StepFailed, match=r"that would remove '/"):
            plain.check()
    plain.change("remap-fpath", (3,), 7)
    with pytest.raises(StepFailed, match="with a remap of kind 7"):
        plain.check()


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("/dev/shm/kept", "that would remove '/dev/shm/kept'"),
        ("/dev/shm/link_remap.1.old", "that would remove"),
        ("/dev/shm/link_remap.1/kept", "that would remove"),
        ("/etc/link_remap.1", r"would make '/etc/link_remap.1', which its user 64001 may not"),
        (LINK, rf"would open '{LINK}' for writing, which its user 64001 may not"),
    ],
)
def test_a_name_that_is_none_of_crius(plain: Image, link: str, words: str) -> None:
    """Nor is it a way round the rights that its user has to the file."""
    secret = plain.make("/etc/secret", 0o600)
    (plain.sandbox / LINK.lstrip("/")).symlink_to("/etc/secret")
    assert secret.exists()
    give_a_link(plain, link)
    with pytest.raises(StepFailed, match=words):
        plain.check()


def test_a_name_that_the_image_does_not_open(plain: Image) -> None:
    give_a_link(plain, LINK, 778)
    with pytest.raises(StepFailed, match="that would remove ''"):
        plain.check()


def test_control_groups_stay_below(plain: Image) -> None:
    head = struct.pack("<II", 0x54564319, KINDS["cgroup"].magic)
    for name, fine in ((b"/job", True), (b"/../../x", False)):
        entry = encode([(1, encode([(1, name)]))])
        plain.file("cgroup").write_bytes(head + struct.pack("<I", len(entry)) + entry)
        if fine:
            plain.check()
        else:
            with pytest.raises(StepFailed, match="a control group that leads elsewhere"):
                plain.check()
