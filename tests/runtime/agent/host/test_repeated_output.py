# SPDX-License-Identifier: Apache-2.0
"""What a capsule printed before a rewind stays on its host, bounded, until its job is forgotten."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fleet_scene import CLUSTER

from liveshift.criu_glue.capsule import output
from liveshift.criu_glue.capsule.output import HEADER, REWIND, STDOUT, split
from liveshift.criu_glue.network.overlay import Overlay
from liveshift.errors import NotFound
from liveshift.runtime.agent.host import sandbox_owner
from liveshift.runtime.agent.host.capsule_table import CapsuleTable
from liveshift.runtime.agent.host.repeated_output import MOST_SEGMENTS
from liveshift.runtime.config import cluster as config
from liveshift.runtime.messages import Book, Forget, ReadRepeated

SUBNET = "10.99.7.0/24"
LOG_MAX = 1000


def record(text: bytes) -> bytes:
    return HEADER.pack(0, len(text), STDOUT) + text


def size(*texts: bytes) -> int:
    return sum(len(record(text)) for text in texts)


class Copy:
    """A copy of a capsule that has ended, with its directory."""

    def __init__(self, state: Path, name: str, rewinds: int) -> None:
        job, _, index = name.partition("/")
        self.spec = SimpleNamespace(name=name, job=job, index=int(index))
        self.overlay = Overlay(7, SUBNET, rewinds)
        self.directory = state / "capsules" / name.replace("/", ".")
        self.log = self.directory / "log"
        self.log.mkdir(parents=True)
        plan = SimpleNamespace(log=self.log, log_max=LOG_MAX, directory=self.directory)
        self.sandbox = SimpleNamespace(plan=plan, init=1, started=1)
        self.code: int | None = 137
        self.epoch, self.leaving, self.removed = 3, False, False
        self.still = False

    def prints(self, *texts: bytes, begins: int = 0) -> Copy:
        with output.segment(self.log, begins).open("ab") as file:
            file.write(b"".join(map(record, texts)))
        return self

    def end_silently(self) -> None:
        assert self.leaving

    def remove(self) -> None:
        for left in self.log.iterdir():
            left.unlink()
        self.log.rmdir()
        (self.directory / sandbox_owner.OWNER).unlink(missing_ok=True)
        self.directory.rmdir()
        self.removed = True


class Scene:
    def __init__(self, state: Path) -> None:
        self.state = state
        cluster = config.parse(CLUSTER.replace("{state}", str(state))).cluster
        self.table = CapsuleTable(cluster, "h0", lambda _: None, self.drop_earlier)

    async def drop_earlier(self, book: Book) -> None:
        """No migration holds anything."""

    def copy(self, rewinds: int, name: str = "gpt/0") -> Copy:
        made = Copy(self.state, name, rewinds)
        self.table.capsules[name] = cast(Any, made)
        return made

    def rewind(self, rewinds: int, job: str = "gpt") -> None:
        asyncio.run(self.table.end_earlier(Book(job, 7, SUBNET, {}, rewinds)))

    def kept(self, offset: int, until: int = REWIND, capsule: str = "gpt/0") -> list[bytes]:
        """All texts from the offset on."""
        texts = []
        while offset < until:
            request = ReadRepeated(capsule, offset, until)
            answer = asyncio.run(self.table.read_repeated(request))
            assert answer.next > offset
            offset = answer.next
            texts += [each.data for each in split(answer.data)]
        return texts


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_what_was_printed_since_the_snapshot_is_kept(scene: Scene) -> None:
    copy = scene.copy(0).prints(b"one", b"two", b"three")
    scene.rewind(1)
    assert copy.removed
    assert scene.kept(size(b"one")) == [b"two", b"three"]
    assert scene.kept(size(b"one", b"two", b"three")) == [], "all of that is in the snapshot"


def test_each_copy_adds_what_it_has_printed_itself(scene: Scene) -> None:
    """The second one has lines of the first one too, which were in its image."""
    scene.copy(0).prints(b"one", b"two")
    scene.rewind(1)
    scene.copy(1).prints(b"one").prints(b"two", b"three", begins=REWIND)
    scene.rewind(2)
    assert scene.kept(size(b"one")) == [b"two"]
    assert scene.kept(REWIND, 2 * REWIND) == [b"two", b"three"]


def test_a_copy_that_printed_nothing_has_left_nothing_out(scene: Scene) -> None:
    scene.copy(0)
    scene.rewind(1)
    assert scene.kept(0) == []
    output.begin_after_rewind(scene.copy(1).log, 1)
    scene.rewind(2)
    assert scene.kept(REWIND, 2 * REWIND) == []


def test_a_job_whose_name_was_rewound_before_begins_at_0(scene: Scene) -> None:
    scene.copy(4).prints(b"one", b"two")
    scene.rewind(5)
    assert scene.kept(0, 5 * REWIND) == [b"one", b"two"]


def test_a_host_that_had_no_copy_says_so(scene: Scene) -> None:
    with pytest.raises(NotFound, match="h0 keeps nothing of what gpt/0 printed then"):
        scene.kept(0)
    scene.copy(0).prints(b"one")
    scene.rewind(1)
    with pytest.raises(NotFound, match="h0 keeps nothing"):
        scene.kept(REWIND, 2 * REWIND)


def test_a_directory_of_a_later_sandbox_is_left_alone(scene: Scene) -> None:
    copy = scene.copy(0).prints(b"one")
    (copy.directory / sandbox_owner.OWNER).write_text("77 77")
    scene.rewind(1)
    with pytest.raises(NotFound):
        scene.kept(0)


def test_what_cannot_be_kept_does_not_hold_the_rewind_up(scene: Scene) -> None:
    (scene.state / "repeated").write_text("in the way")
    copy = scene.copy(0).prints(b"one")
    scene.rewind(1)
    assert copy.removed


def test_the_oldest_segments_go_beyond_the_bound(scene: Scene) -> None:
    """Segments of nearly logs.max bytes: two of them and a little more are too much."""
    text = b"x" * (LOG_MAX - HEADER.size)
    copy = scene.copy(0)
    for begins in (0, LOG_MAX, 2 * LOG_MAX):
        copy.prints(text, begins=begins)
    copy.prints(b"last", begins=3 * LOG_MAX)
    scene.rewind(1)
    answer = asyncio.run(scene.table.read_repeated(ReadRepeated("gpt/0", 0, REWIND)))
    assert answer.dropped == 2 * LOG_MAX
    assert scene.kept(0) == [text, b"last"]
    kept = sum(each.stat().st_size for each in (scene.state / "repeated" / "gpt.0").iterdir())
    assert kept <= 2 * LOG_MAX


@pytest.mark.parametrize("rewinds", [1, 40_000])
def test_what_is_left_of_a_copy_is_read_though_its_beginning_is_gone(
    scene: Scene, rewinds: int
) -> None:
    """Before it lies what an earlier copy has printed, which is another count of rewinds."""
    scene.copy(0).prints(b"one")
    scene.rewind(rewinds)
    scene.copy(rewinds).prints(b"left", begins=rewinds * REWIND + 500)
    scene.rewind(rewinds + 1)
    until = (rewinds + 1) * REWIND
    request = ReadRepeated("gpt/0", rewinds * REWIND + 100, until)
    answer = asyncio.run(scene.table.read_repeated(request))
    assert answer.dropped == 400
    assert scene.kept(request.offset, until) == [b"left"]


def test_a_job_that_is_rewound_for_weeks_leaves_no_more_and_more_files(scene: Scene) -> None:
    for count in range(1, 3 * MOST_SEGMENTS):
        scene.copy(count).prints(b"one", begins=count * REWIND)
        scene.rewind(count + 1)
    kept = list((scene.state / "repeated" / "gpt.0").iterdir())
    assert len(kept) == MOST_SEGMENTS
    assert scene.kept(count * REWIND, (count + 1) * REWIND) == [b"one"], "the newest are there"
    with pytest.raises(NotFound):
        scene.kept(REWIND, 2 * REWIND)


def test_it_goes_with_its_job(scene: Scene) -> None:
    for name in ("gpt/0", "other/0"):
        scene.copy(0, name).prints(b"one")
        scene.rewind(1, name.partition("/")[0])
    asyncio.run(scene.table.forget_job(Forget("gpt")))
    with pytest.raises(NotFound):
        scene.kept(0)
    assert scene.kept(0, capsule="other/0") == [b"one"]
    asyncio.run(scene.table.forget_unknown({"other"}))
    assert scene.kept(0, capsule="other/0") == [b"one"]
    asyncio.run(scene.table.forget_unknown(set()))
    with pytest.raises(NotFound):
        scene.kept(0, capsule="other/0")
