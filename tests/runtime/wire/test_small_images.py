# SPDX-License-Identifier: Apache-2.0
"""Small images travel in one stream, and come out of it as they went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inbox_scene import Host, host

from liveshift.errors import StepFailed
from liveshift.runtime.agent.arrival import inbox as inboxes
from liveshift.runtime.wire.small_images import (
    _HEAD,
    PACK,
    SMALL,
    STREAM,
    SmallImagePacker,
    SmallImageUnpacker,
)

__all__ = ["host"]

FILES = {
    **{f"core-{n}.img": b"%d" % n * 40 for n in range(500)},
    "empty.img": b"",
    "just.img": b"x" * SMALL,
    "pages-1.img": b"y" * (SMALL + 1),
    "pages-2.img": b"z" * (4 * PACK),
}


def pack(files: dict[str, bytes], piece: int = 1000) -> list[tuple[str, bytes]]:
    sent: list[tuple[str, bytes]] = []
    packer = SmallImagePacker(lambda stream, data: sent.append((stream, data)))
    for name, data in files.items():
        for at in range(0, len(data), piece):
            packer(name, data[at : at + piece])
        packer(name, b"")
    packer.finish()
    return sent


def test_large_ones_keep_streams_of_their_own_and_all_others_share_one() -> None:
    sent = pack(FILES)
    assert {stream for stream, _ in sent} == {STREAM, "image:pages-1.img", "image:pages-2.img"}
    assert sum(stream == STREAM for stream, _ in sent) < 10
    assert sent[0][0] == STREAM, "the first one goes at once"
    assert sent[-1][1] == b""


def test_they_are_files_again_where_they_arrive(host: Host) -> None:
    for stream, data in pack(FILES):
        host.send(stream, data, end=not data)
    host.finish()
    assert host.inbox.complete
    for name, data in FILES.items():
        assert (host.images / name).read_bytes() == data
    assert host.landed().complete


@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,9}\.img", fullmatch=True), st.binary(max_size=300)),
    st.integers(1, 64),
)
def test_however_they_are_cut(files: dict[str, bytes], piece: int) -> None:
    raw = b"".join(data for _, data in pack(files))
    found: dict[str, bytes] = {}
    unpacker = SmallImageUnpacker(lambda name, data: found.update({name: bytes(data)}))
    for at in range(0, len(raw), piece):
        unpacker.write(raw[at : at + piece])
    unpacker.check_ended()
    assert found == files


def test_nothing_is_sent_for_no_images() -> None:
    assert pack({}) == []


@pytest.mark.parametrize("name", ["../x.img", "criu.conf", "x", "\xff.img", ".img"])
def test_only_images_come_out(host: Host, name: str) -> None:
    raw = name.encode("latin-1")
    with pytest.raises(StepFailed, match="no destination takes"):
        host.send(STREAM, _HEAD.pack(len(raw), 1) + raw + b"x")
    assert list(host.images.iterdir()) == []


@pytest.mark.parametrize(
    "raw",
    [_HEAD.pack(0, 1) + b"x", _HEAD.pack(101, 1), _HEAD.pack(5, SMALL + 1), b"\xff" * 100],
    ids=["no name", "long name", "large", "noise"],
)
def test_what_no_source_sends(host: Host, raw: bytes) -> None:
    with pytest.raises(StepFailed, match=r"has an image of .* bytes with a name of"):
        host.send(STREAM, raw)


def test_what_is_cut_off_or_comes_twice(host: Host) -> None:
    (whole,) = [data for _, data in pack({"core-1.img": b"x"}) if data]
    with pytest.raises(StepFailed, match="the last image is cut off"):
        host.send(STREAM, whole[:-1])
    with pytest.raises(StepFailed, match="more came for"):
        host.send(STREAM, b"x")


def test_no_image_comes_twice(host: Host) -> None:
    host.send("image:mm-1.img", b"x")
    with pytest.raises(StepFailed, match=r"mm-1\.img comes twice"):
        host.send(STREAM, b"".join(d for _, d in pack({"core-1.img": b"x", "mm-1.img": b"x"})))


def test_they_are_counted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "STREAMS", 100)
    raw = b"".join(data for stream, data in pack(FILES) if stream == STREAM)
    with pytest.raises(StepFailed, match="the image has too many files"):
        host.send(STREAM, raw)
