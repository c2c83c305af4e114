# SPDX-License-Identifier: Apache-2.0
"""Commands with an operator's key, over real ZeroMQ with CURVE to a switchboard, behind which the
double answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import Call, Starter, ended
from daemon_process import Place
from link_harness import free_address, nothing
from orchestrator_scene import FACTS
from waits import until

from liveshift.errors import LiveshiftError, NotFound, NotPermitted, Refused, Unreachable
from liveshift.launcher.client import curve_connection
from liveshift.launcher.client.client import Client
from liveshift.launcher.client.context import Remote, find
from liveshift.runtime import messages
from liveshift.runtime.config.access import Role
from liveshift.runtime.config.cluster import load
from liveshift.runtime.control import keys, link
from liveshift.runtime.control.link import Holder, Switchboard
from liveshift.runtime.messages import Message


class Far:
    """An orchestrator's control port in a thread; ``answer`` serves its operators."""

    def __init__(self, key_directory: Path, answer: Callable[[Message], Message | None]) -> None:
        self.keys = key_directory
        self.address = free_address()
        self.heard: list[tuple[Holder, Message]] = []
        self.answer = answer
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self) -> None:
        async def begin() -> None:
            board = Switchboard(self.address, self.keys)
            self._task = asyncio.create_task(board.serve(nothing, self._serve))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)

    def stop(self) -> None:
        async def end() -> None:
            assert self._task is not None
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self, holder: Holder, ask: Message) -> Message | None:
        self.heard.append((holder, ask))
        return await asyncio.to_thread(self.answer, ask)


