# SPDX-License-Identifier: Apache-2.0
"""Finds processes of a user's capsule that have other ids than the user, or capabilities: programs
with a set-id bit, or with file capabilities.

The destination restores none of them (images/image_rights.py): another host could have made the
image up. It would say so only once the capsule is frozen and its image is there.
"""

from __future__ import annotations

from ... import proc_text
from ..files.rights import User

REMEDY = (
    "a capsule moves with its user's rights only: end that program first,"
    " or start one without set-id bit and file capabilities"
)


def of_task(pid: int, who: str, user: User) -> list[tuple[str, str]]:
    """(what prevents a move, what to do) for the process with the host's pid ``pid``. Raises
    FileNotFoundError or ProcessLookupError if it has ended."""
    if user.is_root:
        return []
    lines = (line.partition(":") for line in proc_text.lines(f"/proc/{pid}/status"))
    status = {name: text.split() for name, _, text in lines}
    if not {"Z", "X"}.isdisjoint(status.get("State", ())):
        return []  # it has ended, and runs nowhere any more
    uids, gids = (list(map(int, status.get(name, ()))) for name in ("Uid", "Gid"))
    groups = [*gids, *map(int, status.get("Groups", ()))]
    found = [f"user {uid}" for uid in uids if uid != user.uid]
    found += [f"group {gid}" for gid in groups if not user.is_in(gid)]
    named = ("CapInh", "CapPrm", "CapEff", "CapAmb")
    if any(int(word, 16) for name in named for word in status.get(name, ())):
        found.append("capabilities")
    if not found:
        return []
    rights = " and ".join(dict.fromkeys(found))
    return [(f"{who} has the rights of {rights}, and its capsule is user {user.uid}'s", REMEDY)]
