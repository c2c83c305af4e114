# SPDX-License-Identifier: Apache-2.0
"""Every error that liveshift shows to a person, and the exit code it ends with.

LiveshiftError            1   liveshift tried something and failed
├── WrongUsage            2   the command line, or a name in it, is not valid; nothing was tried
├── StepFailed            1   a step of a migration failed (names the step, the capsule, the host)
│   └── SourceFailed      1   … and the cause is in the capsule: any destination would fail
├── ConfigError           3   the cluster file is wrong (names file and line)
├── NotFound              4   no such job, capsule or host
├── Refused               5   not done, and nothing was changed: preflight, no spare, already moving
│   ├── SourceRefused     5   … and the cause is in the capsule: any destination is refused
│   └── NoSpare           5   … and the cause is in the hosts: none can take the capsule now
├── Unreachable           6   an agent or the orchestrator does not answer
└── NotPermitted          7   the caller may not do this

A message says what liveshift tried and which value it saw; ``hint`` says what to do next.
Exit code 124 is reserved for ``drain --timeout``.
"""

from __future__ import annotations

from collections.abc import Iterable

NAMED = 20
"""A hint lists at most this many names."""


class LiveshiftError(Exception):
    """Base of all errors that a person sees; ``hint`` says what to do next, or is None."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class StepFailed(LiveshiftError):
    """One step of a migration failed; the message says in which state each side is now."""

    def __init__(self, step: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{step}: {message}", hint=hint)
        self.step = step


class WrongUsage(LiveshiftError):
    exit_code = 2


class SourceFailed(StepFailed):
    """One step failed, and the cause is in the capsule: it would fail with any destination."""


class ConfigError(LiveshiftError):
    exit_code = 3


class NotFound(LiveshiftError):
    exit_code = 4


class Refused(LiveshiftError):
    exit_code = 5


class SourceRefused(Refused):
    """The request was refused for a cause in the capsule: any destination would be refused."""


class NoSpare(Refused):
    """No host can take a capsule now. ``kinds``: the reasons of all hosts in words, without the
    hosts' names and without numbers: the same until another kind of reason comes or goes."""

    def __init__(self, message: str, *, hint: str | None = None, kinds: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kinds = kinds


AT_SOURCE = (SourceFailed, SourceRefused)
"""Errors with a cause in the capsule: another destination does not help."""


class Unreachable(LiveshiftError):
    exit_code = 6


class NotPermitted(LiveshiftError):
    exit_code = 7


def no_such(message: str, name: str, known: Iterable[str], listed: str) -> NotFound:
    """Return a NotFound whose hint suggests the closest known name and lists the known names.

    ``listed`` introduces the list, for example ``its hosts are``.
    """
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name, names, 1)
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    there = f"{listed}: {', '.join(names[:NAMED]) or 'none'}{rest}"
    return NotFound(message, hint=f"did you mean {near[0]}? {there}" if near else there)


BY_NAME: dict[str, type[LiveshiftError]] = {
    c.__name__: c
    for c in (
        LiveshiftError,
        StepFailed,
        WrongUsage,
        NotFound,
        Refused,
        Unreachable,
        NotPermitted,
        *AT_SOURCE,
    )
}


def to_wire(error: BaseException) -> tuple[str, str, str | None]:
    """Flatten an error into (kind, message, hint) for a reply."""
    if isinstance(error, LiveshiftError):
        kind = next(c.__name__ for c in type(error).__mro__ if c.__name__ in BY_NAME)
        return kind, error.message, error.hint
    return "LiveshiftError", f"{type(error).__name__}: {error}", None


def from_wire(kind: str, message: str, hint: str | None) -> LiveshiftError:
    """The inverse of :func:`to_wire`; an unknown kind becomes a plain LiveshiftError."""
    known = BY_NAME.get(kind, LiveshiftError)
    if issubclass(known, StepFailed):
        step, _, rest = message.partition(": ")
        return known(step, rest, hint=hint)
    return known(message, hint=hint)
