# SPDX-License-Identifier: Apache-2.0
"""A store compares a generation with its source by the changed pages, and sometimes as a whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from generations import Memory, keep, kept, pages, place, store, write
from memory_parts import BASE, DATA, PAGE, ZERO, ZEROS, chunk, digest, page, table

from liveshift.criu_glue.memory.store.held_store import WHOLE_EACH, HeldStore
from liveshift.criu_glue.memory.store.image_view import ImageView
from liveshift.criu_glue.memory.store.store import PAGES_FILE
from liveshift.errors import StepFailed

__all__ = ["place", "store"]


def flip(place: Path, memory: Memory) -> None:
    """Change one bit of a page of process 7, where it lies."""
    whole = (place / PAGES_FILE).read_bytes()
    at = whole.index(memory[7][BASE])
    with (place / PAGES_FILE).open("r+b") as file:
        file.seek(at)
        file.write(bytes([whole[at] ^ 1]))


def counted_wholes() -> Any:
    """Counts how often an image is read as a whole."""
    return mock.patch.object(ImageView, "digest", autospec=True, side_effect=ImageView.digest)


def test_the_digest_after_changes_is_that_of_all_pages(store: HeldStore) -> None:
    """Between the two, pages come, go, and become zeros; a process ends and another one begins."""
    first: Memory = {7: pages(0, 300) | {BASE + 400 * PAGE: ZEROS}, 8: pages(500, 3)}
    write(store, first)
    keep(store, 1, first)
    gone = {at: data for at, data in first[7].items() if not 20 <= (at - BASE) // PAGE < 30}
    come = pages(2000, 40, at=100) | pages(3000, 5, at=600)
    second: Memory = {7: gone | come | {BASE: ZEROS}, 9: pages(4000, 7)}
    write(store, {7: come, 9: second[9]})
    store.write(chunk(7, [(BASE, 1, ZERO)]))
    store.write(chunk(7, [(BASE + 400 * PAGE, 1, DATA)], page(1)))
    second[7][BASE + 400 * PAGE] = page(1)
    keep(store, 2, second)
    with store.view(1) as before, store.view(2) as view:
        assert view.digest_after(before, digest(first)) == view.digest() == digest(second)
        assert before.digest_after(view, digest(second)) == digest(first)
        assert view.digest_after(view, digest(second)) == digest(second)


def test_a_page_that_came_wrong_is_found_at_once(store: HeldStore, place: Path) -> None:
    memory: Memory = {7: pages(0, 300)}
    write(store, memory)
    keep(store, 1, memory)
    memory[7] |= pages(1000, 3, at=50)
    write(store, {7: pages(1000, 2, at=50) | pages(9999, 1, at=52)})
    store.end(table(memory))
    with pytest.raises(StepFailed, match="generation 2 is not what its source has sent"):
        store.keep(2, digest(memory))
    assert store.kept == [1]
    store.revert(1)
    write(store, {7: pages(1000, 3, at=50)})
    keep(store, 2, memory)
    assert kept(store, 2) == memory


def test_a_bit_that_flips_in_a_page_that_stayed_is_found_before_long(
    store: HeldStore, place: Path
) -> None:
    memory: Memory = {7: pages(0, 300)}
    write(store, memory)
    keep(store, 1, memory)
    flip(place, memory)
    for number in range(2, WHOLE_EACH):  # only what comes is read
        store.drop(number - 2)
        write(store, {7: pages(1000 + number, 1, at=50)})
        memory[7] |= pages(1000 + number, 1, at=50)
        keep(store, number, memory)
    store.drop(WHOLE_EACH - 2)
    store.end(table(memory))
    with pytest.raises(StepFailed, match="is not what its source has sent"):
        store.keep(WHOLE_EACH, digest(memory))


def test_a_bit_that_flipped_in_a_page_that_went_since_does_no_harm(
    store: HeldStore, place: Path
) -> None:
    """The new generation has the right content, so the store keeps it."""
    memory: Memory = {7: pages(0, 300)}
    write(store, memory)
    keep(store, 1, memory)
    flip(place, memory)
    memory[7] |= {BASE: page(1000)}
    write(store, {7: {BASE: page(1000)}})
    keep(store, 2, memory)
    store.drop(1)
    memory[7] |= {BASE: page(1001)}
    write(store, {7: {BASE: page(1001)}})
    keep(store, 3, memory)
    assert kept(store, 3) == memory


def test_where_most_has_changed_all_is_read_once_and_not_twice(store: HeldStore) -> None:
    memory: Memory = {7: pages(0, 300)}
    write(store, memory)
    keep(store, 1, memory)
    for changed, whole in ((149, 0), (152, 1)):
        memory[7] |= pages(changed * 100, changed)
        write(store, {7: pages(changed * 100, changed)})
        with counted_wholes() as read:
            keep(store, changed, memory)
        assert read.call_count == whole
        store.drop(min(store.kept))


def test_what_an_earlier_agent_kept_is_read_as_a_whole(place: Path) -> None:
    """A restarted agent has not compared that generation itself."""
    memory: Memory = {7: pages(0, 300)}
    earlier = HeldStore.create(place, 16 << 20)
    write(earlier, memory)
    keep(earlier, 1, memory)
    earlier.close()
    flip(place, memory)
    store = HeldStore.load(place)
    write(store, {7: pages(1000, 1, at=50)})
    memory[7] |= pages(1000, 1, at=50)
    store.end(table(memory))
    with pytest.raises(StepFailed, match="generation 2 is not what its source has sent"):
        store.keep(2, digest(memory))
    store.close()


def test_without_the_generation_before_all_is_read(store: HeldStore) -> None:
    """Another thread may drop it at any moment, even while the next one is compared."""
    chance, memory = random.Random(2), Memory({7: pages(0, 100)})
    write(store, memory)
    keep(store, 1, memory)
    memory[7] |= pages(chance.randrange(1000, 2000), 5)
    write(store, memory)
    real = HeldStore.view

    def view(self: HeldStore, number: int) -> object:
        if number == 1:
            store.drop(1)
        return real(self, number)

    with mock.patch.object(HeldStore, "view", view), counted_wholes() as read:
        keep(store, 2, memory)
    assert read.call_count == 1
    assert kept(store, 2) == memory
