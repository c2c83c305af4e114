# SPDX-License-Identifier: Apache-2.0
"""The VXLAN ids of jobs: no two jobs share one, and a job has another one after each rewind."""

from __future__ import annotations

import pytest

from liveshift.criu_glue.network.overlay import ROUNDS, STRIDE, Overlay, most_jobs


def test_a_job_that_was_never_rewound_has_its_number_as_id() -> None:
    assert Overlay(7, "10.99.7.0/24").wire_id == 7


@pytest.mark.parametrize("overlays", ["10.0.0.0/8", "10.99.0.0/16", "10.99.0.0/24"])
def test_all_ids_of_all_jobs_differ_and_fit_into_a_vxlan(overlays: str) -> None:
    most = most_jobs(overlays)
    assert most <= STRIDE
    numbers = sorted({1, 2, 255, most - 1, most} & set(range(1, most + 1)))
    rewinds = range(ROUNDS)
    ids = [Overlay(n, "10.0.0.0/24", r).wire_id for n in numbers for r in rewinds]
    assert len(set(ids)) == len(numbers) * ROUNDS
    assert min(ids) > 0
    assert max(ids) < 1 << 24


def test_an_id_comes_again_only_after_all_others() -> None:
    ids = [Overlay(7, "10.99.7.0/24", rewinds).wire_id for rewinds in range(2 * ROUNDS)]
    assert len(set(ids)) == ROUNDS
    assert ids[:ROUNDS] == ids[ROUNDS:]


def test_the_names_of_devices_stay() -> None:
    first, later = Overlay(7, "10.99.7.0/24"), Overlay(7, "10.99.7.0/24", 3)
    assert (first.bridge, first.vxlan, first.veth(2)) == (later.bridge, later.vxlan, later.veth(2))
    assert first.address(2) == later.address(2)
