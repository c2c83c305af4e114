# SPDX-License-Identifier: Apache-2.0
"""A file keeps its access control lists and ``user.*`` attributes in a move. Nobody gets more
rights to it, also where the destination cannot set a list."""

from __future__ import annotations

import base64
import errno
import os
import stat
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from liveshift.criu_glue.files import attributes, trees
from liveshift.criu_glue.files.sparing import Sparing
from liveshift.criu_glue.files.trees import Tree
from liveshift.criu_glue.files.unpacking import Unpacker

ACCESS, DEFAULT = attributes.LISTS
OWNER, USER, GROUP, MASK, OTHER, NOBODY = 0x01, 0x02, 0x04, 0x10, 0x20, 0xFFFFFFFF
ALICE = 64001
LIST = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, rights, who)
    for tag, rights, who in (
        (OWNER, 6, NOBODY),
        (USER, 6, ALICE),
        (GROUP, 0, NOBODY),
        (MASK, 6, NOBODY),
        (OTHER, 0, NOBODY),
    )
)
"""ALICE may read and write; the group may not, though the mode is 0660."""

pytestmark = pytest.mark.root


@pytest.fixture
def tops() -> Iterator[tuple[Path, Path]]:
    """Two directories on a file system with access control lists."""
    top = Path(f"/dev/shm/ls-test-attributes-{os.getpid()}")
    for each in (top / "here", top / "there"):
        each.mkdir(parents=True)
    yield top / "here", top / "there"
    for folder, _, names in os.walk(top, topdown=False):
        for name in names:
            os.unlink(Path(folder, name))
        os.rmdir(folder)


def move(tops: tuple[Path, Path], sparing: Sparing | None = None) -> None:
    tree = Tree("x", tops[0])
    unpacker = Unpacker(tops[1], sparing)
    try:
        trees.pack(tree, trees.listing(tree), unpacker.write)
    finally:
        unpacker.finish()


def make(top: Path) -> None:
    (top / "secret").write_text("for ALICE")
    os.setxattr(top / "secret", ACCESS, LIST)
    assert stat.S_IMODE((top / "secret").stat().st_mode) == 0o660
    (top / "folder").mkdir()
    os.setxattr(top / "folder", DEFAULT, LIST)
    (top / "plain").write_text("no list")


@pytest.mark.parametrize("sparing", [True, False])
def test_lists_go_along(tops: tuple[Path, Path], sparing: bool) -> None:
    here, there = tops
    make(here)
    move(tops, Sparing() if sparing else None)
    assert os.getxattr(there / "secret", ACCESS) == LIST
    assert os.getxattr(there / "folder", DEFAULT) == LIST
    for name in ("secret", "folder", "plain"):
        assert (there / name).stat().st_mode == (here / name).stat().st_mode
    assert os.listxattr(there / "plain") == []


def test_a_file_without_a_list_inherits_none(tops: tuple[Path, Path]) -> None:
    here, there = tops
    (here / "folder").mkdir()
    (here / "folder" / "older").write_text("than the list")
    (here / "folder" / "older").chmod(0o640)
    os.setxattr(here / "folder", DEFAULT, LIST)
    move(tops)
    assert ACCESS not in os.listxattr(there / "folder" / "older")
    assert (there / "folder" / "older").stat().st_mode & 0o7777 == 0o640


def test_lists_that_are_too_large_for_a_header_give_the_group_no_more(
    tops: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attributes, "MOST", 20)
    make(tops[0])
    move(tops)
    assert ACCESS not in os.listxattr(tops[1] / "secret")
    assert stat.S_IMODE((tops[1] / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSPC, errno.EPERM])
def test_where_there_are_no_lists_the_group_gets_no_more_than_it_had(
    tops: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    make(tops[0])

    def unsupported(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "setxattr", unsupported)
    move(tops)
    assert stat.S_IMODE((tops[1] / "secret").stat().st_mode) == 0o600
    assert (tops[1] / "secret").read_text() == "for ALICE"


def test_users_attributes_go_along_if_they_are_small(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for top in (here, there):
        top.mkdir()
    for name, size in (("small", 5), ("large", 3 * attributes.MOST // 4)):
        (here / name).touch()
        try:
            os.setxattr(here / name, "user.origin", b"v" * size)
            os.setxattr(here / name, "user.more", b"v" * min(size, 1000))
        except OSError as error:
            if error.errno != errno.ENOSPC:  # ext4 keeps a block of them
                raise
    os.setxattr(here / "small", "trusted.overlay", b"x")
    move((here, there))
    assert os.getxattr(there / "small", "user.origin") == b"vvvvv"
    assert "trusted.overlay" not in os.listxattr(there / "small")
    assert (there / "large").exists()


def test_too_many_are_left_out_but_for_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"user.large": bytes(attributes.MOST), ACCESS: LIST, "security.capability": b"x"}
    monkeypatch.setattr(os, "listxattr", lambda *_, **__: list(values))
    monkeypatch.setattr(os, "getxattr", lambda _, name, **__: values[name])
    entry = tarfile.TarInfo("x")
    attributes.add(entry, attributes.read(0))
    raw = entry.pax_headers[attributes.HEADER]
    assert msgspec.msgpack.decode(base64.b64decode(raw)) == {ACCESS: LIST}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("%", "base64"),
        ("wA==", "damaged attributes"),
        ("gbNzZWN1cml0eS5jYXBhYmlsaXR5xAF4", "an attribute that does not go along: 'security.cap"),
    ],
)
def test_what_no_source_sends_is_refused(tmp_path: Path, header: str, words: str) -> None:
    entry = tarfile.TarInfo("x")
    entry.pax_headers = {attributes.HEADER: header}
    (tmp_path / "x").touch()
    with pytest.raises(ValueError, match=words):
        attributes.put(str(tmp_path / "x"), entry)
