# SPDX-License-Identifier: Apache-2.0
"""Who may have a job saved in a directory, and resumed from one: agents use it as root."""

from __future__ import annotations

import pytest
from api_scene import ALICE, BOB, OTTO, Scene, people, scene

from liveshift.errors import LiveshiftError, NotPermitted, Refused, WrongUsage
from liveshift.runtime import messages
from liveshift.runtime.config.access import Role
from liveshift.runtime.messages import Message

__all__ = ["people", "scene"]

SAVE = messages.SnapshotJob("a", "/kept")
ADOPT = messages.ResumeJob("gpt", "/kept", False, "s7")


def test_operators_save_jobs_and_resume_them_from_a_directory(scene: Scene) -> None:
    scene.here(OTTO, SAVE)
    scene.key(Role.OPERATE, messages.SnapshotJob("a", "/kept", dry_run=True))
    scene.here(OTTO, ADOPT)
    scene.here(OTTO, messages.ResumeJob("a", "/kept"))
    scene.fleet.jobs["a"].state = "ended"
    scene.here(OTTO, messages.ResumeJob("a", "/kept"))
    assert scene.stubs.told == [
        "save a in /kept for otto",
        "save a in /kept for ops (key) dry",
        "adopt gpt s7 from /kept for otto",
        "resume a  from /kept for otto",
        "adopt a  from /kept for otto",
    ]


@pytest.mark.parametrize("ask", [SAVE, ADOPT, messages.ResumeJob("a", "/kept")])
@pytest.mark.parametrize("who", [ALICE, BOB])
def test_users_name_no_directory_not_even_for_their_own_jobs(
    scene: Scene, ask: Message, who: int
) -> None:
    with pytest.raises(NotPermitted):
        scene.here(who, ask)
    with pytest.raises(NotPermitted):
        scene.at("h1", who, ask)
    assert scene.stubs.told == []


@pytest.mark.parametrize("directory", ["kept", "./kept", "~/kept"])
def test_a_directory_that_hosts_could_not_find_is_refused(scene: Scene, directory: str) -> None:
    for ask in (messages.SnapshotJob("a", directory), messages.ResumeJob("gpt", directory)):
        with pytest.raises(Refused, match="is no absolute path"):
            scene.here(OTTO, ask)
    assert scene.stubs.told == []


def test_a_snapshot_needs_a_directory(scene: Scene) -> None:
    """With none, the check of rights to name one would be passed over."""
    for who in (ALICE, OTTO):
        with pytest.raises(WrongUsage, match="no directory is named"):
            scene.here(who, messages.SnapshotJob("a", ""))
    assert scene.stubs.told == []


@pytest.mark.parametrize("ask", [SAVE, ADOPT])
def test_nothing_is_saved_or_adopted_before_a_restored_journal_has_caught_up(
    scene: Scene, ask: Message
) -> None:
    scene.fleet.journal.file.restored = True
    with pytest.raises(Refused, match="before h0, h1 reported what is there"):
        scene.here(OTTO, ask)
    assert scene.stubs.told == []


def test_a_job_that_has_ended_and_is_in_no_directory_is_not_resumed_silently(scene: Scene) -> None:
    with pytest.raises(LiveshiftError, match='no job "gpt"'):
        scene.here(OTTO, messages.ResumeJob("gpt"))
