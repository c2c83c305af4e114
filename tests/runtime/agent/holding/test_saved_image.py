# SPDX-License-Identifier: Apache-2.0
"""Images in a directory come back as they were, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from liveshift.errors import NotFound, Refused, StepFailed
from liveshift.runtime.agent.holding import saved_image

pytestmark = pytest.mark.root
LARGE = 1 << 30


@pytest.fixture
def kept() -> Iterator[Path]:
    """A directory that root alone can change, and so is all above it; as the product wants it."""
    with TemporaryDirectory(prefix="liveshift-", dir="/var/lib") as name:
        yield Path(name)


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


def contents(top: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(top)): p.read_bytes()[: 6 << 20]
        for p in top.rglob("*")
        if p.is_file() and p.name != saved_image.SUMS
    }


def test_what_was_saved_comes_back_with_its_holes(kept: Path, files: Path, tmp_path: Path) -> None:
    there, back = kept / "gpt" / "s7.0", tmp_path / "back"
    size = saved_image.save(files, there, "s7.0", "gpt/0")
    assert 0 < size < 10 << 20
    assert there.stat().st_mode & 0o77 == 0
    assert (there / "pages").stat().st_blocks * 512 < 10 << 20
    back.mkdir()
    saved_image.load(there, back, "s7.0", "gpt/0")
    assert contents(back) == contents(files)
    assert (back / "pages").stat().st_size == LARGE
    with (back / "pages").open("rb") as pages:
        pages.seek(LARGE - 4096)
        assert pages.read() == b"page" * 1024


@pytest.mark.parametrize("harm", ["changed", "shorter", "gone"])
def test_a_damaged_image_is_refused_and_leaves_nothing(
    kept: Path, files: Path, tmp_path: Path, harm: str
) -> None:
    there, back = kept / "gpt" / "s7.0", tmp_path / "back"
    saved_image.save(files, there, "s7.0", "gpt/0")
    core = there / "s7" / "core-1.img"
    if harm == "gone":
        core.unlink()
    else:
        core.write_bytes(b"cure" if harm == "changed" else b"cor")
    back.mkdir()
    with pytest.raises(StepFailed, match=r"is damaged|cannot be read"):
        saved_image.load(there, back, "s7.0", "gpt/0")
    assert not back.exists()


def test_an_attempt_that_failed_is_no_image(kept: Path, files: Path) -> None:
    there = kept / "gpt" / "s7.0"
    saved_image.save(files, there, "s7.0", "gpt/0")
    (there / saved_image.SUMS).unlink()
    with pytest.raises(NotFound, match="has no whole image"):
        saved_image.read(there)
    saved_image.save(files, there, "s7.0", "gpt/0")
    assert saved_image.read(there).capsule == "gpt/0"


def test_another_image_is_not_taken_for_it(kept: Path, files: Path, tmp_path: Path) -> None:
    there = kept / "gpt" / "s7.0"
    saved_image.save(files, there, "s7.0", "gpt/0")
    with pytest.raises(NotFound, match=r"has s7\.0 of gpt/0, and not s7\.1 of gpt/1"):
        saved_image.load(there, tmp_path / "back", "s7.1", "gpt/1")


def test_a_directory_that_others_can_change_is_refused(kept: Path, files: Path) -> None:
    kept.chmod(0o777)
    with pytest.raises(Refused, match="others than root can change"):
        saved_image.save(files, kept / "gpt" / "s7.0", "s7.0", "gpt/0")
    assert list(kept.iterdir()) == []
    with pytest.raises(NotFound, match="cannot be used"):
        saved_image.check_trusted(kept / "nowhere")
