# SPDX-License-Identifier: Apache-2.0
"""The command line's end of the local socket, against the real server and the tests' double."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from doubles.orchestrator import Orchestrator

from liveshift.errors import LiveshiftError, NotFound, NotPermitted, Refused, Unreachable
from liveshift.launcher.client.client import Client
from liveshift.launcher.client.context import find_socket, lab_socket
from liveshift.runtime import messages
from liveshift.runtime.control import local_socket
from liveshift.runtime.messages import (
    GetMigration,
    GetStatus,
    Message,
    Named,
    ReadOutput,
    RunJob,
    Status,
)

# ---- both servers pass this: the wire as the client sees it ----

RUN = RunJob("gpt", 2, ["python", "träin.py", ""], {"A": "b" * 100_000}, "/", 0, [0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orchestrator.sock"


@pytest.fixture(params=["real", "double"])
def server(request: pytest.FixtureRequest, path: Path) -> Iterator[Path]:
    """Runs jobs by name only, knows no migration, and has a job that prints nothing."""
    if request.param == "double":
        with Orchestrator(path):
            yield path
        return

    async def handler(uid: int, ask: Message) -> Message | None:
        assert uid == os.getuid()
        match ask:
            case RunJob():
                return Named(ask.name)
            case ReadOutput():
                await asyncio.sleep(ask.wait)
                return messages.Output(b"", ask.offset, None)
            case GetStatus():
                return Status("real", 0.0, [], [], [])
            case GetMigration():
                raise NotFound(f'no migration "{ask.name}"')
        return None

    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        listening = await local_socket.serve_on(local_socket.listen(path), path, handler)
        ready.set()
        await asyncio.to_thread(done.wait)
        listening.close()
        conversations = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*conversations)  # they end with their clients

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield path
    done.set()
    thread.join(10)


def test_asks_are_answered_one_after_the_other(server: Path) -> None:
    with Client(server) as client:
        assert client.request(RUN) == Named("gpt")
        assert isinstance(client.request(GetStatus()), Status)
        assert client.get(Named, RUN).name == "gpt"


def test_an_error_comes_as_it_was_raised_and_the_connection_goes_on(server: Path) -> None:
    with Client(server) as client:
        with pytest.raises(NotFound, match='no migration "m7"'):
            client.request(GetMigration("m7"))
        assert client.get(Status, GetStatus()).jobs == []


def test_an_answer_that_takes_too_long_is_given_up_and_never_taken_for_another(
    server: Path,
) -> None:
    with Client(server) as client:
        client.request(RUN)
        with pytest.raises(
            Unreachable, match=r"did not answer the request to read output within 0\.2 s"
        ):
            client.request(ReadOutput("gpt/0", 0, 1.0), 0.2)
        assert isinstance(client.request(GetStatus()), Status)


def test_two_clients_do_not_wait_for_each_other(server: Path) -> None:
    with Client(server) as waiting, Client(server) as other:
        other.request(RUN)
        thread = threading.Thread(target=waiting.request, args=(ReadOutput("gpt/0", 0, 0.5),))
        thread.start()
        assert isinstance(other.request(GetStatus(), 0.4), Status)
        thread.join()


# ---- what can go wrong ----


def test_an_answer_of_another_type_is_an_error(server: Path) -> None:
    with (
        Client(server) as client,
        pytest.raises(
            LiveshiftError, match="answered the request to start a job with Named, not Status"
        ),
    ):
        client.get(Status, RUN)


def test_no_socket_says_how_to_get_one(path: Path) -> None:
    with Client(path) as client, pytest.raises(Unreachable, match="there is no") as caught:
        client.request(GetStatus())
    assert "lab up" in (caught.value.hint or "")


def test_a_socket_that_nobody_listens_on(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as left:
        left.bind(str(path))
    with Client(path) as client, pytest.raises(Unreachable, match="though the socket is there"):
        client.request(GetStatus())


def test_a_path_longer_than_a_socket_can_have(tmp_path: Path) -> None:
    with Client(tmp_path / ("x" * 200)) as client, pytest.raises(Unreachable, match="too long"):
        client.request(GetStatus())


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may use every socket, so root is somebody else for a while."""
    if os.getuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_socket_that_is_not_ours(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(stat.S_IRUSR)
        with Client(path) as client, as_nobody(), pytest.raises(NotPermitted) as caught:
            client.request(GetStatus())
        assert "run this as root" in (caught.value.hint or "")


@pytest.fixture
def crooked(path: Path) -> Iterator[Callable[[bytes | None], Path]]:
    """A server that answers every ask with these bytes, or hangs up."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    threads: list[threading.Thread] = []

    def start(answer: bytes | None) -> Path:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            line, _ = listener.accept()
            with line:
                line.recv(1 << 16)
                if answer is not None:
                    line.sendall(answer)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return path

    yield start
    listener.close()
    for thread in threads:
        thread.join(10)


def test_a_daemon_that_hangs_up(crooked: Callable[[bytes | None], Path]) -> None:
    with Client(crooked(None)) as client, pytest.raises(Unreachable, match="lost contact"):
        client.request(GetStatus())


def test_half_an_answer(crooked: Callable[[bytes | None], Path]) -> None:
    half = struct.pack("<I", 100) + b"x" * 50
    with Client(crooked(half)) as client, pytest.raises(Unreachable, match="hung up"):
        client.request(GetStatus())


def test_an_ask_that_is_too_long_is_refused_with_the_reason(path: Path) -> None:
    """The daemon does not read it to its end, and says so before it hangs up."""
    ready, done = threading.Event(), threading.Event()

    async def nobody(_uid: int, _ask: Message) -> Message | None:
        raise AssertionError

    async def serve() -> None:
        listening = await local_socket.serve_on(local_socket.listen(path), path, nobody)
        ready.set()
        await asyncio.to_thread(done.wait)
        listening.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    with (
        Client(path) as client,
        pytest.raises(Refused, match=r"the request has \d+ bytes, at most"),
    ):
        client.request(RunJob("gpt", 1, ["x" * (20 << 20)], {}, "/", 0, []))
    done.set()
    thread.join(10)


def test_an_absurd_length_is_not_waited_for(crooked: Callable[[bytes | None], Path]) -> None:
    with (
        Client(crooked(struct.pack("<I", 1 << 31))) as client,
        pytest.raises(LiveshiftError, match="a frame of 2147483648 bytes"),
    ):
        client.request(GetStatus())


def test_an_answer_to_another_ask(crooked: Callable[[bytes | None], Path]) -> None:
    raw = messages.encode_answer(99, None)
    answer = struct.pack("<I", len(raw)) + raw
    with (
        Client(crooked(answer)) as client,
        pytest.raises(LiveshiftError, match="answered request 99 instead of 1"),
    ):
        client.request(GetStatus())


def test_it_connects_again_after_a_restart(path: Path) -> None:
    double = Orchestrator(path)
    with double, Client(path) as client:
        client.request(GetStatus())
        double.stop()
        with pytest.raises(Unreachable):
            client.request(GetStatus())
        double.start()
        client.request(GetStatus())
        double.refuse[GetStatus] = Refused("not now", hint="later")
        with pytest.raises(Refused) as caught:
            client.request(GetStatus())
        assert caught.value.hint == "later"


# ---- which socket ----


@pytest.fixture
def labs(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Makes labs' sockets (files, nobody listens) and returns the environment that finds them."""

    def make(*names: str, **environment: str) -> dict[str, str]:
        root = tmp_path / "labs"
        for name in names:
            lab_socket(root, name).parent.mkdir(parents=True)
            lab_socket(root, name).touch()
        return {"LIVESHIFT_LAB_ROOT": str(root), **environment}

    return make


def test_options_come_before_variables(labs: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    environment = labs("a", "b", LIVESHIFT_SOCKET="/variable", LIVESHIFT_LAB="a")
    root = tmp_path / "labs"
    assert find_socket("/given", "b", environment, tmp_path) == Path("/given")
    assert find_socket(None, "b", environment, tmp_path) == lab_socket(root, "b")
    assert find_socket(None, None, environment, tmp_path) == Path("/variable")
    del environment["LIVESHIFT_SOCKET"]
    assert find_socket(None, None, environment, tmp_path) == lab_socket(root, "a")


def test_the_machines_own_daemon_comes_before_a_lab(
    labs: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    environment = labs("a")
    assert find_socket(None, None, environment, tmp_path) == lab_socket(tmp_path / "labs", "a")
    for name in ("agent.sock", "orchestrator.sock"):
        (tmp_path / name).touch()
        assert find_socket(None, None, environment, tmp_path) == tmp_path / name


def test_several_labs_are_named(labs: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    with pytest.raises(LiveshiftError, match="several labs run here: a, b") as caught:
        find_socket(None, None, labs("a", "b"), tmp_path)
    assert "--lab a" in (caught.value.hint or "")


def test_a_lab_that_was_killed_does_not_count(
    labs: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    environment = labs("a", "b")
    alive = lab_socket(tmp_path / "labs", "b")
    alive.unlink()
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(str(alive))
        listener.listen()
        assert find_socket(None, None, environment, tmp_path) == alive


def test_no_cluster_at_all_says_how_to_get_one(
    labs: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    with pytest.raises(Unreachable, match="no cluster here") as caught:
        find_socket(None, None, labs(), tmp_path)
    assert "liveshift lab up --hosts 3" in (caught.value.hint or "")


def test_an_unknown_lab_names_those_that_run(
    labs: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    with pytest.raises(Unreachable, match='no lab "c" runs here') as caught:
        find_socket(None, "c", labs("a", "b"), tmp_path)
    assert caught.value.hint == "these run: a, b"
