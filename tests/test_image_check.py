# SPDX-License-Identifier: Apache-2.0
"""Images are held against what a capsule's can be before CRIU, as root, does what they say.

The images are CRIU's own (tests/fuzz/seeds), of a user's capsule; what a hostile source would
change in them is changed here, message by message.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from image_edits import Field, change_first, decode, encode, put, varint

from liveshift.criu_glue import image_check, image_rights
from liveshift.criu_glue.image_kinds import KINDS, kind_of
from liveshift.criu_glue.protobuf import Damaged, Message
from liveshift.criu_glue.rights import User
from liveshift.errors import StepFailed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

SEEDS = Path(__file__).parent / "fuzz" / "seeds"
ALICE = User(64001, 64001)
BOB = User(64002, 64002)
ROOT = User(0, 0)


class Image:
    """An image directory, and the room its paths lead into."""

    def __init__(self, place: Path, name: str) -> None:
        self.directory = place / "images"
        self.directory.mkdir()
        with tarfile.open(SEEDS / f"{name}.tar.xz") as archive:
            archive.extractall(self.directory)
        self.room = place / "room"
        for folder in ("tmp", "dev/shm", "usr/bin", "etc"):
            (self.room / folder).mkdir(parents=True)
        for folder in ("tmp", "dev/shm"):
            (self.room / folder).chmod(0o1777)
        for directory in (place, *place.parents):
            directory.chmod(directory.stat().st_mode | 0o111)

    def check(self, user: User = ALICE) -> None:
        image_check.check(self.directory, user, self.room)

    def make(self, path: str, mode: int, uid: int = 0) -> Path:
        made = self.room / path.lstrip("/")
        made.touch()
        os.chown(made, uid, uid)
        made.chmod(mode)
        return made

    def file(self, name: str) -> Path:
        return self.directory / f"{name}.img"

    def entries(self, name: str) -> list[bytes]:
        raw, at, found = self.file(name).read_bytes(), 8 - 4 * (name == "inventory"), []
        while at < len(raw):
            (size,) = struct.unpack_from("<I", raw, at)
            found.append(raw[at + 4 : at + 4 + size])
            at += 4 + size
        return found

    def write(self, name: str, entries: list[bytes]) -> None:
        head = self.file(name).read_bytes()[: 8 - 4 * (name == "inventory")]
        packed = b"".join(struct.pack("<I", len(entry)) + entry for entry in entries)
        self.file(name).write_bytes(head + packed)

    def change(self, name: str, path: tuple[int, ...], value: int | bytes | None) -> None:
        change_first(self.file(name), path, value)

    def change_file(
        self, which: Callable[[Message], bool], path: tuple[int, ...], value: int | bytes
    ) -> None:
        entries = self.entries("files")
        at = next(n for n, entry in enumerate(entries) if which(Message(entry)))
        entries[at] = put(entries[at], path, value)
        self.write("files", entries)

    def add_file(self, *found: Field) -> None:
        self.write("files", [*self.entries("files"), encode(list(found))])

    def reg(self, number: int, path: str, flags: int) -> None:
        owner = encode([(n, 0) for n in range(1, 6)])
        about = encode([(1, number), (2, flags), (3, 0), (5, owner), (6, path.encode())])
        self.add_file((1, image_rights.REG), (2, number), (3, about))


@pytest.fixture
def plain(tmp_path: Path) -> Image:
    return Image(tmp_path, "plain")


@pytest.fixture
def rich(tmp_path: Path) -> Image:
    return Image(tmp_path, "rich")


# ---- frames of files ---------------------------------------------------------------------------


def test_what_criu_has_made_is_taken(plain: Image, tmp_path: Path) -> None:
    plain.check()
    plain.check(ROOT)
    rich = Image(tmp_path / "2", "rich") if (tmp_path / "2").mkdir() is None else plain
    rich.check()
    kinds = {kind_of(path.name) for path in rich.directory.iterdir()}
    assert len(kinds) > 20


@pytest.mark.parametrize("user", [ALICE, ROOT])
@pytest.mark.parametrize(
    "name",
    [
        "x.img", "mountpoints-1.img", "netns-2.img", "userns-1.img", "creds-1001.img",
        "apparmor.img", "core.img", "core-01.img", "core--1.img", "core-1001.img.img",
        "inventory-1.img", "ghost-file-G.img", "reg-files.img", "tmpfs-1.tar.gz.img",
    ],
)  # fmt: skip
def test_kinds_that_no_capsule_has(plain: Image, user: User, name: str) -> None:
    (plain.directory / name).write_bytes(plain.file("core-1001").read_bytes())
    with pytest.raises(StepFailed, match="of a kind that no capsule's image has"):
        plain.check(user)


def test_what_is_ours_beside_the_images_is_not_looked_at(plain: Image) -> None:
    for name in ("manifest", "came", "arrival", "restore.log", "held"):
        (plain.directory / name).write_bytes(b"ours")
    plain.check()


@pytest.mark.parametrize(
    "name", ["inventory", "core-1001", "files", "ghost-file-1", "pagemap-1001"]
)
def test_wrong_magic_words(plain: Image, name: str) -> None:
    raw = plain.file(name).read_bytes()
    for damaged in (b"", raw[:3], b"\0" * 8 + raw[8:], bytes([raw[0] ^ 1]) + raw[1:], b"#!/bin/sh"):
        plain.file(name).write_bytes(damaged)
        with pytest.raises(StepFailed, match=f"{name}.img' is an image without the magic words"):
            plain.check(ROOT)


@pytest.mark.parametrize("name", [n for n, kind in KINDS.items() if n not in ("pages", "tty-data")])
def test_lengths_that_lead_out_of_a_file(rich: Image, name: str) -> None:
    files = [p for p in rich.directory.glob(f"{name}*.img") if kind_of(p.name) == name]
    for path in files[:1]:
        raw = path.read_bytes()
        at = 4 if name == "inventory" else 8
        for size in (0xFFFFFFFF, len(raw) - at - 3):
            path.write_bytes(raw[:at] + struct.pack("<I", size) + raw[at + 4 :])
            with pytest.raises(StepFailed, match=r"ends beyond it|cut off|entries, expected one"):
                rich.check(ROOT)
        path.write_bytes(raw[: at + 2])
        with pytest.raises(StepFailed, match="cut off"):
            rich.check(ROOT)


@pytest.mark.parametrize(
    "name",
    ["inventory", "pstree", "files", "core-1001", "core-1002", "mm-1001", "ids-1001", "fs-1001",
     "pagemap-1001"],
)  # fmt: skip
def test_images_that_are_missing_are_named(plain: Image, name: str) -> None:
    plain.file(name).unlink()
    with pytest.raises(StepFailed, match=f"the image is not complete: {name}.img is missing"):
        plain.check(ROOT)


def test_one_entry_where_criu_reads_one(plain: Image) -> None:
    """The second would be another's, and CRIU takes the first: no two may differ."""
    (entry,) = plain.entries("core-1001")
    plain.write("core-1001", [entry, entry])
    with pytest.raises(StepFailed, match="of 2 entries, expected one"):
        plain.check()
    plain.write("core-1001", [])
    with pytest.raises(StepFailed, match="of 0 entries, expected one"):
        plain.check()


