# SPDX-License-Identifier: Apache-2.0
"""Looking a function up in a loaded library, by a C program that loads libraries made here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import sanitizers
from checkout import INTERPOSER, SUPPORT
from sanitizers import compile_c

PROBES = SUPPORT / "interposer"
CC = os.environ.get("CC", "cc").split()

SOURCE = """
int two(void) { return 2; }
__attribute__((weak)) int weak(void) { return 7; }
extern int getppid(void);
int caller(void) { return getppid(); }
__thread int own = 5;
__attribute__((visibility("hidden"))) int hidden(void) { return 3; }
static int chosen(void) { return 4; }
int indirect(void) __attribute__((ifunc("choose")));
static int (*choose(void))(void) { return chosen; }
"""

VERSIONED = """
int first(void) { return 1; }
int second(void) { return 2; }
__asm__(".symver first, several@OLD");
__asm__(".symver second, several@@NEW");
int gone_now(void) { return 3; }
__asm__(".symver gone_now, gone@OLD");
"""
VERSIONS = "OLD { global: several; gone; }; NEW { global: several; } OLD;"


def build(folder: Path, name: str, source: str, *flags: str) -> Path:
    path = folder / name
    command = [*CC, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *flags]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(scope="module", params=["plain", "address"])
def probe(request: pytest.FixtureRequest, folder: Path) -> Callable[..., list[str]]:
    program = folder / f"probe-{request.param}"
    flags = sanitizers.flags(request.param)
    compile_c(
        program, *flags, PROBES / "elf_lookup_probe.c", INTERPOSER / "hooks/elf_lookup.c", "-ldl"
    )

    def ask(*words: object) -> list[str]:
        done = subprocess.run(
            [program, *map(str, words)],
            env=os.environ | sanitizers.OPTIONS,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return ask


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_functions_of_a_library_loaded_privately(
    folder: Path, probe: Callable[..., list[str]], style: str
) -> None:
    library = build(folder, f"libkinds-{style}.so", SOURCE, f"-Wl,--hash-style={style}")
    wanted = ["two", "weak", "indirect", "getppid", "own", "hidden", "no_such_function"]
    asked = [word for name in wanted for word in ("find", library.name, name)]
    absent = "it does not export that name"
    assert probe("load", library, *asked) == ["2", "7", "4", absent, absent, absent, absent]


def test_the_default_version_is_taken_and_no_other(
    folder: Path, probe: Callable[..., list[str]]
) -> None:
    script = folder / "versions"
    script.write_text(VERSIONS)
    library = build(folder, "libversioned.so", VERSIONED, f"-Wl,--version-script={script}")
    assert probe(
        "load", library, "find", "libversioned.so", "several", "find", "libversioned.so", "gone"
    ) == ["2", "it does not export that name"]


def test_a_library_is_known_by_its_file_or_its_soname_up_to_a_dot(
    folder: Path, probe: Callable[..., list[str]]
) -> None:
    one = "int one(void) { return 1; }"
    library = build(folder, "odd.so.9.1", one, "-Wl,-soname,libproper.so.13")
    names = {
        "odd.so": "1",
        "odd.so.9": "1",
        "odd.so.9.1": "1",
        "libproper.so": "1",
        "libproper.so.13": "1",
        "libproper.so.1": "it is not loaded in this process",
        "libprope": "it is not loaded in this process",
        "proper.so": "it is not loaded in this process",
    }
    asked = [word for name in names for word in ("find", name, "one")]
    assert probe("load", library, *asked) == list(names.values())


def test_of_two_that_match_the_one_that_exports_the_name(
    folder: Path, probe: Callable[..., list[str]]
) -> None:
    older = build(folder, "libtwice.so.1", "int old(void) { return 1; }")
    newer = build(
        folder, "libtwice.so.2", "int new(void) { return 2; } int old(void) { return 3; }"
    )
    assert probe(
        "load",
        older,
        "load",
        newer,
        "find",
        "libtwice.so",
        "old",
        "find",
        "libtwice.so",
        "new",
        "find",
        "libtwice.so.2",
        "old",
    ) == ["1", "2", "3"]


def test_libc_itself(probe: Callable[..., list[str]]) -> None:
    (pid,) = probe("find", "libc.so.6", "getpid")
    assert pid.isdigit()
    assert probe("find", "libabsent.so", "getpid") == ["it is not loaded in this process"]


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_every_symbol_of_a_table_of_any_size(
    folder: Path, probe: Callable[..., list[str]], size: int
) -> None:
    """Buckets, chains and the Bloom filter, which in small tables hide most mistakes."""
    source = "".join(f"int f{i}(void) {{ return {i}; }}\n" for i in range(size))
    library = build(folder, f"libmany-{size}.so", source, "-Wl,--hash-style=gnu")
    asked = [word for i in range(size + 50) for word in ("find", library.name, f"f{i}")]
    expected = [str(i) for i in range(size)] + ["it does not export that name"] * 50
    assert probe("load", library, *asked) == expected


@pytest.mark.parametrize("build", sanitizers.SANITIZERS)
def test_a_thread_takes_no_signals_and_leaves_its_parent_as_it_was(
    folder: Path, build: str
) -> None:
    program, flags = folder / f"thread-{build}", sanitizers.flags(build)
    sources = [PROBES / "thread_start_probe.c"]
    sources += [INTERPOSER / "gate/thread.c", INTERPOSER / "hooks/elf_lookup.c"]
    compile_c(program, *flags, *sources, "-ldl")
    said = subprocess.run(
        [program],
        env=os.environ | sanitizers.OPTIONS,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert said == "liveshift passed-on 11\n00\n"
