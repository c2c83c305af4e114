# SPDX-License-Identifier: Apache-2.0
"""A client with an operator's key, over real ZeroMQ with CURVE: its answers, and a restart or a
revoked key meanwhile."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from far_orchestrator import Far, far, remote
from waits import until

from liveshift.errors import LiveshiftError, NotFound, NotPermitted, Unreachable
from liveshift.launcher.client import curve_connection
from liveshift.launcher.client.client import Client
from liveshift.launcher.client.context import Remote
from liveshift.runtime import messages
from liveshift.runtime.config.access import Role
from liveshift.runtime.control import keys
from liveshift.runtime.control.keyring import Holder
from liveshift.runtime.messages import Message

__all__ = ["far", "remote"]


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
        # If the client asks before its socket learns of the stop, the old orchestrator may have got
        # the request.
        connection: Any = client._connection
        assert connection._events.poll(10_000), "the socket has not learnt of the stop in 10 s"
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
