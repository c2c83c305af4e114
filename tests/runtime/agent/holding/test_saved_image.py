# SPDX-License-Identifier: Apache-2.0
"""Images in a directory come back as they were, or are refused."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import pytest

from liveshift.errors import LiveshiftError, NotFound, Refused, StepFailed
from liveshift.runtime.agent.holding import saved_image, trusted_directory
from liveshift.runtime.agent.holding.saved_file import SavedFile
from liveshift.runtime.agent.holding.saved_image import SUMS, SavedImage, WrittenImage

pytestmark = pytest.mark.root
LARGE = 1 << 30


@pytest.fixture
def kept() -> Iterator[Path]:
    """A directory that root alone can change, and so is all above it; as the product wants it."""
    with TemporaryDirectory(prefix="liveshift-", dir="/var/lib") as name:
        yield Path(name)


@pytest.fixture
def there(kept: Path) -> Path:
    return kept / "gpt" / "s7.0"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Small files, and a large one that is nearly empty."""
    made = tmp_path / "gpt.0"
    (made / "s7" / "trees").mkdir(parents=True)
    (made / "s7" / "core-1.img").write_bytes(b"core")
    (made / "s7" / "trees" / "empty").touch()
    with (made / "pages").open("wb") as pages:
        pages.truncate(LARGE)
        for at in (0, 5 << 20, LARGE - 4096):
            pages.seek(at)
            pages.write(b"page" * 1024)
    return made


def save(files: Path, target: Path, capsule: str = "gpt/0") -> WrittenImage:
    paths = [path for path in files.rglob("*") if path.is_file()]
    return saved_image.save(files, paths, target, target.name, capsule)


def load(source: Path, target: Path, digest: str) -> None:
    target.mkdir()
    saved_image.load(source, target, saved_image.read(source, digest))


def contents(top: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(top)): p.read_bytes()[: 6 << 20] for p in top.rglob("*") if p.is_file()
    }


