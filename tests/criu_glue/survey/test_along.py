# SPDX-License-Identifier: Apache-2.0
"""What goes along besides memory is measured before a move: how much, where it would lie, whether
it is the source's own directory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from bind_mounts import bound

from liveshift.criu_glue.capsule.mounts import mount_table
from liveshift.criu_glue.files import statx
from liveshift.criu_glue.survey import along
from liveshift.criu_glue.survey.along import measure, overlap, place_of
from liveshift.criu_glue.survey.found import Along, Footprint, Survey
from liveshift.runtime.agent import files_along
from liveshift.runtime.cost.prediction import Load, predict
from liveshift.runtime.messages import HostFacts, Inspected

MB = 1 << 20


def test_holes_are_not_counted_and_what_was_just_written_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x" * MB)
    os.utime(tmp_path / "old", (0, 10**9))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "new").write_bytes(b"x" * (2 * MB))
    with (tmp_path / "holes").open("wb") as file:
        os.pwrite(file.fileno(), b"x" * MB, 1 << 30)
        file.truncate(64 << 30)
    (tmp_path / "link").symlink_to("old")
    seen = measure("/tmp", tmp_path)
    assert seen.files == 6
    assert 4 * MB <= seen.size < 4 * MB + 8192
    assert 3 * MB <= seen.recent < 3 * MB + 8192
    assert measure("/x", tmp_path / "missing") == Along("/x", 0, 0, 0)


@pytest.mark.root
def test_what_is_mounted_below_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "library.so").write_bytes(b"x" * MB)
    (tmp_path / "top").mkdir()
    with bound(tmp_path / "elsewhere", tmp_path / "top" / "below"):
        assert measure("/tmp", tmp_path / "top").size == 0


@pytest.mark.root
def test_a_directory_is_known_by_whatever_name_it_goes(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("data")
    own = place_of(tmp_path / "data")
    assert place_of(tmp_path / "link") == own
    assert place_of(tmp_path) != own
    with bound(tmp_path / "data", tmp_path / "again"):
        assert place_of(tmp_path / "again") == own
        assert place_of(tmp_path / "again" / "deep") == place_of(tmp_path / "data" / "deep")
        assert overlap(place_of(tmp_path / "again" / "deep"), own)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("a 8:1", "/x"), ("a 8:1", "/x"), True),
        (("a 8:1", "/x"), ("a 8:1", "/x/y"), True),
        (("a 8:1", "/x/y"), ("a 8:1", "/x"), True),
        (("a 8:1", "/x"), ("a 8:1", "/"), True),
        (("a 8:1", "/x"), ("a 8:1", "/xy"), False),
        (("a 8:1", "/x"), ("b 8:1", "/x"), False),
        (("", ""), ("", ""), False),
    ],
)
def test_places_overlap_where_one_holds_the_other(
    one: tuple[str, str], other: tuple[str, str], same: bool
) -> None:
    assert overlap(one, other) is overlap(other, one) is same


def test_a_network_file_system_is_the_same_one_on_every_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though each host has given it a device number of its own."""
    table = mount_table("self")
    number, mount = next((n, m) for n, m in table.items() if m.point == "/")
    monkeypatch.setattr(statx, "stat", lambda _: SimpleNamespace(mount=number))

    def seen(device: str, kind: str, source: str, root: str) -> tuple[str, str]:
        as_if = replace(mount, device=device, kind=kind, source=source, root=root)
        monkeypatch.setattr(along, "mount_table", lambda _: {number: as_if})
        return place_of(Path("/"))

    assert seen("0:40", "nfs4", "nas:/export", "/jobs") == seen(
        "0:51", "nfs4", "nas:/export/jobs", "/"
    )
    assert seen("0:40", "nfs4", "nas:/export", "/") != seen("0:40", "nfs4", "nas:/other", "/")
    assert seen("8:1", "ext4", "/dev/sda1", "/") != seen("8:2", "ext4", "/dev/sda1", "/")


def test_the_sources_own_directory_is_not_unpacked_into(tmp_path: Path) -> None:
    """On a shared file system that was listed as carried: the hosts see one directory."""
    (tmp_path / "file").write_bytes(b"x")
    mine = measure(str(tmp_path), tmp_path)
    _, findings = files_along.check((mine,), tmp_path, "h2")
    assert len(findings) == 1
    assert f"{tmp_path} is the same directory at the source and on h2" in findings[0][0]
    assert "files.shared" in findings[0][1]
    _, findings = files_along.check((replace(mine, place=("boot 8:1", "/x")),), tmp_path, "h2")
    assert findings == []


