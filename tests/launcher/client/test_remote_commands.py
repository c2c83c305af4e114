# SPDX-License-Identifier: Apache-2.0
"""Commands with an operator's key: which orchestrator they mean, and that they say the
same as on its machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import Call, Starter, ended
from far_orchestrator import Far, far, remote

from liveshift.errors import LiveshiftError
from liveshift.launcher.client.context import Remote, find
from liveshift.runtime import messages
from liveshift.runtime.control import keys

__all__ = ["far", "remote"]


def test_which_orchestrator(tmp_path: Path) -> None:
    there = {"LIVESHIFT_CONNECT": "tcp://far:7400", "LIVESHIFT_KEY": "/k", "LIVESHIFT_SOCKET": "/s"}
    assert find(None, None, "tcp://a:1", "/b", {}) == Remote("a:1", Path("/b"))
    assert find(None, None, "a:1", "/b", there) == Remote("a:1", Path("/b"))
    assert find(None, None, None, None, there) == Remote("far:7400", Path("/k"))
    assert find(None, None, None, "/b", there) == Remote("far:7400", Path("/b"))
    assert find("/mine", None, None, None, there) == Path("/mine")
    assert find(None, None, None, None, {"LIVESHIFT_SOCKET": "/s"}) == Path("/s")
    home = find(None, None, "a:1", "~/k", {})
    assert home == Remote("a:1", Path(os.path.expanduser("~/k")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("/s", None, "a:1", "/k"), "--connect and --socket each name a cluster"),
        ((None, "lab", "a:1", "/k"), "--connect and --lab each name a cluster"),
        ((None, None, "a:1", None), "a:1 needs an operator's key"),
        ((None, None, None, "/k"), "--key goes with --connect"),
        ((None, None, "a", "/k"), '"a" is not an address of an orchestrator'),
        ((None, None, "a:0", "/k"), '"a:0" is not an address'),
        ((None, None, "a:70000", "/k"), "is not an address"),
        ((None, None, "http://a:1", "/k"), "is not an address"),
        ((None, None, "a:1/x", "/k"), "is not an address"),
    ],
)
def test_options_that_make_no_sense(options: tuple[str | None, ...], message: str) -> None:
    socket, lab, connect, key = options
    with pytest.raises(LiveshiftError, match=message):
        find(socket, lab, connect, key, environment={})


@pytest.fixture
def distant(gpt: Any, far: Far, remote: Remote, environment: dict[str, str]) -> Iterator[Any]:
    """The double with job gpt, that only an operator's key reaches."""
    ours, theirs = socket.socketpair()
    gpt._lines.add(ours)
    far.answer = lambda ask: gpt._answer(ask, ours)
    environment.pop("LIVESHIFT_SOCKET")
    environment |= {"LIVESHIFT_CONNECT": f"tcp://{far.address}", "LIVESHIFT_KEY": str(remote.key)}
    yield gpt
    theirs.close()
    ours.close()


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("status", "-o", "wide"),
        ("events",),
        ("migrate", "gpt/1", "--dry-run"),
        ("whoami",),
        ("migrate", "gpt/7"),
        ("untaint", "h9"),
        ("logs", "gpt"),
    ],
)
def test_a_command_says_the_same_from_afar(
    distant: Any, call: Call, environment: dict[str, str], words: tuple[str, ...]
) -> None:
    distant.print("gpt/1", b"hello\n")
    near = {k: v for k, v in environment.items() if k not in ("LIVESHIFT_CONNECT", "LIVESHIFT_KEY")}
    near["LIVESHIFT_SOCKET"] = str(distant.path)
    here, there = call(*words, env=near), call(*words)
    assert (there[0], there[2]) == (here[0], here[2])
    if "wide" not in words:  # `-o wide` prints ages, which grow between the two calls
        assert there == here


def test_options_may_stand_on_either_side_of_the_verb(
    distant: Any, call: Call, environment: dict[str, str]
) -> None:
    where = ("--connect", environment.pop("LIVESHIFT_CONNECT"))
    key = ("--key", environment.pop("LIVESHIFT_KEY"))
    assert call(*where, *key, "status", "gpt")[0] == 0
    assert call(*where, "status", "gpt", *key)[0] == 0
    code, _, err = call("status", "gpt", *where)
    assert code == 2
    assert "needs an operator's key" in err


def test_a_host_is_drained_from_afar(distant: Any, call: Call) -> None:
    code, out, err = call("drain", "h1", "--reason", "fan")
    assert code == 0
    assert err.startswith("gpt/1: cost 0.9 s of training: ")
    assert err.count("\n") == 1
    assert out.endswith("h1 is empty and tainted\n")
    assert distant.hosts["h1"].taint == "fan"


def test_output_is_followed_from_afar(distant: Any, start: Starter) -> None:
    process = start("logs", "gpt", "-f")
    distant.wait_for(messages.ReadOutput, 4)
    distant.print("gpt/1", b"one\n")
    distant.move("gpt/1", "h2")
    distant.print("gpt/1", b"two\n")
    distant.end("gpt/0")
    distant.end("gpt/1")
    code, out, _err = ended(process)
    assert (code, out) == (0, "gpt/1: one\ngpt/1: two\n")


def test_who_follows_is_cut_off_with_the_key(
    distant: Any, far: Far, start: Starter, tmp_path: Path, environment: dict[str, str]
) -> None:
    key = tmp_path / "ops.key"
    shutil.copy(environment["LIVESHIFT_KEY"], key)
    shutil.copy(far.keys / "public/orchestrator.pub", tmp_path)
    environment["LIVESHIFT_KEY"] = str(key)
    process = start("logs", "gpt/1", "-f")
    distant.wait_for(messages.ReadOutput, 2)
    keys.revoke(far.keys, "ops")
    code, out, err = ended(process)
    assert (code, out) == (7, "")
    assert "turned the key" in err
    distant.end("gpt/1")


def test_whoami_for_a_script(distant: Any, call: Call) -> None:
    code, out, _ = call("whoami", "-o", "json")
    assert code == 0
    assert json.loads(out)["role"] == "admin"
