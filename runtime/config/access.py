# SPDX-License-Identifier: Apache-2.0
"""Roles: who asks, what they may do, where their role comes from, and refusals that explain it.

A person is one of three: a user of the orchestrator's own machine (the kernel vouches for the
uid), a user on a host (the host's agent reports the uid), or the holder of an operator's key. Users
get roles from the cluster file's [access], operators from the public half of their key.

An agent's report is as trustworthy as its host: root there can make it report any uid. So
``access.relayed`` limits what such a request may do. Unless that limit allows more, root on a host
rules that host only: root could end everything on it anyway.
"""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ...errors import NotPermitted

if TYPE_CHECKING:
    from .cluster import Access

ROOT = 0


class Role(StrEnum):
    """What a person may do; each role includes those before it."""

    NOTHING = "nothing"
    USER = "user"  # run jobs; see, move, signal and read their own jobs
    VIEW = "view"  # see all users' jobs, moves and events
    OPERATE = "operate"  # cordon, taint and untaint hosts; move and end all users' jobs
    ADMIN = "admin"  # all of that, read others' output, and send their jobs any signal

    def covers(self, other: Role) -> bool:
        """Whether this role includes ``other``."""
        return _ORDER.index(self) >= _ORDER.index(other)


_ORDER = list(Role)
GIVEN = (Role.VIEW, Role.OPERATE, Role.ADMIN)
"""The roles that a list in [access], or a key, can give."""


@dataclass(frozen=True)
class Principal:
    """A person who asks. ``name``: the user's, or the uid where it has none, or the key's."""

    name: str
    role: Role
    why: str  # where the role comes from
    uid: int | None = None  # None: an operator's key, which is no user anywhere
    host: str | None = None  # the host whose agent passed the request on
    unbound: Role | None = None  # the role without the limit of access.relayed, if it applied
    rules: str | None = None  # the only host on which this person is root

    @property
    def shown(self) -> str:
        """The name in refusals and in the history: ``alice``, ``alice@h1``, ``ops (key)``."""
        if self.uid is None:
            return f"{self.name} (key)"
        return f"{self.name}@{self.host}" if self.host else self.name

    def may(self, role: Role) -> bool:
        return self.role.covers(role)

    @property
    def squashed(self) -> bool:
        """Whether this is root on a host that is not trusted to be root everywhere."""
        return self.uid == ROOT and self.host is not None and self.role is not Role.ADMIN

    def owns(self, uid: int) -> bool:
        """Whether what belongs to the user ``uid`` belongs to this person."""
        return self.uid == uid and not self.squashed

    def rights(self) -> list[str]:
        """All that this person may do, in words."""
        able: list[str] = []
        if self.uid is not None and not self.squashed:
            able.append("run jobs; see, move, end and read those of your own")
        if self.may(Role.VIEW):
            able.append("see everybody's jobs, moves and events")
        if self.may(Role.OPERATE):
            able.append("cordon, taint and drain hosts; move and end everybody's jobs")
        if self.may(Role.ADMIN):
            able.append("read everybody's output, send their jobs any signal")
        if self.rules is not None:
            able.append(f"cordon and taint {self.rules}, see what runs there, move it off")
        return able


class Roles:
    """Gives each person their role. It looks users and groups up, which may take a while."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lists = {role: getattr(access, role.value) for role in GIVEN}

    def local(self, uid: int) -> Principal:
        """The person behind a uid of this machine."""
        name = user_name(uid)
        role, why = self._role(name, uid)
        return Principal(name, role, why, uid)

    def relayed(self, host: str, uid: int) -> Principal:
        """The person behind a uid on a host, as its agent reports it.

        Raises NotPermitted where ``access.relayed`` allows such a person nothing.
        """
        bound = self._access.relayed
        own = self.local(uid)
        if bound is Role.NOTHING:
            raise NotPermitted(
                f"{own.name}@{host} may request nothing: access.relayed in the cluster file is"
                f' "{bound}"',
                hint="ask on the orchestrator's machine, or with an operator's key (--connect)",
            )
        if bound.covers(own.role):
            return Principal(own.name, own.role, own.why, uid, host)
        rules = host if uid == ROOT and not bound.covers(Role.OPERATE) else None
        return Principal(own.name, bound, f'access.relayed = "{bound}"', uid, host, own.role, rules)

    def operator(self, name: str, role: Role) -> Principal:
        """The person who holds an operator's key."""
        return Principal(name, role, "the key")

    def unknown(self) -> list[str]:
        """Names in [access] for which this machine has no user or group."""
        names = dict.fromkeys(name for names in self._lists.values() for name in names)
        return [name for name in names if not _known(name)]

    def _role(self, name: str, uid: int) -> tuple[Role, str]:
        if uid == ROOT:
            return Role.ADMIN, "root"
        groups: list[int] | None = None
        for role in reversed(GIVEN):
            for entry in self._lists[role]:
                if entry.startswith("@"):
                    groups = groups_of(uid) if groups is None else groups
                    listed = _group_number(entry[1:]) in groups
                else:
                    listed = entry == name
                if listed:
                    return role, f'access.{role} lists "{entry}"'
        return Role.USER, "every user's"


def refusal(who: Principal, what: str, needs: Role, of: str = "") -> NotPermitted:
    """The error for ``what``, which needs a role that ``who`` lacks. ``of``: one more reason."""
    if who.unbound and who.unbound.covers(needs):
        has = f'{who.name} has "{who.unbound}", but through an agent it counts as "{who.role}"'
        hint = (
            "ask on the orchestrator's machine or with an operator's key (--connect); or, if root"
            f' on every host is trusted with it, access.relayed = "{needs}" in the cluster file'
        )
    elif who.uid is None:
        has = f'the key has "{who.role}"'
        hint = "where keys are made, `liveshift keys add-operator NAME --role` gives others"
    else:
        has = f'{who.name} has "{who.role}"'
        hint = (
            f"access.{needs} in the orchestrator's cluster file lists who has it (users, "
            '"@group"); root there has every role'
        )
    reason = f"{of}, " if of else ""
    return NotPermitted(
        f'{who.shown} may not {what}: {reason}that needs the role "{needs}", and {has}', hint=hint
    )


def user_name(uid: int) -> str:
    """The user's name, or the uid where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def groups_of(uid: int) -> list[int]:
    """The group ids of a user; empty for a user that this machine does not know."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return []
    return [entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)]


def _group_number(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _known(name: str) -> bool:
    if name.startswith("@"):
        return _group_number(name[1:]) is not None
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