def test_a_capsules_own_tmp_is_not_unpacked_into_itself(tmp_path: Path) -> None:
    """Two hosts whose state directory is on one shared file system, also when nothing is in /tmp:
    the sandbox that is built for the capsule would take the place of its directory."""
    capsules = tmp_path / "capsules"
    tmp = capsules / "job.0" / "tmp"
    tmp.mkdir(parents=True)
    mine = measure("/tmp", tmp)
    assert (mine.path, mine.size) == ("/tmp", 0)
    _, findings = files_along.check((mine,), capsules, "h2")
    assert len(findings) == 1
    assert f"{capsules}, is the same at the source and on h2" in findings[0][0]
    assert "paths.state" in findings[0][1]
    for others in (tmp_path / "h2" / "capsules", tmp_path / "none"):
        if others.name == "capsules":
            others.mkdir(parents=True)
        _, findings = files_along.check((mine,), others, "h2")
        assert findings == []


def test_files_that_have_no_space_at_the_destination_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_bytes(b"x" * MB)
    free = SimpleNamespace(f_bfree=10, f_frsize=MB)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    coming = (
        Along("/tmp", 3, 4 * MB, 0),
        Along(str(tmp_path), 2, 6 * MB, 0, ("another", "/")),
        Along("/not/there", 0, 0, 0),
    )
    row, findings = files_along.check(coming, tmp_path / "capsules", "h2")
    assert row == ("files along", "10.5 MB in 5 files, about 0.0 s while it trains")
    assert findings == [], "1 MB of it lies there already"
    free.f_bfree = 8
    _, findings = files_along.check(coming, tmp_path / "capsules", "h2")
    assert "h2 has 8.39 MB free where 9.44 MB of files are to come" in findings[0][0]
    free.f_bfree = 9
    assert files_along.check(coming, tmp_path / "capsules", "h2")[1] == []
    _, findings = files_along.check(coming, tmp_path / "capsules", "h2", output=MB)
    assert "where 10.5 MB of files are to come" in findings[0][0], "its output comes there, too"


def test_more_than_a_pre_copy_can_take_is_refused_with_the_numbers() -> None:
    coming = (Along("/tmp", 1000, 150_000_000_000, 0), Along("/data", 10, 60_000_000_000, 0))
    assert files_along.too_long(coming, 701) == []
    ((text, remedy),) = files_along.too_long(coming, 590)
    assert text == (
        "210 GB in 1010 files go along, which takes about 700 s, and a pre-copy has 590 s"
        " (timeouts.precopy)"
    )
    assert "remove what the job does not need of /tmp" in remedy
    assert "raise timeouts.precopy by 110 s" in remedy


def test_open_files_that_go_over_by_themselves_are_counted_into_the_pause(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        os.pwrite(file.fileno(), b"x" * (2 * MB), 1 << 30)
        file.truncate(64 << 30)
    names = [str(tmp_path / name) for name in ("log", "gone")]
    assert 2 * MB <= along.size_of(names) < 2 * MB + 8192
    none = Survey((1001,), 100 * MB, 0, (), (), (), (), ())
    assert files_along.while_paused(none) == []
    assert files_along.while_paused(replace(none, single_size=MB, single_files=("/x",))) == []
    much = replace(none, single_size=600_000_000, single_files=("/a", "/b", "/c", "/d", "/e"))
    ((what, text),) = files_along.while_paused(much)
    assert what == "warning"
    assert "600 MB of files that are open for writing go over while the job is paused" in text
    assert "about 2.0 s: /a, /b, /c and 2 more; list their directory under files.shared" in text
    look = Inspected(none, HostFacts("6.1", "x86_64", "cpu", [], "4.2.1", "0.1"), 5)
    part = {
        survey: next(
            p
            for p in predict(Load.of(msgspec.structs.replace(look, survey=survey))).parts
            if p.name == "files"
        )
        for survey in (none, much)
    }
    assert part[much].seconds == pytest.approx((part[none].seconds or 0) + 2.0)


def test_the_prediction_counts_what_is_listed_and_sent_again() -> None:
    size = Footprint(100 * MB, 0, 1, 100, 0)
    parts = {
        load: next(p for p in predict(load).parts if p.name == "files")
        for load in (Load(size), Load(size, entries=100_000), Load(size, changing=300_000_000))
    }
    none, many, much = parts.values()
    assert many.seconds == pytest.approx((none.seconds or 0) + 1.0)
    assert "100000 entries to list again" in many.detail
    assert much.seconds == pytest.approx((none.seconds or 0) + 1.0)
    assert much.bytes == 300_000_000