# ---- tasks -------------------------------------------------------------------------------------

CREDS = (5, 10)


@pytest.mark.parametrize("task", ["core-1001", "core-1002"], ids=["process", "thread"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "uid 0"), (3, "euid 0"), (5, "suid 0"), (7, "fsuid 0"),
        (2, "gid 0"), (4, "egid 0"), (6, "sgid 0"), (8, "fsgid 0"),
    ],
)  # fmt: skip
def test_a_task_of_root_in_a_users_capsule(
    plain: Image, task: str, number: int, words: str
) -> None:
    plain.change(task, (*CREDS, number), 0)
    with pytest.raises(
        StepFailed, match=f"{task}.img' .*of a task with {words}, but its capsule is user 64001's"
    ):
        plain.check()
    plain.check(ROOT)


@pytest.mark.parametrize(
    ("number", "value", "words"),
    [
        (9, 1 << 23, "inheritable capabilities"),
        (10, 1, "permitted capabilities"),
        (11, 1, "effective capabilities"),
        (11, varint(1 << 7) + varint(0), "effective capabilities"),  # packed
        (19, 1, "ambient capabilities"),
        (14, 0, "group 0"),
        (14, varint(64001) + varint(27), "group 27"),
    ],
)
def test_capabilities_and_groups(plain: Image, number: int, value: int | bytes, words: str) -> None:
    plain.change("core-1001", (*CREDS, number), value)
    with pytest.raises(StepFailed, match=f"of a task with {words}, but"):
        plain.check()


