# SPDX-License-Identifier: Apache-2.0
"""CRIU's log put into words. (Real logs of failed dumps and restores: test_capture.py.)"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from liveshift.criu_glue.criu.explain import KNOWN, explain
from liveshift.criu_glue.survey import survey
from liveshift.errors import (
    AT_SOURCE,
    LiveshiftError,
    SourceFailed,
    SourceRefused,
    StepFailed,
    from_wire,
    to_wire,
)
from liveshift.runtime.agent import preflight


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "dump.log"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Can't dump file 5 of that type [600] (unknown anon_inode:[io_uring])", "io_uring"),
        (
            "File opt/some data.bin has bad size 5 (expect 7)",
            "file /opt/some data.bin has 5 bytes on the destination, and had 7 where the task had",
        ),
        ("File opt/x has bad mode 0100600 (expect 0100644)", "file /opt/x has mode 100600 on"),
        ("File usr/lib/libx.so has bad build-ID", "/usr/lib/libx.so is another build"),
        ("File usr/libx.so has bad build-ID length 3 (expect 2)", "/usr/libx.so is another build"),
        ("pie: 7: Unable to create a thread: -17", "the id of a thread is taken"),
        ("Can't fork for 1001: File exists", "pid 1001 is taken"),
        ("Can't write: No space left on device", "memory file system for images is full"),
    ],
)
def test_known_problems_have_a_sentence(log: Path, said: str, words: str) -> None:
    log.write_text(
        "(00.000001) Version: 4.2.1\n"
        f"(00.100000) Error (criu/somewhere.c:1): {said}\n"
        "(00.200000) Error (criu/cr-dump.c:1): Dumping FAILED.\n"
    )
    assert words in explain(log).words


def test_an_unknown_problem_is_told_in_crius_words_without_its_noise(log: Path) -> None:
    log.write_text(
        "(00.01) Error (criu/kerndat.c:1): Can't keep kdat cache\n"
        "(00.02) Error (criu/new.c:7): Something nobody has seen\n"
        "(00.03) Error (criu/cr-dump.c:1): Dumping FAILED.\n"
    )
    assert explain(log).words == "Error (criu/new.c:7): Something nobody has seen"


def test_a_log_that_says_nothing(log: Path) -> None:
    assert explain(log).words == "CRIU left no log"
    log.write_bytes(b"")
    assert "names no error; its last line is: (empty)" in explain(log).words
    log.write_bytes(b"(00.1) fine so far \xff\xfe\n")
    assert "its last line is: (00.1) fine so far" in explain(log).words


SAMPLES = (
    (
        "Error (criu/files-ext.c:99): Can't dump file 5 of that type (unknown "
        "anon_inode:[io_uring])",
        "holds an io_uring",
    ),
    (
        "Error (criu/files-ext.c:99): Can't dump file 3 of that type (anon_inode:[userfaultfd])",
        "holds a userfaultfd",
    ),
    (
        "Error (criu/files.c:1): Can't lookup mount=24 for fd=10 path=/dev/null",
        "on a mount that is not in its capsule",
    ),
    (
        "Error (criu/namespaces.c:460): Can't dump nested user namespace for 1002",
        "a user namespace of its own",
    ),
    ("Error (criu/sk-inet.c:1): Unsupported proto 262 for socket 5", "an MPTCP socket"),
    (
        "Error (criu/cr-dump.c:1703): Dump eventpoll (pid: 1001) failed with -1",
        "an epoll set holds",
    ),
    ("Error (criu/tty.c:2286): tty: ctty inheritance detected sid/pgrp 1002", "holds /dev/tty"),
    (
        "Error (criu/tty.c:625): tty: Unable to open /dev/ptmx with specified index 32",
        "/dev/pts/32",
    ),
    (
        "Error (criu/tty.c:182): tty: Index 2626 on ptmx is too big",
        "/dev/pts/2626, and CRIU dumps none above 1000",
    ),
    (
        "Error (criu/files-reg.c:1010): Can't dump ghost file /tmp/a b of 5000000 size, increase",
        "uses /tmp/a b, which was deleted and has 5000000 bytes",
    ),
    (
        "Error (criu/sk-unix.c:881): unix: Can't dump half of stream unix connection. name: x",
        "a UNIX socket outside",
    ),
    (
        "Error (criu/sk-unix.c:525): unix: Found a closed in-flight socket to 0x2e743c",
        "before it was accepted",
    ),
    (
        "Error (criu/sk-inet.c:185): inet: In-flight connection (l) for 363b7d6",
        "has not accepted a TCP connection",
    ),
    (
        "Error (compel/src/lib/infect.c:261): Unseizable non-zombie 1001 found, state S, err -1/10",
        "is traced by another process",
    ),
    (
        "Error (criu/file-lock.c:1): Can not set posix lock!",
        "a file lock of a task is held by another process",
    ),
    (
        "Error (criu/files-reg.c:1): File opt/data.bin has bad size 5 (expect 7)",
        "has 5 bytes on the",
    ),
    (
        "Error (criu/files-reg.c:1): File opt/data.bin has bad mode 0100600 (expect 0100644)",
        "has mode 100600 on the destination",
    ),
    ("Error (criu/files-reg.c:1): File usr/lib/libx.so has bad build-ID", "is another build"),
    (
        "Error (criu/files-reg.c:1): Can't open file opt/x on restore: No such file",
        "the destination lacks /opt/x",
    ),
    (
        "pie: 1001: Error (criu/pie/restorer.c:1): Unable to create a thread: -17",
        "id of a thread is",
    ),
    ("pie: 1001: Error (criu/pie/restorer.c:1): Unable to create a thread: -11", "no more threads"),
    ("Error (criu/cr-restore.c:1): Can't fork for 1001: File exists", "pid 1001 is taken"),
    ("Error (criu/image.c:1): Can't write: No space left on device", "is full on the destination"),
    ("Error (criu/mem.c:1): Can't map: Cannot allocate memory", "has too little memory"),
)
"""A line of each error that is known; what is said of it."""


def test_each_known_error_says_where_its_cause_is_and_which_check_finds_it_before(
    log: Path,
) -> None:
    """The check is there; that it finds the cause: test_known_causes.py, test_preflight.py."""
    seen = []
    for line, words in SAMPLES:
        log.write_text(f"(00.1) {line}\n")
        cause = explain(log)
        assert words in cause.words
        assert cause.known is not None
        seen.append(cause.known)
        module, _, name = cause.known.check.rpartition(".")
        assert callable(getattr(importlib.import_module(f"liveshift.{module}"), name))
        in_preflight = module == "runtime.agent.preflight"
        assert in_preflight != cause.known.in_capsule
        source = inspect.getsource(preflight.check if in_preflight else survey)
        assert f"{name}(" in source, "it is asked before a move"
    assert seen == [*KNOWN], "one sample of each, in order"


def test_what_comes_again_with_any_destination_is_an_error_of_its_own(log: Path) -> None:
    """Of a dump: what no check finds. Of a restore: what lies in the capsule."""

    def kinds(text: str) -> tuple[type[StepFailed], type[StepFailed]]:
        log.write_text(text)
        return explain(log).of_dump(), explain(log).of_restore()

    assert kinds("Error (criu/new.c:7): not seen before\n") == (SourceFailed, StepFailed)
    assert kinds("Error: ctty inheritance detected\n") == (StepFailed, SourceFailed)
    assert kinds("Error: Cannot allocate memory\n") == (StepFailed, StepFailed)
    assert kinds("(00.1) it was killed here\n") == (StepFailed, StepFailed)


@pytest.mark.parametrize("kind", AT_SOURCE)
def test_such_an_error_is_the_same_after_its_way_over_the_wire(kind: type[LiveshiftError]) -> None:
    made = kind("dump", "words", hint="h") if kind is SourceFailed else kind("words", hint="h")
    back = from_wire(*to_wire(made))
    assert (type(back), str(back), back.hint) == (kind, str(made), "h")
    assert back.exit_code == {SourceFailed: 1, SourceRefused: 5}[kind]
