# SPDX-License-Identifier: Apache-2.0
"""What `make nightly` keeps of each part that it ran, and which of that still counts.

The record lies in build/nightly/outcomes.json. It has the newest outcome of each part in each form:
a part in its short form is another form than the whole part, so neither replaces the other.
"""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

PASSED = "passed"
INTERRUPTED = "interrupted"
DIRTY = "-dirty"
CODE = (".", ":(exclude)docs", ":(exclude)*.md")
"""Pathspecs of git: all files of a checkout that can change what a part does."""


class DamagedRecordError(Exception):
    """The file of the record holds something else than a record of today's form."""


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``outcome`` is "passed", "failed (exit status)", "took too long" or "interrupted". ``commit``
    ends with "-dirty" if the code in the checkout was another than that of the commit."""

    part: str
    command: tuple[str, ...]
    outcome: str
    figures: str
    seconds: float
    commit: str
    began: Annotated[datetime.datetime, msgspec.Meta(tz=True)]


class Record(msgspec.Struct, forbid_unknown_fields=True):
    outcomes: list[Outcome]

    def of(self, part: str, command: Sequence[str]) -> Outcome | None:
        """The outcome of this part in this form."""
        for each in self.outcomes:
            if each.part == part and form(each.command) == form(command):
                return each
        return None

    def forget(self, part: str, command: Sequence[str]) -> None:
        if (found := self.of(part, command)) is not None:
            self.outcomes.remove(found)

    def add(self, new: Outcome, root: Path) -> bool:
        """Put this in the place of the earlier outcome. An interrupted part has shown nothing, so
        it does not replace what an earlier run of the same code has shown: False then."""
        before = self.of(new.part, new.command)
        if (
            new.outcome == INTERRUPTED
            and before is not None
            and before.outcome != INTERRUPTED
            and same_code(root, before.commit)
        ):
            return False
        self.forget(new.part, new.command)
        self.outcomes.append(new)
        return True

    def write(self, path: Path) -> None:
        """A later call never finds half a file, however this one ends."""
        staged = path.with_name(f".{path.name}.new")
        staged.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        os.replace(staged, path)


def read(path: Path) -> Record:
    """Without a file, an empty record."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return Record([])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecordError(str(error)) from error


def form(command: Sequence[str]) -> tuple[str, ...]:
    """The command without its seed, which is another each day."""
    return tuple(word for word in command if not word.startswith("SEED="))


def counts(outcome: Outcome | None, root: Path) -> bool:
    """True if the part passed with the code that the checkout has now."""
    return outcome is not None and outcome.outcome == PASSED and same_code(root, outcome.commit)


def same_code(root: Path, commit: str) -> bool:
    """True if nothing but documents differs between this commit and the checkout. We compare with
    the files, not with HEAD: parts run the files. What a dirty checkout held nobody can say."""
    return not commit.endswith(DIRTY) and _difference(root, commit) == SAME


def commit_of(root: Path) -> str:
    """The commit of the checkout, with "-dirty" if its code is another than the commit's."""
    found = _git(root, "describe", "--always").stdout.strip() or "an unknown commit"
    return marked(root, found)


def marked(root: Path, commit: str) -> str:
    """This commit, with "-dirty" if the checkout has other code by now. git's own --dirty would
    count documents, and a part that passed beside an open document would be run again."""
    if commit.endswith(DIRTY) or _difference(root, commit) != OTHER:
        return commit
    return f"{commit}{DIRTY}"


SAME, OTHER = 0, 1


def _difference(root: Path, commit: str) -> int:
    """SAME, OTHER, or the status with which git ends where it does not know the commit."""
    return _git(root, "diff", "--quiet", commit, "--", *CODE).returncode


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = ["git", "-c", f"safe.directory={root}", *words]
    return subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
