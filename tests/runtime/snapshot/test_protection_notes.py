# SPDX-License-Identifier: Apache-2.0
"""What the history says of a job's snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet_scene import a_fleet

from liveshift.errors import Refused
from liveshift.runtime.model.snapshots import Generation
from liveshift.runtime.snapshot.protection_notes import ProtectionNotes, same, words


def test_each_thing_is_said_once_until_another_is_so(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path)
    notes = ProtectionNotes(fleet.journal, fleet.jobs["a"])
    for _ in range(2):
        notes.failed("h2 has 1.50 GB left", "s1")
        notes.failed("h2 has 1.49 GB left", "s2")
        notes.protected("a snapshot every 100 s, held by h2", "h2")
        notes.protected("a snapshot every 101 s, held by h2", "h2")
    fleet.jobs["a"].newest = Generation(3, "a", "", 0.0, 0, {}, {})
    notes.failed("h2 has no memory", "s4")
    notes.failed("no host can hold it", "")
    said = [(event.kind, event.text) for event in fleet.journal.events("a", 0)]
    assert said == [
        *[
            ("unprotected", "not protected: h2 has 1.50 GB left"),
            ("protected", "protected: a snapshot every 100 s, held by h2"),
        ]
        * 2,
        ("snapshot", "s4 failed: h2 has no memory; s3 stays"),
        ("snapshot", "no host can hold it; s3 stays"),
    ]


@pytest.mark.parametrize(
    ("one", "other", "are"),
    [
        ("it takes 28.4 MB, of 5 MB", "it takes 3 MB, of 700 MB", True),
        ("h1 is not up", "h2 is not up", False),
        ("s1.0 is gone", "s2.0 is gone", False),
        ("", "h1 is not up", False),
    ],
)
def test_numbers_make_no_other_reason(one: str, other: str, are: bool) -> None:
    assert (same(one) == same(other)) is are


def test_an_error_is_said_with_its_hint() -> None:
    assert words(Refused("no room", hint="make some")) == "no room (make some)"
    assert words(Refused("no room")) == "no room"