@pytest.mark.parametrize("user", [ALICE, ROOT])
@pytest.mark.parametrize("field", [9, 10, 11, 12, 19])
@pytest.mark.parametrize(
    ("words", "number"),
    [(varint(1 << 21) + varint(0), 21), (varint(0) + varint(1 << 7), 39), (varint(1 << 27), 27)],
)
def test_capabilities_that_no_capsule_has(
    plain: Image, user: User, field: int, words: bytes, number: int
) -> None:
    (core,) = plain.entries("core-1001")
    plain.write("core-1001", [put(put(core, (*CREDS, field), None), (*CREDS, field), words)])
    with pytest.raises(StepFailed, match=f"of a task with capability {number}, which no capsule"):
        plain.check(user)


def test_the_capabilities_are_those_that_capsule_init_keeps() -> None:
    source = Path(image_rights.__file__).parent / "capsule_task.c"
    if not source.exists():
        source = Path(__file__).parents[1] / "criu_glue" / "capsule_task.c"
    kept = re.search(r"kept\[\] = \{(.*?)\}", source.read_text(), re.DOTALL)
    assert kept
    header = Path("/usr/include/linux/capability.h").read_text()
    numbers = dict(re.findall(r"#define (CAP_\w+)\s+(\d+)", header))
    names = re.findall(r"CAP_\w+", kept[1])
    assert sorted(int(numbers[name]) for name in names) == sorted(image_rights.KEPT)


def test_another_users_tasks(plain: Image) -> None:
    with pytest.raises(StepFailed, match="of a task with uid 64001, euid 64001"):
        plain.check(BOB)
    plain.check(User(64001, 27, (64001,)))


def test_what_criu_would_read_otherwise_is_damaged(plain: Image) -> None:
    """protobuf-c cuts to 32 bits, takes the last of several and merges messages."""
    (core,) = plain.entries("core-1001")
    (thread,) = [v for n, v in decode(core) if n == 5]
    assert isinstance(thread, bytes)
    (creds,) = [v for n, v in decode(thread) if n == 10]
    assert isinstance(creds, bytes)
    root = put(creds, (1,), 0)
    for changed in (
        put(core, (*CREDS, 1), 1 << 32),
        put(core, (*CREDS, 1), (1 << 32) + 64001),
        put(core, CREDS, creds + encode([(1, 0)])),
        put(core, (5,), thread + encode([(10, root)])),
        core + encode([(5, encode([(10, encode([(1, 0)]))]))]),
        put(core, (*CREDS, 1), b"\0\0\0\0"),
        put(core, (*CREDS, 1), None),
    ):
        plain.write("core-1001", [changed])
        with pytest.raises(StepFailed, match="the image is damaged"):
            plain.check()


def test_a_task_must_say_whose_it_is(rich: Image) -> None:
    rich.check()  # one of its tasks has ended and says nothing
    rich.change("core-1001", CREDS, None)
    with pytest.raises(StepFailed, match="of a task of nobody"):
        rich.check()


def test_only_a_task_that_has_ended_need_not(rich: Image) -> None:
    rich.change("core-1003", (3, 1), 1)
    with pytest.raises(StepFailed, match=r"missing|nobody"):
        rich.check()
    rich.change("core-1003", (3, 1), 2)
    rich.change("core-1003", (2,), b"")  # registers to go on from
    with pytest.raises(StepFailed, match="of a task of nobody"):
        rich.check()


@pytest.mark.parametrize("number", image_rights.NAMESPACES)
def test_other_namespaces_than_the_rooms(plain: Image, number: int) -> None:
    plain.change("ids-1001", (number,), 99)
    with pytest.raises(StepFailed, match="namespace than the room's"):
        plain.check()


