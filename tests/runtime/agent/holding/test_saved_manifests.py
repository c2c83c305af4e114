# SPDX-License-Identifier: Apache-2.0
"""Which snapshots a directory has, and that none of them is ever lost to another one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed
from liveshift.runtime.agent.holding import saved_manifests, trusted_directory

pytestmark = pytest.mark.root


@pytest.fixture
def kept() -> Iterator[Path]:
    with TemporaryDirectory(prefix="liveshift-", dir="/var/lib") as name:
        yield Path(name)


def line(time: float, more: str = "") -> bytes:
    return f'{{"time":{time},"more":"{more}"}}\nsigned\n'.encode()


def write(kept: Path, snapshot: str, data: bytes, job: str = "gpt") -> None:
    (kept / job).mkdir(exist_ok=True)
    saved_manifests.write(kept, job, snapshot, data)


def test_the_newest_is_the_one_that_was_taken_last(kept: Path) -> None:
    """Not the one with the highest number: another cluster counts from 1."""
    write(kept, "s9", line(100.0))
    write(kept, "s2", line(300.0))
    write(kept, "s10", line(200.0))
    assert saved_manifests.read(kept, "gpt", "") == line(300.0)
    assert saved_manifests.read(kept, "gpt", "s9") == line(100.0)
    assert (kept / "gpt/s9.json").stat().st_mode & 0o777 == 0o600
    assert not list(kept.rglob("*.new"))


def test_what_an_attempt_has_left_is_removed_but_nothing_of_a_whole_snapshot(kept: Path) -> None:
    write(kept, "s7", line(100.0))
    for image in ("s7.0", "s8.0", "s8.1"):
        (kept / "gpt" / image / "s8").mkdir(parents=True)
        (kept / "gpt" / image / "s8" / "core.zst").write_bytes(b"core")
    with pytest.raises(Refused, match="has a snapshot s7 of gpt already"):
        saved_manifests.drop(kept, "gpt", "s7", "s7.0")
    for _ in range(2):  # it may be repeated
        saved_manifests.drop(kept, "gpt", "s8", "s8.0")
    assert {path.name for path in (kept / "gpt").iterdir()} == {"s7.json", "s7.0", "s8.1"}
    (kept / "other" / "s1.0").mkdir(parents=True)
    saved_manifests.drop(kept, "other", "s1", "s1.0")
    assert not (kept / "other").exists(), "nothing else was in it"


def test_a_manifest_that_comes_after_its_images_were_removed_is_none(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory hangs while it is written; the orchestrator gives the snapshot up, and another
    host removes its image. Then the directory is back."""
    data = b'{"time":5,"capsules":{"gpt/0":{"image":"s7.0"},"gpt/1":{"image":"s7.1"}}}\nsigned\n'
    images = [kept / "gpt" / image for image in ("s7.0", "s7.1")]
    real = trusted_directory.write_last

    def slow(path: Path, data: bytes) -> None:
        saved_manifests.drop(kept, "gpt", "s7", "s7.1")
        real(path, data)

    for image in images:
        image.mkdir(parents=True)
        (image / "image.json").write_bytes(b"{}")
    with monkeypatch.context() as hangs:
        hangs.setattr(saved_manifests, "write_last", slow)
        with pytest.raises(StepFailed, match=r"there is no .*/s7\.1/image\.json any more"):
            write(kept, "s7", data)
    assert not list(kept.rglob("s7.json*"))
    with pytest.raises(NotFound, match="has no whole snapshot of gpt"):
        saved_manifests.read(kept, "gpt", "")
    images[1].mkdir()
    (images[1] / "image.json").write_bytes(b"{}")
    write(kept, "s7", data)
    assert saved_manifests.read(kept, "gpt", "") == data


def test_images_without_a_manifest_are_no_snapshot(kept: Path) -> None:
    (kept / "gpt" / "s7.0").mkdir(parents=True)
    with pytest.raises(NotFound, match=r"has no whole snapshot of gpt$"):
        saved_manifests.read(kept, "gpt", "")


