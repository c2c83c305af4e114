# SPDX-License-Identifier: Apache-2.0
"""What criu_glue has in C besides memory.so, built under sanitizers, in a copy of the package.

The product installs the programs static, so that nothing of a job's is in them. A sanitizer cannot
be in a static program, so here its own library is linked statically, and no other. A sanitizer
writes what it finds to a file beside the copy, because nobody reads the programs' standard error.

CRIU loads the shims. It has no sanitizer, so they can only have checks that need no library:
undefined behaviour ends CRIU by SIGILL, and then the test fails whose dump or restore this was.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath

import sanitizers
from checkout import ROOT

import liveshift

FOUND = "found"
OPTIONS = """
const char *__asan_default_options(void) {{ return "detect_leaks=0:log_path={log}"; }}
const char *__ubsan_default_options(void) {{ return "print_stacktrace=1:log_path={log}"; }}
"""
"""Process 1 ends only with its capsule, so no leak is looked for at its end."""

TRAPS = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")


@dataclass(frozen=True)
class Binary:
    """``path``: in the package. ``sources``: a pattern of files in the checkout."""

    path: PurePath
    sources: str
    shim: bool


BINARIES = (
    Binary(PurePath("criu_glue/capsule/capsule-init"), "capsule/capsule_*.c", False),
    Binary(PurePath("criu_glue/criu/criu-hook"), "criu/criu_hook.c", False),
    Binary(PurePath("criu_glue/criu/interrupted_shim.so"), "criu/interrupted_shim.c", True),
    Binary(PurePath("criu_glue/criu/page_filter_shim.so"), "criu/page_filter.c", True),
    Binary(PurePath("criu_glue/criu/rlimit_shim.so"), "criu/rlimit_shim.c", True),
    Binary(
        PurePath("criu_glue/memory/prefill/prefill_shim.so"), "memory/prefill/prefill_shim.c", True
    ),
)


class SanitizedPackage:
    """``directory`` gets the copy. It must be seen from inside a capsule, so not lie in /tmp.
    ``sources``: a folder like criu_glue."""

    def __init__(self, directory: Path, sources: Path = ROOT / "criu_glue") -> None:
        self._directory = directory
        self._made = directory / "package"
        directory.chmod(0o755)
        package, installed = self._made / "liveshift", Path(liveshift.__file__).parent
        _link(installed, package, [installed / binary.path for binary in BINARIES])
        (options := directory / "options.c").write_text(OPTIONS.format(log=directory / FOUND))
        for binary in BINARIES:
            own = ["-U_GNU_SOURCE"]  # most of the sources say that themselves
            if binary.shim:
                own += ["-shared", "-fPIC", "-fvisibility=hidden", *TRAPS]
                own += [f"-I{sources / 'memory'}"]
            else:
                own += [*sanitizers.flags("address"), "-static-libasan", "-static-libubsan"]
                own += [str(options)]
            files = sorted(sources.glob(binary.sources))
            assert files, f"{sources} has no {binary.sources}"
            sanitizers.compile_c(package / binary.path, *own, *files)

    def test(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run tests with the copy in place of the installed package."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *map(str, words)]
        command += ["-o", "timeout=240", "-o", "cache_dir=build/pytest-sanitized"]
        environment = os.environ | {"PYTHONPATH": str(self._made)}
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )

    def found(self) -> list[str]:
        """What the sanitizers of the programs have reported."""
        return [path.read_text() for path in sorted(self._directory.glob(f"{FOUND}.*"))]


def _link(source: Path, target: Path, but: list[Path]) -> None:
    """Make ``target`` like ``source``, of links, without the files ``but``."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if any(path in file.parents for file in but):
            _link(path, target / path.name, but)
        elif path not in but and path.name != "__pycache__":
            (target / path.name).symlink_to(path)