def test_what_was_saved_comes_back_with_its_holes(there: Path, files: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    written = save(files, there)
    assert 0 < written.bytes < 10 << 20
    assert written.bytes == sum(p.stat().st_size for p in there.rglob("*") if p.is_file())
    assert written.digest == hashlib.sha256((there / SUMS).read_bytes()).hexdigest()
    assert {p.stat().st_mode & 0o77 for p in (there, *there.rglob("*"))} == {0}
    load(there, back, written.digest)
    assert contents(back) == contents(files)
    assert (back / "pages").stat().st_size == LARGE
    with (back / "pages").open("rb") as pages:
        pages.seek(LARGE - 4096)
        assert pages.read() == b"page" * 1024


def test_a_single_file_can_be_read(there: Path, files: Path) -> None:
    saved = saved_image.read(there, save(files, there).digest)
    assert (saved.image, saved.capsule) == ("s7.0", "gpt/0")
    assert saved_image.content(there, saved, "s7/core-1.img") == b"core"
    with pytest.raises(StepFailed, match=r"s7\.0 has no file s7/other"):
        saved_image.content(there, saved, "s7/other")


@pytest.mark.parametrize("harm", ["changed", "shorter", "gone"])
def test_a_damaged_image_is_refused_and_leaves_nothing(
    there: Path, files: Path, tmp_path: Path, harm: str
) -> None:
    back = tmp_path / "back"
    written = save(files, there)
    core = there / "s7" / "core-1.img.zst"
    data = core.read_bytes()
    if harm == "gone":
        core.unlink()
    else:
        core.write_bytes(data[:-1] if harm == "shorter" else data[:-1] + b"?")
    with pytest.raises(StepFailed, match=r"is damaged|cannot be read"):
        load(there, back, written.digest)
    assert not back.exists()


def test_an_attempt_that_failed_is_no_image(there: Path, files: Path) -> None:
    written = save(files, there)
    (there / SUMS).unlink()
    (there / "s7" / "of the attempt").touch()
    with pytest.raises(NotFound, match="has no whole image"):
        saved_image.read(there, written.digest)
    assert save(files, there) == written
    assert not (there / "s7" / "of the attempt").exists()
    assert saved_image.read(there, written.digest).capsule == "gpt/0"


def test_a_list_of_files_that_was_changed_is_refused(there: Path, files: Path) -> None:
    written = save(files, there)
    sums = there / SUMS
    sums.write_bytes(sums.read_bytes().replace(b"gpt/0", b"gpt/1"))
    with pytest.raises(Refused, match="was changed since it was signed") as refused:
        saved_image.read(there, written.digest)
    assert written.digest in refused.value.message


def test_another_capsules_image_in_its_place_is_refused(kept: Path, files: Path) -> None:
    own, other = kept / "gpt" / "s7.0", kept / "gpt" / "s7.1"
    written = save(files, own)
    save(files, other, "gpt/1")
    shutil.rmtree(own)
    other.rename(own)
    with pytest.raises(Refused, match="was changed since it was signed"):
        saved_image.read(own, written.digest)


def signed(there: Path, saved: SavedImage) -> str:
    """An image with this list, which a trusted cluster has signed."""
    data = msgspec.json.encode(saved)
    (there / SUMS).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def test_an_image_of_a_later_version_is_refused(there: Path, files: Path) -> None:
    saved = saved_image.read(there, save(files, there).digest)
    later = signed(there, msgspec.structs.replace(saved, version=saved_image.VERSION + 1))
    with pytest.raises(Refused, match=r"written by another version .* its format is 3"):
        saved_image.read(there, later)
    (there / SUMS).write_bytes(b"[]")
    with pytest.raises(LiveshiftError, match="cannot be read"):
        saved_image.read(there, hashlib.sha256(b"[]").hexdigest())


@pytest.mark.parametrize("name", ["../other", "s7/../../other", "/tmp/other"])
def test_an_image_brings_no_file_to_another_place(
    there: Path, files: Path, tmp_path: Path, name: str
) -> None:
    saved = saved_image.read(there, save(files, there).digest)
    outside = SavedFile(4, [(0, 4)], 4, "0")
    digest = signed(there, msgspec.structs.replace(saved, files={**saved.files, name: outside}))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(StepFailed, match="which is outside"):
        load(there, tmp_path / "back", digest)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_without_room_nothing_is_written(
    kept: Path, there: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(Refused, match=r"has 4\.10 kB left, and the image of gpt/0 takes up to"):
        save(files, there)
    assert contents(kept) == {}


def test_a_file_that_cannot_be_saved_leaves_nothing(kept: Path, there: Path, files: Path) -> None:
    with pytest.raises(StepFailed, match=r"s7\.0 cannot be written: .*gone"):
        saved_image.save(files, [files / "s7" / "gone"], there, "s7.0", "gpt/0")
    assert contents(kept) == {}


def test_a_directory_that_others_can_change_is_refused(kept: Path, files: Path) -> None:
    kept.chmod(0o777)
    with pytest.raises(Refused, match="others than root can change"):
        save(files, kept / "gpt" / "s7.0")
    assert list(kept.iterdir()) == []
    with pytest.raises(NotFound, match="cannot be used"):
        trusted_directory.check_trusted(kept / "nowhere")


@pytest.mark.parametrize("odd", ["loop", "nul", "file"])
def test_what_can_be_no_directory_is_refused_in_words(kept: Path, odd: str) -> None:
    place = kept / ("a\0b" if odd == "nul" else odd)
    if odd == "loop":
        place.symlink_to(place)
    elif odd == "file":
        place.touch()
    with pytest.raises(LiveshiftError, match=r"cannot be used|is not a directory"):
        trusted_directory.check_trusted(place)


@pytest.mark.parametrize("whose", ["root", "link", "place"])
def test_a_link_is_as_safe_as_the_one_who_can_change_it(
    kept: Path, files: Path, whose: str
) -> None:
    place, there = kept / "place", kept / "there"
    place.mkdir()
    there.mkdir(mode=0o700)
    link = place / "link"
    link.symlink_to(there)
    if whose != "root":
        os.lchown(place / "link" if whose == "link" else place, 1001, 1001)
    if whose == "root":
        save(files, link / "gpt" / "s7.0")
        assert (there / "gpt" / "s7.0" / SUMS).exists()
        return
    with pytest.raises(Refused, match="others than root can change"):
        save(files, link / "gpt" / "s7.0")
    assert list(there.iterdir()) == []
