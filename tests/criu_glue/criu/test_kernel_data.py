# SPDX-License-Identifier: Apache-2.0
"""CRIU finds its kernel data on a host whose /run is no tmpfs, and on one whose is."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from liveshift.criu_glue.criu import kernel_data, tool

criu, directory = tool.find(), Path(sys.argv[1])
for _ in range(2):
    assert kernel_data.keep(criu, directory)
assert os.stat("/run/criu.kdat").st_mode & 0o777 == 0o600
check = criu.command("check", "-v4")
said = subprocess.run(check, stderr=subprocess.PIPE, text=True, check=True).stderr
assert "Loaded kdat cache from /run/criu.kdat" in said, said
try:
    Path("/run/criu.kdat").write_bytes(b"x")
    print("writable")
except OSError as error:
    print(error.strerror)
"""


def kept(tmp_path: Path, prepare: str, directory: str = "") -> str:
    """In a mount namespace of its own, of which nothing stays."""
    (tmp_path / "keep.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "run").mkdir()
    script = (
        f"{prepare} && exec {sys.executable} {tmp_path}/keep.py {directory or tmp_path / 'kept'}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.splitlines()[-1]


def test_where_run_is_no_tmpfs_a_file_that_nobody_can_change_is_there(tmp_path: Path) -> None:
    assert kept(tmp_path, f"mount --bind {tmp_path}/run /run") == "Read-only file system"


def test_the_default_place_for_it_lies_below_the_run_that_is_none(tmp_path: Path) -> None:
    prepare = f"mount --bind {tmp_path}/run /run"
    assert kept(tmp_path, prepare, "/run/liveshift/criu") == "Read-only file system"


def test_where_run_is_a_tmpfs_criu_keeps_it_itself(tmp_path: Path) -> None:
    assert kept(tmp_path, "mount -t tmpfs none /run") == "writable"
