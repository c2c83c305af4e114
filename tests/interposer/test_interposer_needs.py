# SPDX-License-Identifier: Apache-2.0
"""What the built interposer asks of the machine that it is loaded on."""

from __future__ import annotations

import re
import subprocess

import pytest

from liveshift.interposer.library import library_path

OLDEST_GLIBC = (2, 31)
"""Of Debian 11 and Ubuntu 20.04; older ones have no Python 3.10 to 3.13 worth the name."""

MOVED = {
    **dict.fromkeys(("dlopen", "dlsym", "dladdr", "dlerror", "dlclose", "dlvsym"), "elf_lookup"),
    "pthread_create": "thread_start",
    "pthread_sigmask": "sigprocmask, which is of one thread on Linux",
    "pthread_once": "a pthread_mutex, or an atomic",
    "stat": "statx or open",
    "fstat": "statx or lseek",
    "lstat": "statx",
    "__isoc23_strtol": "digits read by hand, see process.c",
}
"""What came into libc or got a new version later, and what to use."""

UNDEFINED = re.compile(r"\bUND (?P<name>[\w.]+)(?:@(?P<version>[\w.]+))?")


def readelf(*options: str) -> str:
    command = ["readelf", "--wide", *options, str(library_path())]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wanted() -> list[tuple[str, str]]:
    """(symbol, version) of everything that the library wants of others."""
    found = [(m["name"], m["version"] or "") for m in UNDEFINED.finditer(readelf("--dyn-syms"))]
    return sorted(set(found))


def test_the_list_is_read() -> None:
    assert ("getpid", "GLIBC_2.2.5") in wanted()


@pytest.mark.parametrize(("symbol", "version"), wanted())
def test_nothing_newer_than_the_oldest_glibc(symbol: str, version: str) -> None:
    family, _, number = version.partition("_")
    if family == "GLIBC":
        newest = tuple(int(n) for n in number.split("."))
        assert newest <= OLDEST_GLIBC, (
            f"{symbol} is wanted in version {version}: the library would not load on glibc "
            f"{'.'.join(map(str, OLDEST_GLIBC))}; use {MOVED.get(symbol, 'something older')}"
        )
    else:
        assert family in {"GCC", ""}, f"{symbol}@{version}: what is that?"


def test_a_symbol_without_a_version_is_one_that_may_be_absent() -> None:
    """Such a name is looked for in whatever else is loaded; only the compiler's own may be."""
    assert {name for name, version in wanted() if not version} <= {
        "_ITM_deregisterTMCloneTable",
        "_ITM_registerTMCloneTable",
        "__gmon_start__",
    }


def test_no_library_but_libc_and_the_unwinder() -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic")))
    assert "libc.so.6" in needed
    assert needed <= {"libc.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}


def test_no_constructors_but_for_fork_handlers() -> None:
    """A process that never communicates pays for the mapping, and five calls of libc's."""
    sections = dict(re.findall(r"\] (\.\w+)\s+\w+\s+\w+ \w+ (\w+)", readelf("--sections")))
    pointer = 8
    handlers, of_the_compiler = 5, 1
    assert int(sections[".init_array"], 16) <= (handlers + of_the_compiler) * pointer
