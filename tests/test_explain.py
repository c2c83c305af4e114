# SPDX-License-Identifier: Apache-2.0
"""CRIU's log put into words. (Real logs of failed dumps and restores: test_capture.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.criu_glue.explain import explain


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "dump.log"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Can't dump file 5 of that type [600] (unknown anon_inode:[io_uring])", "io_uring"),
        ("File opt/data.bin has bad size 5 (expect 7)", "file opt/data.bin differs"),
        ("File usr/lib/libx.so has bad build-ID", "usr/lib/libx.so is another build"),
        ("Can't fork for 1001: File exists", "pid 1001 is taken"),
        ("Can't write: No space left on device", "memory file system for images is full"),
        ("Can't dump {links} without --b", "a task uses {links}, which cannot be dumped"),
    ],
)
def test_known_troubles_have_a_sentence(log: Path, said: str, words: str) -> None:
    log.write_text(
        "(00.000001) Version: 4.2.1\n"
        f"(00.100000) Error (criu/somewhere.c:1): {said}\n"
        "(00.200000) Error (criu/cr-dump.c:1): Dumping FAILED.\n"
    )
    assert words in explain(log)


def test_an_unknown_trouble_is_told_in_crius_words_without_its_noise(log: Path) -> None:
    log.write_text(
        "(00.01) Error (criu/kerndat.c:1): Can't keep kdat cache\n"
        "(00.02) Error (criu/new.c:7): Something nobody has seen\n"
        "(00.03) Error (criu/cr-dump.c:1): Dumping FAILED.\n"
    )
    assert explain(log) == "Error (criu/new.c:7): Something nobody has seen"


def test_a_log_that_says_nothing(log: Path) -> None:
    assert explain(log) == "it left no log"
    log.write_bytes(b"")
    assert "names no error; last line: (empty)" in explain(log)
    log.write_bytes(b"(00.1) fine so far \xff\xfe\n")
    assert "last line: (00.1) fine so far" in explain(log)