def test_another_root_directory(plain: Image) -> None:
    plain.reg(500, "/tmp", os.O_RDONLY)
    plain.change("fs-1001", (2,), 500)
    with pytest.raises(StepFailed, match="of a task whose root is '/tmp'"):
        plain.check()


# ---- files -------------------------------------------------------------------------------------


def test_files_that_the_user_could_not_open(plain: Image) -> None:
    plain.make("etc/shadow", 0o600)
    plain.make("etc/passwd", 0o644)
    plain.make("tmp/mine", 0o600, ALICE.uid)
    for number, (path, flags) in enumerate(
        (("/etc/passwd", os.O_RDONLY), ("/tmp/mine", os.O_RDWR), ("/no", os.O_RDWR),
         ("/etc/shadow", os.O_PATH), ("/etc", os.O_RDONLY | os.O_DIRECTORY))
    ):  # fmt: skip
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


def test_links_lead_where_they_do_in_the_room(plain: Image) -> None:
    plain.make("etc/shadow", 0o600)
    (plain.room / "tmp" / "mine").symlink_to("/etc/shadow")
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
    [(10, "packet socket"), (12, "fanotify"), (14, "namespace"), (15, "tun device"),
     (16, "plugin"), (19, "BPF map"), (0, "kind 0"), (99, "kind 99"), (65535, "kind 65535")],
)  # fmt: skip
def test_kinds_of_files_that_a_user_has_not(plain: Image, kind: int, words: str) -> None:
    plain.add_file((1, kind), (2, 500))
    with pytest.raises(StepFailed, match=f"with .*{words}"):
        plain.check()


def test_raw_sockets(rich: Image) -> None:
    rich.change_file(lambda entry: entry.uint(1) == image_rights.INETSK, (4, 4), 3)
    with pytest.raises(StepFailed, match="with a raw socket"):
        rich.check()


def test_unix_sockets_are_bound_where_the_user_may(rich: Image) -> None:
    def named(entry: Message) -> bool:
        return entry.uint(1) == image_rights.UNIXSK and b"/tmp/u.sock" in bytes(
            entry.raw(16) or b""
        )

    rich.change_file(named, (16, 11), b"/etc/u.sock\0")
    with pytest.raises(StepFailed, match=r"make '/etc/u\.sock'"):
        rich.check()


# ---- files made anew ---------------------------------------------------------------------------


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
    def deleted(entry: Message) -> bool:
        return b"/tmp/deleted" in bytes(entry.raw(3) or b"")

    plain.change_file(deleted, (3, 6), b"/etc/cron.d")
    with pytest.raises(StepFailed, match=r"make '/etc/cron\.d', which its user 64001 may not do"):
        plain.check()


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
    (plain.room / LINK.lstrip("/")).symlink_to("/etc/secret")
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


# ---- the reader --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"\x08", b"\x08\x80", b"\x0a\x05abc", b"\x00\x01", b"\x0b", b"\x0c", b"\x09\0\0",
        b"\x08" + b"\xff" * 9 + b"\x02", b"\x08" + b"\x80" * 11, b"\xff\xff\xff\xff\xff\x01\x00",
    ],
)  # fmt: skip
def test_bytes_that_are_no_message(raw: bytes) -> None:
    with pytest.raises(Damaged):
        Message(raw)


def test_a_message_is_read_as_it_was_written() -> None:
    message = Message(
        encode([(1, 7), (2, b"text"), (3, encode([(1, (1 << 64) - 1)])), (4, 1), (4, 2)])
    )
    assert message.uint(1) == 7
    assert bytes(message.raw(2) or b"") == b"text"
    assert message.uints(4) == [1, 2]
    assert message.uint(9, 5) == 5
    assert 3 in message
    assert 9 not in message
    inner = message.message(3)
    assert inner is not None
    for wrong in (
        lambda: inner.uint(1), lambda: message.uint(2), lambda: message.raw(1),
        lambda: message.uint(9), lambda: message.uint(4), lambda: message.raws(1),
    ):  # fmt: skip
        with pytest.raises(Damaged):
            wrong()
