# SPDX-License-Identifier: Apache-2.0
"""Which GPU of the destination stands for which of the source: every map is one that the driver
takes, and where there is none each GPU's reason is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_lists import A100, GIB, H200, gpu, host
from hypothesis import given, settings
from hypothesis import strategies as st

from liveshift.cuda_snapshot.assignment import MARGIN, assign, changes
from liveshift.cuda_snapshot.devices import NvmlGpu
from liveshift.errors import Refused


def refusal(*args: object) -> Refused:
    with pytest.raises(Refused) as caught:
        assign(*args)  # type: ignore[arg-type]
    return caught.value


def test_every_gpu_of_the_source_gets_one_and_the_used_one_the_emptiest() -> None:
    source, there = host("a", 3), host("b", 4)
    there[0] = replace(there[0], free_bytes=100 * GIB)
    there[2] = replace(there[2], free_bytes=139 * GIB)
    pairs = assign(source, {source[1].uuid: 80 * GIB}, there, {}, {})
    assert [old for old, _ in pairs] == [g.uuid for g in source]
    assert dict(pairs)[source[1].uuid] == there[1].uuid
    assert len({new for _, new in pairs}) == 3
    assert changes(pairs)


def test_the_largest_goes_where_most_is_free() -> None:
    source, there = host("a", 2), host("b", 2)
    there[0] = replace(there[0], free_bytes=50 * GIB)
    used = {source[0].uuid: 20 * GIB, source[1].uuid: 100 * GIB}
    assert dict(assign(source, used, there, {}, {})) == {
        source[0].uuid: there[0].uuid,
        source[1].uuid: there[1].uuid,
    }


def test_the_same_pci_address_goes_before_the_most_memory() -> None:
    source, there = host("a", 3), host("b", 3)
    there[1] = replace(there[1], free_bytes=100 * GIB)
    used = {source[1].uuid: 80 * GIB}
    assert dict(assign(source, used, there, {}, {}))[source[1].uuid] == there[1].uuid
    there[1] = replace(there[1], free_bytes=80 * GIB)  # too full
    assert dict(assign(source, used, there, {}, {}))[source[1].uuid] == there[0].uuid


def test_a_gpu_that_both_hosts_see_is_its_own() -> None:
    """Full, used by its own process and shared by another one: it stays there."""
    shared = [gpu(0, "a", free=1 * GIB), gpu(1, "a")]
    taken = {shared[0].uuid: "is used by process 7"}
    pairs = assign(shared, {shared[0].uuid: 130 * GIB}, shared, taken, {})
    assert pairs == [(g.uuid, g.uuid) for g in shared]
    assert not changes(pairs)


def test_gpus_that_others_use_take_what_is_not_used() -> None:
    source, there = host("a", 2), host("b", 2)
    taken = {there[0].uuid: "is used by process 7"}
    pairs = assign(source, {source[0].uuid: GIB}, there, taken, {})
    assert dict(pairs) == {source[0].uuid: there[1].uuid, source[1].uuid: there[0].uuid}


def test_a_swap_is_a_whole_map_too() -> None:
    here = [gpu(0, free=60 * GIB), gpu(1), gpu(2)]
    used = {here[0].uuid: 80 * GIB}
    pairs = assign(here, used, here, {}, {here[0].uuid: here[1].uuid})
    assert dict(pairs) == {
        here[0].uuid: here[1].uuid,
        here[1].uuid: here[0].uuid,
        here[2].uuid: here[2].uuid,
    }


def test_two_used_gpus_can_change_places() -> None:
    here = [gpu(0, free=10 * GIB), gpu(1, free=10 * GIB)]
    used = {g.uuid: 130 * GIB for g in here}
    wanted = {here[0].uuid: here[1].uuid, here[1].uuid: here[0].uuid}
    assert dict(assign(here, used, here, {}, wanted)) == wanted


def test_one_that_is_asked_for_may_be_used_by_others() -> None:
    source, there = host("a", 1), host("b", 1)
    taken = {there[0].uuid: "is used by process 7"}
    wanted = {source[0].uuid: there[0].uuid}
    assert assign(source, {source[0].uuid: GIB}, there, taken, wanted) == [*wanted.items()]


@pytest.mark.parametrize(
    ("there", "taken", "words"),
    [
        ([], {}, "there is none"),
        ([gpu(0, "b", A100)], {}, "is another model (NVIDIA A100, not NVIDIA H200)"),
        ([replace(gpu(0, "b"), compute_capability=(9, 1))], {}, "is another model"),
        ([replace(gpu(0, "b"), mig=True)], {}, "is partitioned by MIG"),
        ([replace(gpu(0, "b"), mps=True)], {}, "is shared by MPS clients"),
        ([gpu(0, "b")], {gpu(0, "b").uuid: "is promised to gpt/2 (m9)"}, "is promised to gpt/2"),
        (
            [replace(gpu(0, "b"), memory_bytes=80 * GIB)],
            {},
            "has less memory (85.9 GB, 108 GB needed)",
        ),
        ([gpu(0, "b", free=100 * GIB)], {}, "has 107 GB free, 108 GB needed"),
    ],
)
def test_why_a_gpu_will_not_do_is_said(
    there: list[NvmlGpu], taken: dict[str, str], words: str
) -> None:
    source = host("a", 1)
    refused = refusal(source, {source[0].uuid: 100 * GIB}, there, taken, {})
    assert "no GPU of the destination can take what is on GPU 0 (GPU-a0000000)" in str(refused)
    assert words in str(refused)
    assert "same model" in str(refused.hint)


def test_too_few_gpus_or_another_model_for_one_that_is_not_even_used() -> None:
    source = host("a", 3)
    used = {source[0].uuid: GIB}
    refused = refusal(source, used, host("b", 2), {}, {})
    assert "the source has 3 GPUs, the destination 2" in str(refused)
    assert "as many GPUs" in str(refused.hint)
    others = [gpu(0, "b"), gpu(1, "b"), gpu(2, "b", A100)]
    assert "none is left for GPU 2" in str(refusal(source, used, others, {}, {}))


def test_what_is_asked_for_must_make_sense() -> None:
    source, there = host("a", 2), [gpu(0, "b"), gpu(1, "b", A100)]
    a, b = (g.uuid for g in source)
    used = {a: GIB}
    assert "the source has no GPU GPU-x" in str(refusal(source, used, there, {}, {"GPU-x": b}))
    assert "the destination has no GPU GPU-x" in str(refusal(source, used, there, {}, {a: "GPU-x"}))
    twice = {a: there[0].uuid, b: there[0].uuid}
    assert "is named as the target of two GPUs" in str(refusal(source, used, there, {}, twice))
    other = {a: there[1].uuid}
    assert "cannot go onto GPU 1 (GPU-b0000001), which is another model" in str(
        refusal(source, used, there, {}, other)
    )


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[NvmlGpu], dict[str, int], list[NvmlGpu], dict[str, str]]:
    def some(letter: str, most: int) -> list[NvmlGpu]:
        count = draw(st.integers(1, most))
        return [
            replace(
                gpu(n, letter, draw(st.sampled_from([H200, H200, A100]))),
                free_bytes=draw(st.integers(0, 140)) * GIB,
                mig=draw(st.sampled_from([None, False, False, True])),
            )
            for n in range(count)
        ]

    source = some("a", 4)
    there = draw(st.one_of(st.just(some("b", 5)), st.just(source)))
    used = {g.uuid: draw(st.integers(0, 120)) * GIB for g in source if draw(st.booleans())}
    taken = {g.uuid: "is used by process 7" for g in there if draw(st.booleans())}
    return source, used, there, taken


@settings(max_examples=1000, deadline=None, database=None)
@given(scenes())
def test_a_map_is_whole_and_fits(
    scene: tuple[list[NvmlGpu], dict[str, int], list[NvmlGpu], dict[str, str]],
) -> None:
    source, used, there, taken = scene
    try:
        pairs = assign(source, used, there, taken, {})
    except Refused:
        if there is source:  # it can always stay where it is
            raise
        return
    by_uuid = {g.uuid: g for g in [*source, *there]}
    assert [old for old, _ in pairs] == [g.uuid for g in source]
    assert len({new for _, new in pairs}) == len(pairs)
    assert all(by_uuid[old].name == by_uuid[new].name for old, new in pairs)
    for old, new in pairs:
        if old in used and new != old:
            assert new not in taken
            assert not by_uuid[new].mig
            assert by_uuid[new].free_bytes >= used[old] + MARGIN
