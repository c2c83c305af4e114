# SPDX-License-Identifier: Apache-2.0
"""Image bytes over real ZeroMQ with CURVE on loopback: intact, credited, resumed, refused.

Between sender and receiver stands, where a test needs it, either a TCP proxy that breaks
connections or a middle man who holds both keys and so can lose, repeat, swap and damage chunks.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import xxhash
import zmq

from liveshift.errors import StepFailed
from liveshift.runtime import keys, manifest, wire
from liveshift.runtime.wire import WINDOW, Receiver, Sender

CHUNKS = 300
LIMIT = 1 << 30


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    keys.init(directory, ["h0", "h1", "h2"])
    return directory


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SEND_AGAIN_S", 0.2)


@pytest.fixture
def impatient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "GIVE_UP_S", 1.0)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Inbox:
    """What has come, by stream; may be told to fail or to wait."""

    def __init__(self) -> None:
        self.streams: dict[str, bytearray] = {}
        self.ended: list[str] = []
        self.writes = 0
        self.fails: OSError | None = None
        self.open = threading.Event()
        self.open.set()
        self.complete = False

    def write(self, stream: str, data: memoryview) -> None:
        self.writes += 1
        self.open.wait(20)
        if self.fails:
            raise self.fails
        self.streams.setdefault(stream, bytearray()).extend(data)
        if not data:
            self.ended.append(stream)


def receiver(key_directory: Path) -> tuple[Receiver, str]:
    made = Receiver(f"127.0.0.1:{free_port()}", key_directory, "h1")
    made.start()
    return made, f"tcp://{made.address}"


@pytest.fixture
def senders() -> Iterator[Callable[..., Sender]]:
    made: list[Sender] = []

    def make(*args: object, **named: object) -> Sender:
        made.append(Sender(*args, **named))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for sender in made:
        sender.close()


def traffic(seed: int, count: int = CHUNKS, largest: int = 4096) -> list[tuple[str, bytes]]:
    """Chunks of three interleaved streams, each ended by an empty one."""
    rng = random.Random(seed)
    names = ["image:pages-1.img", "tree:2:tmp", "output"]
    chunks = [(rng.choice(names), rng.randbytes(rng.randint(1, largest))) for _ in range(count)]
    return [*chunks, *((name, b"") for name in names)]


def expected(chunks: list[tuple[str, bytes]]) -> dict[str, bytes]:
    joined: dict[str, bytes] = {}
    for stream, data in chunks:
        joined[stream] = joined.get(stream, b"") + data
    return joined


def send_all(sender: Sender, chunks: list[tuple[str, bytes]]) -> None:
    for stream, data in chunks:
        sender.send(stream, data)
    sender.finish()


# ---- the plain way -----------------------------------------------------------------------------


def test_bulk_bytes_arrive_intact(key_directory: Path, senders: Callable[..., Sender]) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    rng = random.Random(1)
    block = rng.randbytes(1 << 20)
    sent = hashlib.sha256()
    for n in range(64):
        data = block[n * 1000 :] + block[: n * 1000]
        sent.update(data)
        sender.send("image:pages-1.img", data)
    sender.send("image:pages-1.img", b"")
    sender.finish()
    got = bytes(inbox.streams["image:pages-1.img"])
    assert hashlib.sha256(got).digest() == sent.digest()
    assert inbox.ended == ["image:pages-1.img"]
    assert sender.bytes == here.received("m1") == 64 << 20
    assert sender.streams == {"image:pages-1.img": 64 << 20}


def test_two_migrations_at_once_do_not_mix(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    inboxes = {"m1": Inbox(), "m2": Inbox()}
    here.expect("m1", "h0", inboxes["m1"], LIMIT)
    here.expect("m2", "h2", inboxes["m2"], LIMIT)
    jobs = {"m1": ("h0", traffic(1)), "m2": ("h2", traffic(2))}
    threads = [
        threading.Thread(
            target=send_all, args=(senders(name, endpoint, key_directory, host, "h1"), chunks)
        )
        for name, (host, chunks) in jobs.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for name, (_, chunks) in jobs.items():
        assert inboxes[name].streams == expected(chunks)


def test_no_more_than_the_credit_is_in_flight(
    key_directory: Path, senders: Callable[..., Sender], quick: None
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    inbox.open.clear()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    chunks = [("output", bytes([n % 251]) * 1000) for n in range(2 * WINDOW)]
    thread = threading.Thread(target=send_all, args=(sender, chunks))
    thread.start()
    time.sleep(0.8)  # four times SEND_AGAIN_S: what waits at the receiver is sent again meanwhile
    assert sender.bytes <= WINDOW * 1000
    inbox.open.set()
    thread.join(20)
    assert not thread.is_alive()
    assert inbox.streams == expected(chunks)
    assert inbox.writes == len(chunks)  # what came twice was written once


# ---- who may send ------------------------------------------------------------------------------


def test_an_unknown_key_is_turned_away(
    key_directory: Path,
    tmp_path: Path,
    senders: Callable[..., Sender],
    impatient: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = tmp_path / "stranger"
    keys.init(stranger, ["h0", "h1"])
    shutil.copy(keys.public_path(key_directory, "h1"), keys.public_path(stranger, "h1"))
    shutil.rmtree(stranger / "hosts" / "h1.key", ignore_errors=True)
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders("m1", endpoint, stranger, "h0", "h1")
    with pytest.raises(StepFailed, match="h1 has taken no image bytes for 1 s"):
        send_all(sender, traffic(3, 3))
    assert not inbox.streams
    assert "turned away a peer with an unknown key" in caplog.text


@pytest.mark.parametrize(
    ("migration", "host"), [("m1", "h2"), ("m9", "h0")], ids=["another host", "not announced"]
)
def test_only_the_announced_source_may_send(
    key_directory: Path,
    senders: Callable[..., Sender],
    impatient: None,
    caplog: pytest.LogCaptureFixture,
    migration: str,
    host: str,
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders(migration, endpoint, key_directory, host, "h1")
    words = f"{host} sent an image for {migration}, which is not expected"
    with pytest.raises(StepFailed, match=f"h1 refused the image: {words}"):
        send_all(sender, traffic(4, 3))
    assert not inbox.streams
    assert words in caplog.text


def test_a_destination_that_refuses_ends_the_move_and_no_other(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    full, fine = Inbox(), Inbox()
    full.fails = OSError(28, "No space left on device")
    here.expect("m1", "h0", full, LIMIT)
    here.expect("m2", "h0", fine, LIMIT)
    with pytest.raises(StepFailed, match=r"ship: h1 refused the image: .*No space left on device"):
        send_all(senders("m1", endpoint, key_directory, "h0", "h1"), traffic(5))
    chunks = traffic(6)
    send_all(senders("m2", endpoint, key_directory, "h0", "h1"), chunks)
    assert fine.streams == expected(chunks)


def test_an_image_that_is_finished_is_refused_at_once(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    send_all(sender, traffic(4, 3))
    here.forget("m1")
    writes = inbox.writes
    with pytest.raises(StepFailed, match="m1, which is not expected"):
        send_all(sender, traffic(4, 3))
    assert inbox.writes == writes


def test_a_key_that_was_taken_away_sends_no_more(
    key_directory: Path, senders: Callable[..., Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    send_all(sender, traffic(4, 3))
    writes = inbox.writes
    monkeypatch.setattr(wire.Known, "owner", lambda known, frame: wire.NOBODY)
    with pytest.raises(StepFailed, match="a key that is not known here any more"):
        send_all(sender, traffic(4, 3))
    assert inbox.writes == writes


def test_more_than_was_announced_is_refused_before_it_is_written(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, 10_000)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    for _ in range(10):
        sender.send("output", bytes(1000))
    sender.finish()
    sender.send("output", b"x")
    with pytest.raises(StepFailed, match="than the 10000 bytes that were announced for m1"):
        sender.finish()
    assert len(inbox.streams["output"]) == here.received("m1") == 10_000
    with pytest.raises(StepFailed, match="announced"):  # and so it stays
        send_all(sender, [("output", b"")])


def test_large_data_goes_in_chunks_that_are_taken(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    data = random.Random(2).randbytes(2 * wire.CHUNK + 1)
    send_all(senders("m1", endpoint, key_directory, "h0", "h1"), [("output", data)])
    assert inbox.writes == 3
    assert inbox.streams["output"] == data


def test_the_sender_knows_what_it_has_sent(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    chunks = traffic(12, 50)
    send_all(sender, chunks)
    every = {s: (len(d), xxhash.xxh3_64_intdigest(d)) for s, d in expected(chunks).items()}
    assert sender.manifest_streams() == every
    sender.send("image:late.img", b"no end mark")
    found = sender.send_manifest("gpt/1", 77, {123: 20}, {"tmp": ["b", "a\udcff"]})
    sender.finish()
    assert set(found.streams) == {*every, "image:late.img"}
    assert inbox.ended[-2:] == ["image:late.img", "manifest"]
    assert manifest.decode(inbox.streams["manifest"]) == found
    assert found.gone() == {"tmp": ["a\udcff", "b"]}


def test_a_sender_whose_last_answer_was_lost_is_told_after_a_restart(
    key_directory: Path, senders: Callable[..., Sender], quick: None
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    inbox.complete = True
    here.expect("m1", "h0", inbox, 0)
    sender = senders("m1", endpoint, key_directory, "h0", "h1")
    send_all(sender, traffic(4, 3))  # as its last ones look to a receiver that has just begun
    assert inbox.writes == 0


def raw_socket(key_directory: Path, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    own = keys.load_private(key_directory, "h0")
    raw = context.socket(zmq.DEALER)
    raw.curve_serverkey = keys.public_keys(key_directory)["h1"]
    raw.curve_secretkey, raw.curve_publickey = own.secret, own.public
    raw.linger = 0
    return raw


NONSENSE = [
    [b"one frame"],
    [b"", b"bytes"],
    [b"\xc1", b"bytes"],
    [msgpack.packb(7), b"bytes"],
    [msgpack.packb(("m1", 0)), b"bytes"],
    [msgpack.packb(("m1", "0", "output", 0)), b"bytes"],
    [msgpack.packb(("m1", -1, "output", 0)), b"bytes"],
    [msgpack.packb(("m1", 0, "", 0)), b"bytes"],
    [msgpack.packb(("m1", 0, "x" * 9000, 0)), b"bytes"],
    [b"\x91" * 8000, b"bytes"],
    [msgpack.packb(("m1", 0, "output", 0)), b"bytes", b"more"],
]


def test_what_no_sender_would_say_is_refused_and_does_not_stop_the_receiver(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    with zmq.Context() as context, raw_socket(key_directory, context) as raw:
        raw.connect(endpoint)
        for frames in NONSENSE:
            raw.send_multipart(frames)
            assert raw.poll(10_000), f"no answer to {frames}"
            assert wire.read_answer(raw.recv())[0] == "refused"
    assert not inbox.streams
    chunks = traffic(7, 20)
    send_all(senders("m1", endpoint, key_directory, "h0", "h1"), chunks)
    assert inbox.streams == expected(chunks)


def test_a_chunk_that_is_too_large_costs_its_sender_the_connection(
    key_directory: Path, senders: Callable[..., Sender]
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    with zmq.Context() as context, raw_socket(key_directory, context) as raw:
        events = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.connect(endpoint)
        data = bytes(wire.CHUNK + wire.OVERHEAD + 1)
        digest = xxhash.xxh3_64_intdigest(data)
        raw.send_multipart([msgpack.packb(("m1", 0, "output", digest)), data])
        assert events.poll(10_000), "it was taken"
        raw.disable_monitor()
        events.close()
    assert not inbox.streams
    chunks = traffic(7, 20)
    send_all(senders("m1", endpoint, key_directory, "h0", "h1"), chunks)
    assert inbox.streams == expected(chunks)


@pytest.mark.parametrize(
    "answer", [b"", b"\xc1", b"\x91" * 5000, *map(msgpack.packb, (7, ("ack",), ("ack", None)))]
)
def test_an_answer_that_no_destination_gives_ends_the_move(
    key_directory: Path, senders: Callable[..., Sender], answer: bytes
) -> None:
    theirs = keys.load_private(key_directory, "h1")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as there:
        there.curve_server = True
        there.curve_secretkey, there.curve_publickey = theirs.secret, theirs.public
        there.linger = 0
        port = there.bind_to_random_port("tcp://127.0.0.1")
        sender = senders("m1", f"tcp://127.0.0.1:{port}", key_directory, "h0", "h1")
        sender.send("output", b"x")
        who, *_ = there.recv_multipart()
        there.send_multipart([who, answer])
        with pytest.raises(StepFailed, match="ship: h1 sent an answer that is not understood"):
            sender.finish()


# ---- when the way between them is bad ----------------------------------------------------------


class Proxy:
    """Forwards TCP connections to the receiver; :meth:`cut` breaks those there are."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.passed = 0
        self.connections = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self.connections += 1
            self._pairs.append((near, far))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(65536):
                b.sendall(data)
                self.passed += len(data)
        except OSError:
            pass

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for one in pair:
                one.shutdown(socket.SHUT_RDWR)
                one.close()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()


