# SPDX-License-Identifier: Apache-2.0
"""An open file of a shared path that has been deleted since it was seen is no reason to refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from migration_stage import (  # the stage is set up with no_waiting
    BEFORE,
    FACTS,
    NOT_DONE,
    SURVEY,
    Stage,
    no_waiting,
    play,
)

from liveshift.criu_glue.survey.found import NeededFile
from liveshift.errors import Refused
from liveshift.runtime import messages
from liveshift.runtime.model.steps import MigrationStep

__all__ = ["no_waiting"]

LIBRARY = NeededFile("/opt/lib.so", 9, "ab", 0o100644)
LOG, OTHER = (NeededFile(f"/data/{n}", -1, "", inode=i) for n, i in (("log", 7), ("tmp", 8)))
LACKS = Refused("h2 lacks /data/tmp")


def seen(*needed: NeededFile) -> messages.Inspected:
    return messages.Inspected(replace(SURVEY, needed=needed), FACTS, 5)


@pytest.mark.parametrize(
    "now", [(LIBRARY, LOG), (LIBRARY, LOG, replace(OTHER, inode=9))], ids=["gone", "another"]
)
def test_what_has_gone_meanwhile_is_not_asked_for_again(now: tuple[NeededFile, ...]) -> None:
    stage = Stage()
    stage.fail("Inspect", seen(LIBRARY, LOG, OTHER), seen(*now))
    stage.fail("Reserve", LACKS)
    assert play(stage).step is MigrationStep.DONE
    assert stage.said[: len(BEFORE) + 2] == [*BEFORE[:2], *BEFORE]
    first, second = (ask.survey.needed for ask in stage.sent(messages.Reserve))
    assert first == (LIBRARY, LOG, OTHER)
    assert second == (LIBRARY, LOG)


@pytest.mark.parametrize(
    ("needed", "asked"), [((LIBRARY,), ["Inspect"]), ((LIBRARY, LOG), ["Inspect", "Inspect"])]
)
def test_what_is_there_still_stands_in_the_way(
    needed: tuple[NeededFile, ...], asked: list[str]
) -> None:
    stage = Stage()
    stage.fail("Inspect", *[seen(*needed)] * 2)
    stage.fail("Reserve", LACKS)
    move = play(stage)
    assert (move.step, move.error) == (MigrationStep.FAILED, LACKS)
    assert [word.split()[0] for word in stage.said if "Inspect" in word] == asked
    assert len(stage.sent(messages.Reserve)) == 1


def test_a_spare_that_gets_the_image_is_not_asked_for_what_was_open_before_it() -> None:
    stage = Stage()
    stage.spare = "h0"
    stage.fail("Inspect", seen(LIBRARY, LOG))
    stage.fail("RestoreCapsule h2", NOT_DONE, NOT_DONE)
    assert play(stage).destination == "h0"
    _, passed_on = stage.sent(messages.Reserve)
    assert passed_on.survey.needed == (LIBRARY,)
