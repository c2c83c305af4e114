# SPDX-License-Identifier: Apache-2.0
"""A host becomes a further holder of an image that another one holds. The stores, the files and the
wire between the two are real."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import memory_parts
import msgspec
import pytest
from holding_handlers_scene import FIRST, SURVEY, Scene, hold, key_directory, scene
from preflight_scene import HERE
from waits import until

from liveshift.errors import NotFound, Refused, StepFailed
from liveshift.runtime import messages
from liveshift.runtime.agent.holding import held_generation

__all__ = ["key_directory", "scene"]

DIGEST = memory_parts.digest(FIRST)


class Pair:
    """``first`` holds the image s17.1, and runs as h0; ``second`` is h1."""

    def __init__(self, first: Scene, second: Scene) -> None:
        self.first, self.second = first, second
        first.table.host = "h0"
        ends = {name: end.table.cluster.host(name) for name, end in (("h0", first), ("h1", second))}
        first.table.cluster.host = ends.__getitem__
        first.keep(17)

    def hold(self) -> messages.Holding:
        asked = msgspec.structs.replace(hold(17), anew=True)
        return asyncio.run(self.second.handlers.hold(asked))

    def send(self) -> messages.Frozen:
        there = self.second.endpoint
        request = messages.ForwardHeld("s17.1", "s17.1", "gpt/1", "h1", there)
        return asyncio.run(self.first.handlers.forward(request))

    def check(self, digest: bytes = DIGEST) -> messages.Held:
        return asyncio.run(self.second.handlers.check(messages.CheckHeld("s17.1", "gpt/1", digest)))

    def sends(self) -> Callable[[], BaseException | None]:
        """Send in another thread; the result waits for its end, and returns what it raised."""
        raised: list[BaseException] = []

        def work() -> None:
            try:
                self.send()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()

        def end() -> BaseException | None:
            thread.join(30)
            assert not thread.is_alive()
            return raised[0] if raised else None

        return end


@pytest.fixture
def pair(scene: Scene, key_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="ls-held-", dir="/dev/shm") as place:
        first = Scene(Path(place), key_directory, monkeypatch)
        yield Pair(first, scene)
        first.handlers.close()


def content(scene: Scene) -> dict[str, bytes]:
    """The files of the image, but for what differs: when it came, and from where."""
    capsule, number = scene.handlers._images.find("s17.1")
    top = capsule.directory / f"s{number}"
    found = {str(path.relative_to(top)): path for path in top.rglob("*") if path.is_file()}
    return {n: path.read_bytes() for n, path in found.items() if n not in ("sums", "note")}


def test_what_one_holder_has_the_other_gets_whole(pair: Pair) -> None:
    facts = asyncio.run(pair.first.handlers.facts(messages.GetHeld("s17.1", "gpt/1")))
    assert facts.digest == DIGEST
    pair.hold()
    assert pair.second.numbers == [(17, False)]
    pair.send()
    assert pair.check(facts.digest).bytes > 0
    for end in (pair.first, pair.second):
        assert (end.numbers, end.handlers.busy) == ([(17, True)], False)
    assert {name for name in content(pair.first) if name.endswith(".img")} == {"core-1001.img"}
    for name, data in content(pair.first).items():
        if name.endswith(".img"):
            assert content(pair.second)[name] == data
    again = asyncio.run(pair.second.handlers.facts(messages.GetHeld("s17.1", "gpt/1", True)))
    assert (again.digest, again.survey, again.facts) == (DIGEST, SURVEY, HERE)
    assert again.image_bytes == pytest.approx(facts.image_bytes, abs=4096)
    assert pair.second.announced == []


def test_a_restarted_agent_has_the_copy(pair: Pair) -> None:
    pair.hold()
    pair.send()
    pair.check()
    pair.second.handlers.close()
    pair.second.again()
    found = asyncio.run(pair.second.handlers.facts(messages.GetHeld("s17.1", "gpt/1", True)))
    assert found.digest == DIGEST


def test_a_copy_with_another_digest_is_removed(pair: Pair) -> None:
    pair.hold()
    pair.send()
    with pytest.raises(StepFailed):
        pair.check(b"0" * len(DIGEST))
    assert pair.second.numbers == []
    assert pair.first.numbers == [(17, True)]


def test_a_copy_that_is_begun_anew_is_taken_from_the_beginning(pair: Pair) -> None:
    """An earlier attempt has brought a part, or all."""
    pair.hold()
    pair.hold()
    pair.send()
    pair.hold()
    assert pair.second.numbers == [(17, False)]
    with pytest.raises(StepFailed, match="not complete"):
        pair.check()
    pair.send()
    pair.check()
    assert pair.second.numbers == [(17, True)]


def test_a_copy_that_was_kept_outlives_an_order_that_comes_late(pair: Pair) -> None:
    """The journal may say by now that the host has it. It goes when a ruling says so."""
    pair.hold()
    pair.send()
    pair.check()
    with pytest.raises(Refused, match=r"s17 is kept in .* already"):
        pair.hold()
    assert pair.second.numbers == [(17, True)]
    capsule, number = pair.second.handlers._images.find("s17.1")
    generation = capsule.generations[0]
    generation.users += 1
    capsule.drop(number)
    with pytest.raises(Refused, match=r"s17 is kept in .* already"):
        pair.hold()  # it has the directory as long as it is in use
    capsule._unuse(generation)
    pair.hold()
    assert pair.second.numbers == [(17, False)]


def test_nothing_is_left_of_a_copy_whose_image_is_dropped(pair: Pair) -> None:
    """The other host is away, and the job has gone on and has a later snapshot."""
    pair.hold()
    pair.second.receiver.close()
    end = pair.sends()
    capsule, _ = pair.first.handlers._images.find("s17.1")
    until(lambda: bool(capsule.generations[0]._wires))
    time.sleep(0.3)
    began = time.monotonic()
    pair.first.handlers._images.drop("s17.1")
    raised = end()
    assert time.monotonic() - began < 5.0, "the wire's patience is 10 s"
    assert isinstance(raised, StepFailed)
    assert "s17.1 is not held any more" in str(raised)
    assert pair.first.numbers == []
    assert not capsule.directory.exists()
    pair.first.handlers._images.tidy()  # as at each heartbeat
    assert not capsule.directory.parent.exists()


def test_an_image_that_was_compared_for_a_copy_is_compared_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit may flip while the copy is made. Only a rewind that was told is let off."""
    pair.hold()
    pair.send()
    pair.check()
    for end in (pair.first, pair.second):
        capsule, _ = end.handlers._images.find("s17.1")
        (capsule.directory / "s17" / "core-1001.img").write_bytes(b"another")
        with pytest.raises(NotFound, match="is damaged"):
            asyncio.run(end.handlers.facts(messages.GetHeld("s17.1", "gpt/1", True)))
    monkeypatch.undo()
    assert held_generation.COMPARED_S > 1.0