def test_a_broken_connection_is_resumed_without_loss(
    key_directory: Path, senders: Callable[..., Sender], quick: None
) -> None:
    here, _ = receiver(key_directory)
    proxy = Proxy(int(here.address.rpartition(":")[2]))
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders("m1", proxy.endpoint, key_directory, "h0", "h1")
    chunks = traffic(8, 400, largest=60_000)
    for n, (stream, data) in enumerate(chunks):
        if n in (50, 51, 200, 390):
            proxy.cut()
        sender.send(stream, data)
    proxy.cut()
    sender.finish()
    assert proxy.connections >= 4
    assert inbox.streams == expected(chunks)
    assert inbox.writes == len(chunks)
    proxy.close()


def test_a_destination_that_has_gone_is_given_up(
    key_directory: Path, senders: Callable[..., Sender], impatient: None
) -> None:
    """In good time, although nobody takes what is sent again and again."""
    here, _ = receiver(key_directory)
    proxy = Proxy(int(here.address.rpartition(":")[2]))
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    sender = senders("m1", proxy.endpoint, key_directory, "h0", "h1")
    send_all(sender, traffic(9, 10))
    proxy.close()
    failed: list[BaseException] = []

    def send() -> None:
        try:
            send_all(sender, traffic(10, 10 * WINDOW))
        except StepFailed as error:
            failed.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the sender waits for ever"
    assert "h1 has taken no image bytes for 1 s" in str(failed[0])


