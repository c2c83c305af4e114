# SPDX-License-Identifier: Apache-2.0
"""A later `make nightly` goes on where an earlier one was: what it runs, and what it keeps."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from repository_scripts import script


@pytest.fixture
def nightly(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = script("nightly")
    monkeypatch.setattr(made, "GRACE_S", 2.0)
    return made


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with code and documents, in which parts run."""
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / "code.py").write_text("1\n")
    (root / "docs" / "example.toml").write_text("1\n")
    (root / "README.md").write_text("1\n")
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *words: str) -> str:
    mine = ("-c", "user.name=t", "-c", "user.email=t@t.example", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *mine, *words], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "a commit")
    return git(root, "describe", "--always")


class Nightly:
    """Calls with stand-in parts: ``call`` gives the exit status and the names of those that ran."""

    def __init__(self, module: ModuleType, out: Path, root: Path) -> None:
        self.module, self.out, self.root = module, out, root
        self.parts: dict[str, str] = {"one": "true", "two": "true", "three": "true"}
        """What each does, in its whole form and its short form."""
        self.seed = 1

    def call(self, *arguments: str) -> tuple[int, list[str]]:
        ran = self.out / "ran"
        ran.unlink(missing_ok=True)
        parts = []
        for name, program in self.parts.items():
            whole, short = (
                ("sh", "-c", f"echo {name} >>{ran}; echo {form} of {name}; {program}", f"SEED={n}")
                for form, n in (("whole", self.seed), ("short", self.seed))
            )
            parts.append(self.module.Part(name, whole, short, 30.0, (r"\w+ of \w+",), ""))
        status = self.module.main(list(arguments), parts, self.out, self.root)
        return status, ran.read_text().split() if ran.exists() else []

    def record(self) -> dict[str, dict[str, Any]]:
        """The outcomes of whole parts, by name."""
        kept = json.loads((self.out / "outcomes.json").read_text())["outcomes"]
        return {each["part"]: each for each in kept if "whole of" in each["command"][2]}

    def page(self) -> tuple[str, list[tuple[str, str]]]:
        """The headline, and each part with its outcome."""
        lines = (self.out / "nightly.md").read_text().splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines[6:]]
        return lines[2], [(row[0], row[1].strip()) for row in rows]


@pytest.fixture
def runs(nightly: ModuleType, tmp_path: Path, checkout: Path) -> Nightly:
    return Nightly(nightly, tmp_path, checkout)


ALL = ["one", "two", "three"]
INTERRUPT = "kill -INT $PPID; sleep 60 & wait"
"""As if somebody pressed Ctrl-C while the part runs."""


def test_the_record_has_what_came_of_each_part(runs: Nightly, tmp_path: Path) -> None:
    runs.parts["two"] = "sleep 0.2; exit 3"
    before = datetime.datetime.now().astimezone() - datetime.timedelta(seconds=1)
    assert runs.call() == (1, ALL)
    kept = runs.record()
    assert list(kept) == ALL
    two = kept["two"]
    assert (two["outcome"], two["figures"]) == ("failed (3)", "whole of two")
    assert two["command"][0] == "sh"
    assert 0.2 <= two["seconds"] < 20
    assert two["commit"] == git(runs.root, "describe", "--always")
    began = datetime.datetime.fromisoformat(two["began"])
    assert before < began < datetime.datetime.now().astimezone()
    assert [path.name for path in tmp_path.glob("*.new")] == []


