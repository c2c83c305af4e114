# SPDX-License-Identifier: Apache-2.0
"""What a client with an operator's key says if it gets no answer, or has no right to one."""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
from pathlib import Path

import pytest
from cli_harness import Call
from daemon_process import Place
from far_orchestrator import Far, asked_with, far, remote
from link_harness import free_address, nothing
from orchestrator_scene import FACTS

from liveshift.errors import LiveshiftError, NotFound, NotPermitted, Refused, Unreachable
from liveshift.launcher.client import curve_connection
from liveshift.launcher.client.client import Client
from liveshift.launcher.client.context import Remote
from liveshift.runtime import messages
from liveshift.runtime.config.cluster import load
from liveshift.runtime.control import link

__all__ = ["far", "remote"]


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