Fate = Callable[[int, random.Random], str]


class MiddleMan(threading.Thread):
    """Speaks CURVE to both sides; ``fate`` says what becomes of the n-th chunk that passes."""

    def __init__(self, key_directory: Path, target: str, fate: Fate) -> None:
        super().__init__(daemon=True)
        self._fate = fate
        self.seen = self.mishaps = 0
        self._over = threading.Event()
        self._context = zmq.Context()
        theirs, ours = (keys.load_private(key_directory, host) for host in ("h1", "h0"))
        self._front = self._context.socket(zmq.ROUTER)
        self._front.curve_server = True
        self._front.curve_secretkey, self._front.curve_publickey = theirs.secret, theirs.public
        self.endpoint = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._back = self._context.socket(zmq.DEALER)
        self._back.curve_serverkey = theirs.public
        self._back.curve_secretkey, self._back.curve_publickey = ours.secret, ours.public
        self._back.connect(target)
        self.start()

    def run(self) -> None:
        rng, kept, who = random.Random(7), None, b""
        while not self._over.is_set():
            if self._back.poll(5):
                answer = self._back.recv()
                if self._fate(-1, rng) == "pass":
                    self._front.send_multipart([who, answer])
                else:
                    self.mishaps += 1
            while self._front.poll(0):
                who, header, data = self._front.recv_multipart()
                fate = self._fate(self.seen, rng)
                self.seen += 1
                self.mishaps += fate != "pass"
                if fate == "lose":
                    continue
                if fate == "swap" and kept is None:
                    kept = [header, data]
                    continue
                if fate == "damage":
                    data = bytes([data[0] ^ 4]) + data[1:] if data else b"x"
                self._back.send_multipart([header, data])
                if fate == "repeat":
                    self._back.send_multipart([header, data])
                if kept is not None:
                    self._back.send_multipart(kept)
                    kept = None
        for end in (self._front, self._back):
            end.close(0)
        self._context.term()

    def close(self) -> None:
        self._over.set()
        self.join()