def test_a_later_call_runs_only_what_has_not_passed(
    runs: Nightly, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.parts["two"] = "exit 3"
    assert runs.call() == (1, ALL)
    first = runs.record()
    assert runs.call() == (1, ["two"])
    capsys.readouterr()
    runs.seed = 2  # another day
    assert runs.call() == (1, ["two"])
    assert "one: passed at " in capsys.readouterr().out
    kept = runs.record()
    assert [kept[name] == first[name] for name in ALL] == [True, False, True]
    assert runs.page() == (
        "Failed: two.",
        [("one", "passed"), ("two", "failed (3)"), ("three", "passed")],
    )
    # The status speaks of the parts of this call, the page of all.
    assert runs.call("--parts", "three") == (0, ["three"])
    assert runs.page()[0] == "Failed: two."


def test_nothing_is_left_to_run(runs: Nightly, tmp_path: Path) -> None:
    assert runs.call() == (0, ALL)
    (tmp_path / "index.html").unlink()
    assert runs.call() == (0, [])
    assert runs.page()[0] == "All parts passed."
    assert "All parts passed." in (tmp_path / "index.html").read_text()


def test_fresh_runs_all_parts_again_and_its_interruption_goes_on_with_the_rest(
    runs: Nightly,
) -> None:
    assert runs.call() == (0, ALL)
    assert runs.call("--fresh") == (0, ALL)
    runs.parts["two"] = "[ -e go ] || { " + INTERRUPT + "; }"
    (runs.root / "go").write_text("")
    assert runs.call("--fresh") == (0, ALL)
    (runs.root / "go").unlink()
    assert runs.call("--fresh") == (130, ["one", "two"])
    assert runs.page() == (
        "Not run: two, three.",
        [("one", "passed"), ("two", "interrupted"), ("three", "not run")],
    )
    (runs.root / "go").write_text("")
    assert runs.call() == (0, ["two", "three"])
    assert runs.page()[0] == "All parts passed."
    # Of the parts that are not named, FRESH=1 forgets nothing.
    assert runs.call("--fresh", "--parts", "two") == (0, ["two"])
    assert runs.call() == (0, [])


def test_parts_that_are_named_are_always_run_and_no_others(runs: Nightly) -> None:
    assert runs.call("--parts", "three,two") == (0, ["two", "three"])
    assert runs.page() == (
        "Not run: one.",
        [("one", "not run"), ("two", "passed"), ("three", "passed")],
    )
    assert runs.call("--parts", "two") == (0, ["two"])
    assert runs.call() == (0, ["one"])


def test_a_form_does_not_stand_for_the_other(runs: Nightly, tmp_path: Path) -> None:
    assert runs.call("--short") == (0, ALL)
    assert (tmp_path / "one-short.log").read_text() == "short of one\n"
    assert runs.call("--parts", "one") == (0, ["one"])
    assert runs.page()[0] == "Not run: two, three."
    assert runs.call() == (0, ["two", "three"])
    assert (tmp_path / "one.log").read_text() == "whole of one\n"
    # The short form was not lost by that, nor is the whole one by the short one.
    assert runs.call("--short") == (0, [])
    assert runs.call("--short", "--fresh") == (0, ALL)
    assert "short of one" in (tmp_path / "nightly.md").read_text()
    assert runs.call() == (0, [])
    assert "short of one" not in (tmp_path / "nightly.md").read_text()


def test_only_documents_may_have_changed_since_a_part_passed(
    runs: Nightly, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.call() == (0, ALL)
    for path in ("README.md", "docs/example.toml", "deep/below/notes.md"):
        (runs.root / path).parent.mkdir(parents=True, exist_ok=True)
        (runs.root / path).write_text("2\n")
        assert runs.call() == (0, []), "as it is not committed yet"
        commit(runs.root)
        assert runs.call() == (0, [])
    (runs.root / "code.py").write_text("2\n")
    changed = commit(runs.root)
    assert runs.call("--parts", "one") == (0, ["one"])
    word = "Passed with other code than the checkout's, or with uncommitted changes: two, three."
    assert runs.page()[0] == word
    capsys.readouterr()
    assert runs.call() == (0, ["two", "three"])
    assert "run again, as the code may be another" in capsys.readouterr().out
    assert {each["commit"] for each in runs.record().values()} == {changed}


def test_what_passed_with_uncommitted_code_is_run_again(runs: Nightly) -> None:
    assert runs.call() == (0, ALL)
    clean = git(runs.root, "describe", "--always")
    (runs.root / "code.py").write_text("2\n")
    for _ in range(2):
        assert runs.call() == (0, ALL)
        assert {each["commit"] for each in runs.record().values()} == {f"{clean}-dirty"}
    assert "with uncommitted changes: one, two, three." in runs.page()[0]
    git(runs.root, "checkout", "-q", "code.py")
    assert runs.call() == (0, ALL)
    # Somebody edits while a part runs.
    (runs.root / "edit").write_text("")
    runs.parts["two"] = "[ ! -e edit ] || echo 2 >code.py"
    assert runs.call() == (0, ["two"])
    assert runs.record()["two"]["commit"] == f"{clean}-dirty"
    # A document is no code.
    git(runs.root, "checkout", "-q", "code.py")
    (runs.root / "edit").unlink()
    (runs.root / "README.md").write_text("2\n")
    assert runs.call() == (0, ["two"])
    assert runs.record()["two"]["commit"] == clean


def test_without_a_known_commit_nothing_counts(runs: Nightly) -> None:
    assert runs.call() == (0, ALL)
    path = runs.out / "outcomes.json"
    path.write_text(path.read_text().replace(runs.record()["one"]["commit"], "0123abcd"))
    assert runs.call() == (0, ALL)
    (runs.root / ".git").rename(runs.root / "no.git")
    assert runs.call() == (0, ALL)
    assert runs.record()["one"]["commit"] == "an unknown commit"
    assert runs.call() == (0, ALL)


def test_an_interrupted_part_does_not_replace_what_was_seen_of_the_same_code(
    runs: Nightly, tmp_path: Path
) -> None:
    runs.parts["two"] = "[ ! -e stop ] || { " + INTERRUPT + "; }; exit 3"
    assert runs.call() == (1, ALL)
    before, log = runs.record(), (tmp_path / "two.log").read_text()
    (runs.root / "stop").write_text("")
    (tmp_path / "two.log").write_text(log + "of the first call\n")
    assert runs.call() == (130, ["two"])
    assert runs.record() == before
    assert (tmp_path / "two.log").read_text() == log + "of the first call\n"
    assert runs.page() == (
        "Failed: two.",
        [("one", "passed"), ("two", "failed (3)"), ("three", "passed")],
    )
    # With other code the earlier outcome says nothing.
    (runs.root / "code.py").write_text("2\n")
    commit(runs.root)
    assert runs.call("--parts", "two") == (130, ["two"])
    assert runs.record()["two"]["outcome"] == "interrupted"
    first = runs.record()["two"]["began"]
    assert runs.call("--parts", "two") == (130, ["two"])
    assert runs.record()["two"]["began"] > first
    assert runs.page()[0].startswith("Not run: two. ")
    git(runs.root, "rm", "-q", "-f", "stop")
    commit(runs.root)
    assert runs.call() == (1, ALL)


def test_the_page_has_commit_and_time_of_each_part(runs: Nightly, tmp_path: Path) -> None:
    earlier = git(runs.root, "describe", "--always")
    assert runs.call("--parts", "three") == (0, ["three"])
    path = tmp_path / "outcomes.json"
    kept = json.loads(path.read_text())
    kept["outcomes"][0] |= {"began": "2026-11-20T22:30:00+00:00", "seconds": 5400.0}
    path.write_text(json.dumps(kept))
    (runs.root / "README.md").write_text("2\n")
    later = commit(runs.root)
    assert runs.call("--parts", "one") == (0, ["one"])

    lines = (tmp_path / "nightly.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[6:]]
    assert [row[0] for row in rows] == ALL
    old, new = (
        datetime.datetime.fromisoformat(kept["began"]).astimezone()
        for kept in (runs.record()["three"], runs.record()["one"])
    )
    assert rows[0][4:6] == [later, f"{new:%Y-%m-%d %H:%M %Z}"]
    assert rows[1][1:6] == ["not run", "", "", "", ""]
    assert rows[2][3:6] == ["5,400", earlier, f"{old:%Y-%m-%d %H:%M %Z}"]
    assert lines[0].startswith(f"# Nightly from {old:%Y-%m-%d %H:%M %Z} to {new:%Y-%m-%d}")
    page = (tmp_path / "index.html").read_text()
    assert lines[0].removeprefix("# ") in page
    assert '<a href="two.log"' not in page, "it has no log yet"
    assert f"<td>{earlier}</td>" in page


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ('{"outcomes": [{"part": "o', "truncated"),
        ("", "truncated"),
        ("\udcff", "malformed"),
        ("[]", "Expected `object`, got `array`"),
        (
            '{"outcomes": [{"part": "one", "outcome": "passed"}]}',
            "missing required field `command`",
        ),
        ('{"outcomes": [], "version": 1}', "unknown field `version`"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_in_plain_words(
    runs: Nightly, tmp_path: Path, capsys: pytest.CaptureFixture[str], held: str, found: str
) -> None:
    path = tmp_path / "outcomes.json"
    path.write_bytes(held.encode(errors="surrogateescape"))
    for words in ([], ["--parts", "one"]):
        assert runs.call(*words) == (2, [])
        error, hint = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: read {path} ")
        assert found in error
        assert "FRESH=1" in hint
    assert path.read_bytes() == held.encode(errors="surrogateescape")
    assert runs.call("--fresh") == (0, ALL)
    assert runs.call() == (0, [])