def test_what_is_there_instead_is_named(kept: Path) -> None:
    write(kept, "s10", line(1.0))
    write(kept, "s9", line(2.0))
    write(kept, "s1", line(3.0), job="bert")
    with pytest.raises(NotFound, match=r"has no snapshot s3 of gpt: it has s9, s10$"):
        saved_manifests.read(kept, "gpt", "s3")
    with pytest.raises(NotFound, match=r"no whole snapshot of gtp: it has snapshots of bert, gpt$"):
        saved_manifests.read(kept, "gtp", "")


def test_other_files_of_people_are_no_snapshots(kept: Path) -> None:
    write(kept, "s7", line(5.0))
    (kept / "gpt" / "sums.json").write_text("[]")
    (kept / "gpt" / "s8.json.new").write_text("half of it")
    (kept / "notes").mkdir()
    (kept / "notes" / "summary.json").write_text("{}")
    assert saved_manifests.read(kept, "gpt", "") == line(5.0)
    with pytest.raises(NotFound, match=r"it has snapshots of gpt$"):
        saved_manifests.read(kept, "nix", "")


def test_one_that_cannot_be_read_is_not_passed_over(kept: Path) -> None:
    """An older one would be taken for the newest."""
    write(kept, "s7", line(5.0))
    (kept / "gpt" / "s8.json").write_bytes(b"\xff")
    with pytest.raises(StepFailed, match=r"s8\.json cannot be read") as failed:
        saved_manifests.read(kept, "gpt", "")
    assert "--snapshot" in (failed.value.hint or "")
    assert saved_manifests.read(kept, "gpt", "s7") == line(5.0)


def test_none_is_written_over(kept: Path) -> None:
    saved_manifests.check_free(kept, "gpt", "s7")
    write(kept, "s7", line(5.0, "ours"))

    def theirs() -> None:
        write(kept, "s7", line(6.0, "theirs"))

    def look() -> None:
        saved_manifests.check_free(kept, "gpt", "s7")

    for refused in (theirs, look):
        with pytest.raises(Refused, match="has a snapshot s7 of gpt already") as error:
            refused()
        assert f"remove {kept}/gpt/s7.json" in (error.value.hint or ""), "and no other snapshot"
    assert saved_manifests.read(kept, "gpt", "s7") == line(5.0, "ours")
    saved_manifests.check_free(kept, "gpt", "s8")


def test_a_manifest_that_cannot_be_written_is_not_there(kept: Path) -> None:
    with pytest.raises(StepFailed, match="cannot be written: "):
        saved_manifests.write(kept, "gpt", "s7", line(5.0))  # the job has no directory
    saved_manifests.check_free(kept, "gpt", "s7")


def test_images_of_other_snapshots_may_be_removed_meanwhile(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their directories are nothing to a new manifest."""

    def listed(_: Path, pattern: str) -> list[Path]:
        return [kept / "gpt" / "s1.0"]  # it is gone by now

    (kept / "gpt").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rglob", listed)
        patched.setattr(Path, "is_dir", lambda _: True)
        saved_manifests.write(kept, "gpt", "s7", line(5.0))
    assert saved_manifests.read(kept, "gpt", "") == line(5.0)


def test_a_directory_that_cannot_be_looked_into_is_named(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exists(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(StepFailed, match=rf"{kept}/gpt/s7\.json cannot be looked for"):
        saved_manifests.check_free(kept, "gpt", "s7")


def test_a_directory_that_others_can_change_is_neither_read_nor_written(kept: Path) -> None:
    write(kept, "s7", line(5.0))
    kept.chmod(0o777)
    for use in (
        lambda: write(kept, "s8", line(6.0)),
        lambda: saved_manifests.read(kept, "gpt", ""),
    ):
        with pytest.raises(LiveshiftError, match="others than root can change"):
            use()
    assert not (kept / "gpt/s8.json").exists()
