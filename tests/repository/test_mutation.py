# SPDX-License-Identifier: Apache-2.0
"""The mutation run itself: what it changes, and that it tells a test that bites from one that does
not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutation import c_mutants, python_mutants
from mutation.__main__ import Trial, change_of, explanation, mutants_of
from mutation.judges import EXPLAINED, JUDGES
from mutation.shadow import ROOT

SOURCE = '''
"""1 + 1 in a docstring."""
LIMIT: dict[str, int] = {"a": 3}


def check(self, limit: int = 2) -> bool:
    log.info("1 < 2")
    if self.ready() and limit < 3:
        self.count += 1
        raise Refused("not 1 < 2", hint="x == y")
    return not self.over
'''

C_SOURCE = """
#define MOST 3 /* 1 < 2 */
struct gate {
    int count; /* 1 == 1 */
};

static bool pass(struct gate *gate,
                 int n) {
    /* not here: 1 < 2 */
    if (gate->count == 1 && n < MOST)
        gate->count += n;
    return true;
}

static enum verdict look(struct gate *gate) {
    for (int i = 0; i < gate->count; i++) {
        seen = i;
    }
}

static struct gate *first(struct gate *gate,
                          int n) {
    while (n != MOST)
        gate->count -= n;
}

enum verdict {
    GO = 1
};
"""


def words(mutants: Iterator[python_mutants.Mutant]) -> set[tuple[str, str]]:
    return {(mutant.before, mutant.after) for mutant in mutants}


def test_what_is_changed_in_python_is_what_it_does_and_no_words() -> None:
    made = list(python_mutants.mutants(SOURCE))
    assert words(iter(made)) == {
        ("3", "4"),
        ("2", "3"),
        ("1", "2"),
        ("self.ready() and limit < 3", "((self.ready()) or (limit < 3))"),
        ("limit < 3", "(limit <= 3)"),
        ("self.count += 1", "pass"),
        ('raise Refused("not 1 < 2", hint="x == y")', "pass"),
        ("return not self.over", "return None"),
        ("not self.over", "(self.over)"),
    }
    raising = next(m for m in made if m.before.startswith("raise"))
    assert raising.line == 10
    assert raising.text == SOURCE.replace(raising.before, "pass")


def test_what_is_changed_in_c_is_what_functions_do() -> None:
    assert words(c_mutants.mutants(C_SOURCE)) == {
        ("if (gate->count == 1 && n < MOST)", "if (gate->count != 1 && n < MOST)"),
        ("if (gate->count == 1 && n < MOST)", "if (gate->count == 2 && n < MOST)"),
        ("if (gate->count == 1 && n < MOST)", "if (gate->count == 1 || n < MOST)"),
        ("if (gate->count == 1 && n < MOST)", "if (gate->count == 1 && n <= MOST)"),
        ("gate->count += n;", "gate->count -= n;"),
        ("gate->count += n;", ";"),
        ("return true;", "return false;"),
        # What gives an enum or a struct is a function too, and its first line may open a block.
        ("for (int i = 0; i < gate->count; i++) {", "for (int i = 1; i < gate->count; i++) {"),
        ("for (int i = 0; i < gate->count; i++) {", "for (int i = 0; i <= gate->count; i++) {"),
        ("seen = i;", ";"),
        ("while (n != MOST)", "while (n == MOST)"),
        ("gate->count -= n;", "gate->count += n;"),
        ("gate->count -= n;", ";"),
    }


def test_every_file_has_mutants_and_tests_and_what_is_explained_is_one_of_them() -> None:
    for file, tests in JUDGES.items():
        assert mutants_of(file), file
        assert [test for test in tests if not (ROOT / "tests" / test.split("::")[0]).exists()] == []
    explained = set()
    for file in {file for file, *_ in EXPLAINED}:
        source = (ROOT / file).read_text()
        explained |= {(file, *change_of(source, mutant)) for mutant in mutants_of(file)}
    assert EXPLAINED.keys() - explained == set(), "no such change is made any more"


def test_an_explanation_is_of_one_change_and_of_no_other_one_of_that_line() -> None:
    off = 'self._db.execute("PRAGMA synchronous=OFF")'
    why = explanations("runtime/journal/journal_file.py", off.replace("OFF", "FULL"))
    assert why[off] == ""
    assert why["pass"] != ""
    why = explanations("runtime/quiesce/gates.py", "self._attempt += 1")
    assert why["pass"] == ""
    assert why["self._attempt += 2"] != ""


def explanations(file: str, line: str) -> dict[str, str]:
    """What explains each change of that line."""
    source = (ROOT / file).read_text()
    changes = {mutant: change_of(source, mutant) for mutant in mutants_of(file)}
    return {to: explanation(file, m) for m, (line_, to) in changes.items() if line_ == line}


@pytest.fixture
def place() -> Iterator[Path]:
    """On the checkout's file system."""
    (ROOT / "build").mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=ROOT / "build"))
    yield made
    made.rmdir()


@pytest.mark.long
def test_a_mutant_that_the_tests_notice_is_killed_and_another_survives(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "runtime/model/ownership.py"
    lines = {m.line for m in mutants_of(file) if m.before == "return still or not owner.granted"}
    monkeypatch.setitem(JUDGES, file, ("runtime/model/test_ownership.py",))
    score = Trial(file, place, 1).run(lines)
    assert score.unexplained == []
    assert score.counts["killed"] >= 3
    looks_elsewhere = "runtime/model/test_ownership.py::test_every_step_leads_to_an_end"
    monkeypatch.setitem(JUDGES, file, (looks_elsewhere,))
    score = Trial(file, place, 1).run(lines)
    assert score.unexplained
    assert {explanation(file, m) for m in mutants_of(file) if m.line in lines} == {""}


@pytest.mark.long
def test_tests_that_do_not_use_the_file_say_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        JUDGES, "runtime/model/ownership.py", ("runtime/agent/host/test_usual_rate.py",)
    )
    with pytest.raises(RuntimeError, match="pass when it is broken"):
        Trial("runtime/model/ownership.py", place, 1).run({1})
