# SPDX-License-Identifier: Apache-2.0
"""Who asks, and what they may: roles, where they come from, and refusals that say so.

A person is one of three: a user of the orchestrator's own machine (the kernel vouches for the
uid), a user on a host (its agent says which one), or the holder of an operator's key. Roles come
from the cluster file's [access] for users and from the key's public half for operators.

What an agent says is worth what its host is worth: whoever is root there can make it say any uid.
So ``access.relayed`` bounds what such an ask counts for, and root on a host, unless that bound
says otherwise, rules that host only: it could end everything on it anyway.
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
    """What somebody may do; each includes those before it."""

    NOTHING = "nothing"
    USER = "user"  # run jobs; see, move, signal and read those of one's own
    VIEW = "view"  # see everybody's jobs, moves and events
    OPERATE = "operate"  # cordon, taint and untaint hosts; move and end everybody's jobs
    ADMIN = "admin"  # everything: read others' output, send their jobs any signal

    def covers(self, other: Role) -> bool:
        """Whether it includes ``other``."""
        return _ORDER.index(self) >= _ORDER.index(other)


_ORDER = list(Role)
GIVEN = (Role.VIEW, Role.OPERATE, Role.ADMIN)
"""Those that a list in [access], or a key, can give."""


@dataclass(frozen=True)
class Principal:
    """Somebody who asks; ``name`` is a user's, a number where it has none, or a key's."""

    name: str
    role: Role
    why: str  # where the role comes from
    uid: int | None = None  # None: an operator's key, which is no user anywhere
    host: str | None = None  # whose agent passed the ask on
    unbound: Role | None = None  # the role without access.relayed, where that took some of it
    rules: str | None = None  # the host whose root this is, and of no other

    @property
    def shown(self) -> str:
        """As refusals and the history name them: ``alice``, ``alice@h1``, ``ops (key)``."""
        if self.uid is None:
            return f"{self.name} (key)"
        return f"{self.name}@{self.host}" if self.host else self.name

    def may(self, role: Role) -> bool:
        return self.role.covers(role)

    @property
    def squashed(self) -> bool:
        """Root on a host that is not trusted to be root everywhere."""
        return self.uid == ROOT and self.host is not None and self.role is not Role.ADMIN

    def owns(self, uid: int) -> bool:
        """Whether what belongs to this user is theirs."""
        return self.uid == uid and not self.squashed

    def rights(self) -> list[str]:
        """What all that allows, in words."""
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
    """Gives everybody who asks their role. Looks users and groups up, which may take a while."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lists = {role: getattr(access, role.value) for role in GIVEN}

    def local(self, uid: int) -> Principal:
        """A user of this machine."""
        name = user_name(uid)
        role, why = self._role(name, uid)
        return Principal(name, role, why, uid)

    def relayed(self, host: str, uid: int) -> Principal:
        """A user on a host, as its agent says; raises NotPermitted where that counts nothing."""
        bound = self._access.relayed
        own = self.local(uid)
        if bound is Role.NOTHING:
            raise NotPermitted(
                f"{own.name}@{host} may ask for nothing: access.relayed in the cluster file is"
                f' "{bound}"',
                hint="ask on the orchestrator's machine, or with an operator's key (--connect)",
            )
        if bound.covers(own.role):
            return Principal(own.name, own.role, own.why, uid, host)
        rules = host if uid == ROOT and not bound.covers(Role.OPERATE) else None
        return Principal(own.name, bound, f'access.relayed = "{bound}"', uid, host, own.role, rules)

    def operator(self, name: str, role: Role) -> Principal:
        """The holder of an operator's key."""
        return Principal(name, role, "the key")

    def unknown(self) -> list[str]:
        """Names in [access] that this machine knows no user or group by."""
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
    """``who`` may not do ``what``, which needs a role; ``of``: a further reason (whose it is)."""
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
    """The user's name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def groups_of(uid: int) -> list[int]:
    """All groups of a user by number; none for one that this machine does not know."""
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
