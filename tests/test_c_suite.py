# SPDX-License-Identifier: Apache-2.0
"""The C test suite: every program of tests/c, plain and under the sanitizers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("c")
INTERPOSER = FOLDER.parent.parent / "interposer"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.c"))
# Flags, and how hard to try: a sanitizer is several times slower.
BUILDS = {
    "plain": ([], 100),
    "address": (["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], 40),
    "thread": (["-fsanitize=thread"], 40),
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
    # fork.c forks while it has threads, and its children start none.
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def compile_c(output: Path, *arguments: str | Path) -> None:
    compiler = os.environ.get("CC", "cc").split()
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread"]
    flags += ["-fno-omit-frame-pointer", '-DLIVESHIFT_VERSION="test"', f"-I{INTERPOSER}"]
    made = subprocess.run(
        [*compiler, *flags, *arguments, "-o", output], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A way to build; skipped where this machine has no runtime library for it."""
    name: str = request.param
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    try:
        compile_c(folder / "empty", folder / "empty.c", *BUILDS[name][0])
    except AssertionError as error:
        pytest.skip(f"the compiler has no {name} sanitizer here: {str(error)[:200]}")
    ran = subprocess.run([folder / "empty"], capture_output=True, text=True)
    if ran.returncode != 0:
        pytest.skip(f"the {name} sanitizer does not run here: {ran.stderr[:200]}")
    return name


def sources(program: str) -> list[Path]:
    """The program's own file and those that it says it needs."""
    text = (FOLDER / f"{program}.c").read_text()
    needs = re.search(r"^ \* needs: (.*)$", text, re.MULTILINE)
    assert needs is not None, f"{program}.c does not say what it needs"
    return [FOLDER / f"{program}.c", *(INTERPOSER / name for name in needs[1].split())]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(build: str, program: str, tmp_path: Path) -> None:
    flags, effort = BUILDS[build]
    binary = tmp_path / program
    compile_c(binary, *sources(program), *flags)
    pages = tmp_path / "pages"
    pages.mkdir()
    ran = subprocess.run(
        [binary, str(effort), pages],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | OPTIONS,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("name", ["address", "thread"])
def test_a_sanitizer_finds_what_it_is_for(name: str, tmp_path: Path) -> None:
    """Otherwise a clean run would say nothing."""
    wrong = {
        "address": "char *p = malloc(4); free(p); return p[0];",
        "thread": "pthread_t t; pthread_create(&t, 0, body, 0); n++; pthread_join(t, 0); return 0;",
    }
    (tmp_path / "wrong.c").write_text(
        "#include <pthread.h>\n#include <stdlib.h>\n"
        "int n;\nvoid *body(void *a) { n++; return a; }\n"
        f"int main(void) {{ {wrong[name]} }}\n"
    )
    try:
        compile_c(tmp_path / "wrong", tmp_path / "wrong.c", "-Wno-error", *BUILDS[name][0])
    except AssertionError as error:
        pytest.skip(f"the compiler has no {name} sanitizer here: {str(error)[:200]}")
    ran = subprocess.run([tmp_path / "wrong"], capture_output=True, env=os.environ | OPTIONS)
    assert ran.returncode != 0
    assert b"Sanitizer" in ran.stderr
