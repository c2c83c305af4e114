# SPDX-License-Identifier: Apache-2.0
"""No file of the repository has a line with which git marks a merge conflict."""

from __future__ import annotations

import subprocess

from checkout import ROOT

BEGINS, ENDS = "<" * 7 + " ", ">" * 7 + " "


def test_no_file_has_a_line_that_marks_a_conflict() -> None:
    """All files that git does not ignore; a copy of the files without .git will do."""
    words = ["git", "grep", "--no-index", "--exclude-standard", "-n"]
    lines = ["-e", f"^{BEGINS}", "-e", f"^{ENDS}"]
    found = subprocess.run([*words, *lines], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (1, "", "")