def sometimes(what: str, chance: float = 0.01) -> Fate:
    return lambda n, rng: what if n >= 0 and rng.random() < chance else "pass"


@pytest.mark.parametrize(
    "fate",
    [
        pytest.param(sometimes("lose"), id="lost"),
        pytest.param(sometimes("repeat", 0.2), id="repeated"),
        pytest.param(sometimes("swap"), id="swapped"),
        pytest.param(sometimes("damage"), id="damaged"),
        pytest.param(lambda n, _: "lose" if n in (0, 1) else "pass", id="the first ones lost"),
        pytest.param(
            lambda n, rng: "answer lost" if n < 0 and rng.random() < 0.3 else "pass",
            id="answers lost",
        ),
    ],
)
def test_a_bad_way_is_mended_and_not_flooded(
    key_directory: Path, senders: Callable[..., Sender], quick: None, fate: Fate
) -> None:
    here, endpoint = receiver(key_directory)
    inbox = Inbox()
    here.expect("m1", "h0", inbox, LIMIT)
    middle = MiddleMan(key_directory, endpoint, fate)
    sender = senders("m1", middle.endpoint, key_directory, "h0", "h1")
    chunks = traffic(11)
    send_all(sender, chunks)
    middle.close()
    assert inbox.streams == expected(chunks)
    assert inbox.writes == len(chunks)
    # One window again for a mishap, not one for each chunk that was on its way behind it.
    assert middle.mishaps
    assert middle.seen < len(chunks) + (middle.mishaps + 2) * WINDOW
