# SPDX-License-Identifier: Apache-2.0
"""Programs that were built with AddressSanitizer run with the interposer, and find what they find
without it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import sanitizers
from doubles.gpu.build import compiler

from liveshift.interposer import library
from liveshift.runtime.config.cluster import Env
from liveshift.runtime.config.environment import CapsuleIdentity, environment

PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    (void)words;
    char *freed = malloc(3);
    free(freed);
    puts("ran");
    fflush(stdout);
    return count > 1 ? freed[1] : 0;
}
"""


def run(command: list[str], **caller: str) -> subprocess.CompletedProcess[str]:
    """As a command of a capsule."""
    place = CapsuleIdentity("gpt", 0, 1, "10.99.0.1", "10.99.0.1", ranks=False)
    caller = {"PATH": os.environ["PATH"], **caller}
    made = environment(place, Env(), caller, library.library_path(), "")
    return subprocess.run(command, env=made, capture_output=True, text=True, timeout=60)


def test_a_program_that_was_built_with_a_sanitizer(tmp_path: Path) -> None:
    built = tmp_path / "program"
    command = [*compiler(), *sanitizers.flags("address"), "-x", "c", "-", "-o", str(built)]
    subprocess.run(command, input=PROGRAM, text=True, check=True)
    well, badly = run([str(built)]), run([str(built), "bad"])
    assert (well.returncode, well.stdout, well.stderr) == (0, "ran\n", "")
    assert badly.returncode != 0
    assert "heap-use-after-free" in badly.stderr


def test_a_sanitizer_that_its_user_preloads() -> None:
    sanitizers.flags("address")
    ran = run(["/bin/echo", "ran"], LD_PRELOAD=str(sanitizers.runtime("address")))
    assert (ran.stdout, "come first" in ran.stderr) == ("ran\n", False)