@pytest.fixture
def far(key_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """It names whoever asks, and serves nothing else."""
    monkeypatch.setattr(link, "WATCH_S", 0.05)
    made = Far(key_directory, lambda _ask: messages.Named("far"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def remote(far: Far) -> Remote:
    return Remote(far.address, far.keys / "operators" / "ops.key")


# ---- the client ----


def test_asks_are_answered_and_errors_come_as_they_were_raised(far: Far, remote: Remote) -> None:
    def answer(ask: Message) -> Message | None:
        if isinstance(ask, messages.GetMigration):
            raise NotFound("no migration", hint="look elsewhere")
        return messages.Named("far")

    far.answer = answer
    with Client(remote) as client:
        assert client.get(messages.Named, messages.GetStatus()).name == "far"
        with pytest.raises(NotFound) as caught:
            client.request(messages.GetMigration("m1"))
        assert caught.value.hint == "look elsewhere"
        assert client.get(messages.Named, messages.GetStatus()).name == "far"
    assert {holder for holder, _ in far.heard} == {Holder("ops", Role.OPERATE)}


def test_two_clients_with_one_key_do_not_wait_for_each_other(far: Far, remote: Remote) -> None:
    go = threading.Event()
    told: list[bool] = []

    def answer(ask: Message) -> Message | None:
        if isinstance(ask, messages.ReadOutput):
            told.append(go.wait(20))
        return None

    far.answer = answer
    with Client(remote) as waiting, Client(remote) as other:
        thread = threading.Thread(target=waiting.request, args=(messages.ReadOutput("a/0", 0, 9),))
        thread.start()
        until(lambda: any(isinstance(ask, messages.ReadOutput) for _, ask in far.heard))
        other.request(messages.GetStatus())
        go.set()
        thread.join(20)
        assert not thread.is_alive()
    assert told == [True], "the other one was answered first"


def test_an_answer_that_takes_too_long_is_not_taken_for_the_next(far: Far, remote: Remote) -> None:
    go = threading.Event()

    def answer(ask: Message) -> Message | None:
        if isinstance(ask, messages.ReadOutput):
            go.wait(20)
            return messages.Output(b"late", 4, None)
        return messages.Named("in time")

    far.answer = answer
    with Client(remote) as client:
        with pytest.raises(
            Unreachable, match=r"did not answer the request to read output within 0\.5 s"
        ):
            client.request(messages.ReadOutput("a/0", 0, 0), 0.5)
        go.set()
        assert client.get(messages.Named, messages.GetStatus()).name == "in time"


def test_an_ask_under_way_survives_that_all_connect_again(
    far: Far, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's key is revoked while the ask is served: it is asked again and served once."""
    greeted: list[int | None] = []
    again = threading.Event()
    greet = curve_connection.CurveConnection._greeted

    def counted(line: curve_connection.CurveConnection, until: float) -> int | None:
        greeted.append(greet(line, until))
        if len(greeted) == 2:
            again.set()
        return greeted[-1]

    def answer(_ask: Message) -> Message | None:
        keys.revoke(far.keys, "h1")
        assert again.wait(20)
        return messages.Named("once")

    monkeypatch.setattr(curve_connection.CurveConnection, "_greeted", counted)
    far.answer = answer
    with Client(remote) as client:
        assert client.request(messages.Migrate("a/0", "", "", False), 20) == messages.Named("once")
    assert len(far.heard) == 1
    assert len(set(greeted)) == 1, "the same life, twice"


def test_an_idle_client_goes_on_after_a_restart(far: Far, remote: Remote) -> None:
    with Client(remote) as client:
        client.request(messages.GetStatus())
        far.stop()
        far.start()
        client.request(messages.GetStatus())
    assert len(far.heard) == 2


def test_an_ask_of_an_orchestrator_that_is_restarted_is_not_asked_again(
    far: Far, remote: Remote
) -> None:
    begun, go = threading.Event(), threading.Event()

    def answer(ask: Message) -> Message | None:
        begun.set()
        go.wait(20)
        return None

    far.answer = answer
    with Client(remote) as client:
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                client.request(messages.Migrate("a/0", "", "", False), 20)
            except LiveshiftError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert begun.wait(10)
        far.stop()
        far.start()
        thread.join(20)
        go.set()
    assert len(far.heard) == 1
    assert isinstance(errors[0], Unreachable)
    assert "the orchestrator was restarted meanwhile" in str(errors[0])


def test_a_revoked_key_is_turned_away_also_in_the_middle(far: Far, remote: Remote) -> None:
    key = far.keys.parent / "ops.key"
    shutil.copy(remote.key, key)
    shutil.copy(far.keys / "public/orchestrator.pub", key.parent)
    with Client(Remote(far.address, key)) as client:
        client.request(messages.GetStatus())
        go = threading.Event()

        def answer(_ask: Message) -> Message | None:
            keys.revoke(far.keys, "ops")
            go.wait(20)
            return None

        far.answer = answer
        with pytest.raises(NotPermitted, match=r"turned the key in .*ops\.key away") as caught:
            client.request(messages.GetStatus(), 20)
        go.set()
        assert "revoked" in (caught.value.hint or "")
        with pytest.raises(NotPermitted):
            client.request(messages.GetStatus(), 20)
    assert len(far.heard) == 2


def test_another_orchestrator_than_the_key_is_for(far: Far, remote: Remote, tmp_path: Path) -> None:
    key = tmp_path / "ops.key"
    shutil.copy(remote.key, key)
    keys.init(tmp_path / "other", ["h0"])
    shutil.copy(tmp_path / "other/public/orchestrator.pub", tmp_path)
    with (
        Client(Remote(far.address, key)) as client,
        pytest.raises(Unreachable, match=r"is not the orchestrator whose key is in .*\.pub"),
    ):
        client.request(messages.GetStatus())
    assert not far.heard


def test_nobody_listens(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_connection, "CLOSED_S", 0.1)
    with (
        Client(Remote(free_address(), remote.key)) as client,
        pytest.raises(
            Unreachable, match=r"no orchestrator at .*: .*:[0-9]+ refuses connections: nothing"
        ),
    ):
        client.request(messages.GetStatus())


def test_no_way_there_is_not_called_refused(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_route(*_: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(curve_connection, "CLOSED_S", 0.1)
    monkeypatch.setattr(asyncio, "open_connection", no_route)
    with (
        Client(Remote(free_address(), remote.key)) as client,
        pytest.raises(Unreachable, match=r"cannot be reached: No route to host") as caught,
    ):
        client.request(messages.GetStatus())
    assert "ip route get" in (caught.value.hint or "")


def test_somebody_listens_and_says_nothing(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_connection, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        with Client(Remote(address, remote.key)) as client:
            with pytest.raises(Unreachable, match=r"no answer within 0\.3 s"):
                client.request(messages.GetStatus())
            with pytest.raises(
                Unreachable, match=r"did not answer the request to show the status within 0\.1 s"
            ):
                client.request(messages.GetStatus(), 0.1)


def test_a_command_of_another_version_is_told(
    far: Far, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        curve_connection,
        "encode_request",
        lambda *ask: messages.encode_request(*ask).replace(bytes([messages.VERSION]), b"\x63", 1),
    )
    with (
        Client(remote) as client,
        pytest.raises(LiveshiftError, match=f"version 99, this is version {messages.VERSION}"),
    ):
        client.request(messages.GetStatus())


def test_a_host_that_is_not_there(remote: Remote) -> None:
    with (
        Client(Remote("no-such-host.invalid:7400", remote.key)) as client,
        pytest.raises(Unreachable, match="there is no such host"),
    ):
        client.request(messages.GetStatus())


def test_keys_that_cannot_be_used(far: Far, remote: Remote, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "ops.key"
    alone.parent.mkdir()
    shutil.copy(remote.key, alone)
    for place, error, text in (
        (tmp_path / "none.key", NotFound, "no such key"),
        (alone, NotFound, r"orchestrator\.pub: the orchestrator's public key is not next to"),
    ):
        with Client(Remote(far.address, place)) as client, pytest.raises(error, match=text):
            client.request(messages.GetStatus())
    alone.chmod(0o644)
    with (
        Client(Remote(far.address, alone)) as client,
        pytest.raises(Refused, match="its mode is 0644, expected 0600"),
    ):
        client.request(messages.GetStatus())


def test_the_key_of_a_host_is_not_an_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], call: Call
) -> None:
    """The orchestrator's own words, through a real command line; the agent does not notice it."""
    monkeypatch.setattr(link, "WATCH_S", 0.05)
    place = Place(tmp_path)
    key = tmp_path / "keys" / "hosts" / "h0.key"
    with place.runs("orchestrator"):
        where = ("--connect", f"tcp://{place.orchestrator}", "--key", str(key))
        environment.pop("LIVESHIFT_SOCKET")
        code, out, err = call("status", *where)
        assert (code, out) == (7, "")
        assert err.startswith("error: the key of the host h0 is no operator's: it may not make the")
        assert "liveshift keys add-operator NAME" in err

        async def agent() -> None:
            uplink = link.Uplink("h0", place.orchestrator, tmp_path / "keys", nothing)
            serving = asyncio.create_task(uplink.serve())
            register = messages.Register("h0", FACTS, {}, load(place.config).digest, "boot_id")
            answer = await uplink.connection.request(register, 20)
            assert isinstance(answer, messages.Books)
            with pytest.raises(NotPermitted, match="is no operator's"):
                await asyncio.to_thread(asked_with, Remote(place.orchestrator, key))
            assert (
                await uplink.connection.request(messages.Heartbeat("h0", 1 << 30, []), 20) is None
            )
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

        asyncio.run(agent())


def asked_with(remote: Remote) -> None:
    with Client(remote) as client:
        client.request(messages.GetStatus(), 20)


# ---- which orchestrator ----


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


# ---- the commands ----


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
    if "wide" not in words:  # it shows how old jobs are
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
