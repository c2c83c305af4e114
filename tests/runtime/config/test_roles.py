# SPDX-License-Identifier: Apache-2.0
"""Roles: which ones include which, and where a user's comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_scene import (
    ADA,
    ALICE,
    CLUSTER,
    NINA,
    NOBODY,
    OTTO,
    USERS,
    VERA,
    Scene,
    people,
)

from liveshift.errors import LiveshiftError, NotPermitted
from liveshift.runtime.config import cluster as config
from liveshift.runtime.config.access import Role, Roles

__all__ = ["people"]


def rules(relayed: str = "user") -> config.Access:
    return config.parse(CLUSTER.format(state="/x", relayed=relayed)).cluster.access


def test_roles_include_one_another() -> None:
    order = [Role.NOTHING, Role.USER, Role.VIEW, Role.OPERATE, Role.ADMIN]
    for n, role in enumerate(order):
        assert [role.covers(other) for other in order] == [m <= n for m in range(len(order))]


@pytest.mark.parametrize(
    ("uid", "role", "why"),
    [
        (0, Role.ADMIN, "root"),
        (ALICE, Role.USER, "every user's"),
        (VERA, Role.VIEW, 'access.view lists "vera"'),
        (OTTO, Role.OPERATE, 'access.operate lists "otto"'),
        (ADA, Role.ADMIN, 'access.admin lists "ada"'),
        (NINA, Role.OPERATE, 'access.operate lists "@night"'),  # and an auditor: the higher counts
        (NOBODY, Role.USER, "every user's"),  # of no name here
    ],
)
def test_where_a_users_role_comes_from(uid: int, role: Role, why: str) -> None:
    who = Roles(rules()).local(uid)
    assert (who.role, who.why) == (role, why)
    assert who.name == next((name for name, number in USERS.items() if number == uid), str(uid))


def test_without_entries_only_root_is_more_than_a_user() -> None:
    roles = Roles(config.Access())
    assert [roles.local(u).role for u in (0, ALICE, ADA)] == [Role.ADMIN, Role.USER, Role.USER]


@pytest.mark.parametrize(
    ("relayed", "expected"),
    [
        ("user", {0: "user", ALICE: "user", VERA: "user", OTTO: "user", ADA: "user"}),
        ("view", {0: "view", ALICE: "user", VERA: "view", OTTO: "view", ADA: "view"}),
        ("operate", {0: "operate", ALICE: "user", VERA: "view", OTTO: "operate", ADA: "operate"}),
        ("admin", {0: "admin", ALICE: "user", VERA: "view", OTTO: "operate", ADA: "admin"}),
    ],
)
def test_what_an_agent_says_counts_as_far_as_configured(
    relayed: str, expected: dict[int, str]
) -> None:
    roles = Roles(rules(relayed))
    assert {uid: roles.relayed("h1", uid).role.value for uid in expected} == expected
    root = roles.relayed("h1", 0)
    assert (root.rules, root.squashed) == (
        "h1" if relayed in ("user", "view") else None,
        relayed != "admin",
    )
    assert roles.relayed("h1", ALICE).shown == "alice@h1"


def test_an_agent_may_count_for_nothing() -> None:
    for uid in (0, ALICE, ADA):
        with pytest.raises(NotPermitted, match=r'@h1 may request nothing: access.relayed .* "noth'):
            Roles(rules("nothing")).relayed("h1", uid)


def test_names_that_nobody_has_are_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    del USERS["vera"]
    try:
        Scene(tmp_path)
    finally:
        USERS["vera"] = VERA
    assert 'access: this machine knows no "vera"' in caplog.text


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        ("alice", True),
        ("@ops", True),
        ("EXAMPLE\\alice", True),
        ("alice@example.org", True),
        ("svc_1$", True),
        ("", False),
        ("@", False),
        ("@@ops", False),
        ("a b", False),
        ("a:b", False),
        ("a,b", False),
        (7, False),
    ],
)
def test_what_can_be_an_entry(entry: object, fits: bool) -> None:
    text = CLUSTER.format(state="/x", relayed="user").replace('["ada"]', config.toml_value([entry]))
    if fits:
        assert config.parse(text).cluster.access.admin == (entry,)
        return
    with pytest.raises(LiveshiftError, match=r"access.admin\[0\]: found .* expected the name of"):
        config.parse(text)


def test_a_word_that_is_no_role() -> None:
    with pytest.raises(LiveshiftError, match='"nothing", "user", "view", "operate" or "admin"'):
        rules("root")
