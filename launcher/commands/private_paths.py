# SPDX-License-Identifier: Apache-2.0
"""Finds what of a command lies where a capsule has a directory of its own: the job would miss it.

A capsule's /tmp and /dev/shm are empty when it starts and go away with it. Only paths of
files.shared that lie below them are the host's there. So a script below /tmp cannot be found, and
results that are written there are lost. The orchestrator says what is shared (``Me.shared``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...criu_glue.capsule.mounts import below
from ...criu_glue.capsule.sandboxes import PRIVATE
from ...errors import WrongUsage

SCRIPTS = (".py", ".sh")
HINT = (
    "a path that all hosts share will do, also one below {top} that files.shared lists"
    " (`liveshift lab up --shared DIR` in a lab)"
)


@dataclass(frozen=True)
class PrivatePath:
    """One such path. ``what``: the working directory, the program, the script, or an argument.
    Without one of the first three the command cannot even begin."""

    what: str
    path: str

    @property
    def top(self) -> str:
        """/tmp or /dev/shm."""
        return next(top for top in _TOPS if below(self.path, top))


ARGUMENT = "argument"
_TOPS = tuple(top.rstrip("/") for top in PRIVATE)


def check(
    argv: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    shared: Callable[[], Sequence[str]],
    warn: Callable[[str], None],
) -> None:
    """Warn of arguments that a capsule would not find. ``shared`` is called only if there are any.

    Raises WrongUsage if the command cannot work: its working directory, program or script.
    """
    found = list(dict.fromkeys(find_private_paths(argv, cwd, environment)))
    if not found:
        return
    seen = shared()
    for each in found:
        if any(below(each.path, path) for path in seen if path.startswith(PRIVATE)):
            continue
        if each.what != ARGUMENT and each.path not in _TOPS:
            raise WrongUsage(
                f"the {each.what} {each.path} is not there in a capsule, whose {each.top} is"
                " its own",
                hint=HINT.format(top=each.top),
            )
        warn(
            f"warning: {each.path} is another one in the capsule, whose {each.top} is its own:"
            " empty at the start, gone with the job. For what is to stay, "
            + HINT.format(top=each.top)
        )


def find_private_paths(
    argv: Sequence[str], cwd: str, environment: Mapping[str, str]
) -> Iterator[PrivatePath]:
    """Yield all paths below /tmp or /dev/shm, shared or not."""
    if path := _private(cwd):
        yield PrivatePath("working directory", path)
    program = argv[0] if "/" in argv[0] else shutil.which(argv[0], path=environment.get("PATH"))
    if program and (path := _private(os.path.join(cwd, program))):
        yield PrivatePath("program", path)
    script = next((n for n, word in enumerate(argv) if n and _is_script(word, cwd)), 0)
    for n, word in enumerate(argv[1:], 1):
        value = word.partition("=")[2] if "=" in word else word
        where = os.path.join(cwd, value)
        if not value or not (value.startswith("/") or os.path.lexists(where)):
            continue
        if path := _private(where):
            yield PrivatePath("script" if n == script else ARGUMENT, path)


def _is_script(word: str, cwd: str) -> bool:
    path = os.path.join(cwd, word)
    runs = word.endswith(SCRIPTS) or os.access(path, os.X_OK)
    return not word.startswith("-") and runs and os.path.isfile(path)


def _private(path: str) -> str:
    """Return the path, or what it leads to by links, if that lies below a private directory; else
    ""."""
    for each in (os.path.normpath(path), os.path.realpath(path)):
        if any(below(each, top) for top in _TOPS):
            return each
    return ""
