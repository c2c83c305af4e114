# SPDX-License-Identifier: Apache-2.0
"""The C test suite: every program of tests/support/c, plain and under the sanitizers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import sanitizers
from checkout import INTERPOSER, SUPPORT
from doubles.gpu.build import kept
from sanitizers import BUILT, compile_c

FOLDER = SUPPORT / "c"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.c"))
# How hard to try: a sanitizer is several times slower.
BUILDS = {"plain": 100, "address": 40, "thread": 40}


def sources(program: str) -> list[Path]:
    """The program's own file and those that it says it needs."""
    text = (FOLDER / f"{program}.c").read_text()
    needs = re.search(r"^ \* needs: (.*)$", text, re.MULTILINE)
    assert needs is not None, f"{program}.c does not say what it needs"
    return [FOLDER / f"{program}.c", *(INTERPOSER / name for name in needs[1].split())]


def compiled(program: str, build: str) -> Path:
    """Now or in an earlier run; a program may include any file of the interposer."""
    flags = sanitizers.flags(build)
    files = [*FOLDER.glob("*.[ch]"), *INTERPOSER.rglob("*.[ch]")]

    def make(part: Path) -> None:
        compile_c(part / program, *sources(program), *flags)

    return kept(BUILT, f"suite-{program}", files, flags, make) / program


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("build", BUILDS)
def test_program(build: str, program: str, tmp_path: Path) -> None:
    binary = compiled(program, build)
    pages = tmp_path / "pages"
    pages.mkdir()
    ran = subprocess.run(
        [binary, str(BUILDS[build]), pages],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | sanitizers.OPTIONS,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", ["address", "thread"])
def test_a_sanitizer_finds_what_it_is_for(name: str, tmp_path: Path) -> None:
    """Otherwise a clean run would say nothing. Two accesses at the very same moment may hide each
    other from the thread sanitizer, so there are many."""
    wrong = {
        "address": "char *p = malloc(4); free(p); return p[0];",
        "thread": "pthread_t t; pthread_create(&t, 0, body, 0); body(0); pthread_join(t, 0);",
    }
    (tmp_path / "wrong.c").write_text(
        "#include <pthread.h>\n#include <stdlib.h>\n"
        "int n;\nvoid *body(void *a) { for (int i = 0; i < 10000; i++) n++; return a; }\n"
        f"int main(void) {{ {wrong[name]} }}\n"
    )
    compile_c(tmp_path / "wrong", tmp_path / "wrong.c", "-Wno-error", *sanitizers.flags(name))
    ran = subprocess.run(
        [tmp_path / "wrong"], capture_output=True, env=os.environ | sanitizers.OPTIONS
    )
    assert ran.returncode == sanitizers.FOUND
    assert b"Sanitizer" in ran.stderr
