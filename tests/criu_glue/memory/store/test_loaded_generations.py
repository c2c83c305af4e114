# SPDX-License-Identifier: Apache-2.0
"""What a restarted agent finds of the generations that a store has kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from generations import LIMIT, Memory, keep, kept, pages, place, taken, write
from memory_parts import BASE, PAGE, ZEROS, page

from liveshift.criu_glue.memory.store.held_store import HeldStore
from liveshift.errors import StepFailed

__all__ = ["place"]


def test_a_restarted_agent_finds_both_generations_and_goes_on(place: Path) -> None:
    first: Memory = {7: pages(0, 300) | {BASE + 999 * PAGE: ZEROS}, 8: pages(400, 100)}
    second: Memory = {7: first[7] | pages(1000, 50), 8: first[8]}
    third: Memory = {7: second[7] | pages(3000, 20, at=100), 8: first[8]}
    store = HeldStore.create(place, LIMIT)
    write(store, first)
    keep(store, 17, first)
    write(store, {7: pages(1000, 50)})
    keep(store, 18, second | {9: {}})
    write(store, {7: pages(2000, 250, at=10)})  # of one that will not be kept
    store.save()  # an inbox does that for any store
    assert taken(place) == 450 + 250
    store.close()

    store = HeldStore.load(place)
    assert store.kept == [17, 18]
    assert (kept(store, 17), kept(store, 18), taken(place)) == (first, second, 450)
    store.drop(17)
    assert taken(place) == 400
    write(store, {7: pages(3000, 20, at=100)})
    keep(store, 19, third)
    assert (kept(store, 18), kept(store, 19), taken(place)) == (second, third, 420)
    store.drop(18)
    store.close()

    store = HeldStore.load(place)
    assert (store.kept, kept(store, 19), taken(place)) == ([19], third, 400)
    store.drop(19)
    store.close()
    with pytest.raises(StepFailed, match="keeps no generation"):
        HeldStore.load(place)


def test_a_new_store_has_nothing_of_an_earlier_one(place: Path) -> None:
    memory: Memory = {7: pages(0, 10)}
    for _ in range(2):
        store = HeldStore.create(place, LIMIT)
        assert (store.kept, taken(place)) == ([], 0)
        with pytest.raises(StepFailed, match="keeps no generation"):
            HeldStore.load(place)
        write(store, memory)
        keep(store, 1, memory)
        store.close()


@pytest.mark.parametrize("cut", [0, 10, 31, 40, 60, -1])
def test_a_damaged_index_of_a_generation_is_told(place: Path, cut: int) -> None:
    store = HeldStore.create(place, LIMIT)
    memory: Memory = {7: {BASE + 2 * n * PAGE: page(n) for n in range(10)}}
    write(store, memory)
    keep(store, 3, memory)
    store.close()
    path = place / "memory.index.3"
    raw = path.read_bytes()
    path.write_bytes(raw[:cut] if cut >= 0 else raw + b"x")
    with pytest.raises(StepFailed, match=r"memory\.index\.3 (cannot be read|is damaged)"):
        HeldStore.load(place)


def test_an_index_of_another_generation_or_store_is_told(place: Path) -> None:
    store = HeldStore.create(place, LIMIT)
    memory: Memory = {7: pages(0, 10)}
    write(store, memory)
    keep(store, 3, memory)
    store.close()
    raw = (place / "memory.index.3").read_bytes()
    (place / "memory.index.4").write_bytes(raw)
    with pytest.raises(StepFailed, match=r"memory\.index\.4 cannot be read: .* the number 3"):
        HeldStore.load(place)
    limit = (LIMIT * 2).to_bytes(8, "little")
    (place / "memory.index.4").write_bytes(raw[:8] + limit + bytes([4]) + raw[17:])
    with pytest.raises(StepFailed, match="differ in limits"):
        HeldStore.load(place)
    limit = (9 * PAGE).to_bytes(8, "little")
    (place / "memory.index.4").unlink()
    (place / "memory.index.3").write_bytes(raw[:8] + limit + raw[16:])
    with pytest.raises(StepFailed, match="generation 3 has 10 pages, but 9 were announced"):
        HeldStore.load(place)
