# SPDX-License-Identifier: Apache-2.0
"""What the kernel may answer about a lock's table, as netlink has it (test_network.py asks it)."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from liveshift.criu_glue.network import network_lock
from liveshift.criu_glue.network.iproute import run
from liveshift.criu_glue.network.network_lock import _Table
from liveshift.criu_glue.network.sockets_inside import _enter

ERROR, NEW_TABLE, FLAGS, USE = 2, 10 << 8, 2, 3


class Line:
    """A netlink socket with one answer."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.sent = b""

    def send(self, raw: bytes) -> None:
        self.sent = raw

    def recv(self, _most: int) -> bytes:
        return self.answer


def table(answer: bytes) -> _Table:
    made: Any = object.__new__(_Table)
    made._line = Line(answer)
    return made  # type: ignore[no-any-return]


def error(code: int) -> bytes:
    return struct.pack("=IHHIIi", 36, ERROR, 0, 1, 0, -code) + bytes(16)


def described(*attributes: tuple[int, int]) -> bytes:
    body = b"".join(struct.pack("=HH", 8, kind) + struct.pack(">I", n) for kind, n in attributes)
    return struct.pack("=IHHII", 20 + len(body), NEW_TABLE, 0, 1, 0) + bytes(4) + body


def test_flags_are_those_of_the_table_that_is_there() -> None:
    assert table(described((USE, 7), (FLAGS, 1))).flags == 1
    assert table(described((USE, 7))).flags == 0, "awake"
    assert table(error(errno.ENOENT)).flags is None


def test_flags_are_not_read_out_of_the_middle_of_another_attribute() -> None:
    """A name that looks like them, with a length that is padded; and one without any length."""
    fake = struct.pack("=HHI", 8, FLAGS, 0xFFFFFFFF) + b"tail."
    name = struct.pack("=HH", 4 + len(fake), 1) + fake + bytes(3)
    flags = struct.pack("=HHBBBB", 8, FLAGS, 0, 0, 0, 1)
    for before in (name, bytes(4), b""):
        body = before + flags
        head = struct.pack("=IHHII", 20 + len(body), NEW_TABLE, 0, 1, 0) + bytes(4)
        assert table(head + body).flags == 1


@pytest.mark.parametrize("code", [errno.EPERM, errno.EBUSY])
def test_another_answer_is_not_taken_for_no_table(code: int) -> None:
    with pytest.raises(OSError, match="nf_tables") as caught:
        _ = table(error(code)).flags
    assert caught.value.errno == code


def test_a_change_that_was_refused_is_told_and_one_that_was_done_is_not() -> None:
    with pytest.raises(OSError, match="nf_tables") as caught:
        table(error(errno.EPERM)).set(0)
    assert caught.value.errno == errno.EPERM
    table(error(0)).set(1)


def test_a_namespace_that_cannot_be_entered_is_told() -> None:
    """The lock would be that of the agent's own host."""
    with open("/dev/null") as none, pytest.raises(OSError, match="Invalid argument") as caught:
        _enter(none.fileno())
    assert caught.value.errno == errno.EINVAL


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """The pid of a process in a network namespace of its own."""
    with subprocess.Popen(["unshare", "--net", "sleep", "60"]) as sleeper:
        try:
            while os.readlink(f"/proc/{sleeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                time.sleep(0.01)
            yield sleeper.pid
        finally:
            sleeper.kill()


@pytest.mark.root
def test_a_lock_that_is_prepared_is_there_and_open(elsewhere: int) -> None:
    """While the job is frozen only its flag is turned, which nft need not be started for."""
    home = os.readlink("/proc/thread-self/ns/net")
    network_lock.prepare_lock(elsewhere)
    assert os.readlink("/proc/thread-self/ns/net") == home, "this thread came back"
    with _Table(elsewhere) as made:
        assert made.flags == 1
    assert not network_lock.locked(elsewhere)


@pytest.mark.root
def test_a_lock_that_came_with_a_restore_drops_no_resets_once_it_is_prepared(
    elsewhere: int,
) -> None:
    """Programs run until the freeze, and wait for resets on loopback where a peer has gone."""
    inside = ["nsenter", "--target", str(elsewhere), "--net", "--", "nft"]
    run([*inside, "-f", "-"], network_lock.RESTORE_RULES)
    listed = ["list", "table", "inet", network_lock.LOCK_TABLE]
    assert "chain resets" in run([*inside, *listed])
    network_lock.unlock(elsewhere)
    network_lock.prepare_lock(elsewhere)
    rules = run([*inside, *listed])
    assert "chain in" in rules
    assert "resets" not in rules


@pytest.mark.root
def test_a_lock_stops_the_ways_for_which_it_was_prepared_last(elsewhere: int) -> None:
    """A move of a capsule that had a snapshot lets nothing out again."""
    inside = ["nsenter", "--target", str(elsewhere), "--net", "--", "nft"]

    def stops_output() -> bool:
        rules = run([*inside, "list", "table", "inet", network_lock.LOCK_TABLE])
        assert 'iifname "eth0" drop' in rules
        return 'oifname "eth0" drop' in rules

    network_lock.prepare_lock(elsewhere, ingress_only=True)
    assert not network_lock.locked(elsewhere)
    assert not stops_output()
    network_lock.lock(elsewhere)
    assert network_lock.locked(elsewhere)
    network_lock.prepare_lock(elsewhere)
    assert network_lock.locked(elsewhere), "a closed lock stays as it is"
    assert not stops_output()
    network_lock.unlock(elsewhere)
    for ingress_only in (False, True, False):
        network_lock.prepare_lock(elsewhere, ingress_only=ingress_only)
        assert not network_lock.locked(elsewhere)
        assert stops_output() is not ingress_only
