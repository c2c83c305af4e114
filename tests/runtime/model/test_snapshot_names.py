# SPDX-License-Identifier: Apache-2.0
"""A snapshot as the journal keeps it, and the names of its images."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from planned_hosts import NEED, generation

from liveshift.runtime.model.snapshots import Generation, image_name, restore_name, snapshot_of


def test_names() -> None:
    assert (image_name(17, 0), restore_name(4, 3)) == ("s17.0", "r4.3")
    assert generation(a="h2", b="h2").name == "s17"
    assert snapshot_of(image_name(17, 250)) == 17
    for other in (
        "m17",
        "s17",
        "s0.1",
        "s-1.0",
        "s17.",
        "r4.0",
        "s17.0.1",
        "s" + "9" * 19 + ".0",
        "s².0",
    ):
        assert snapshot_of(other) is None


def test_a_generation_outlives_the_journal() -> None:
    made = replace(generation(a="h2", b="h3"), gpus={"gpt/1": NEED}, carried=["gpt/0"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Generation) == made
