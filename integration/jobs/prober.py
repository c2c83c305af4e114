# SPDX-License-Identifier: Apache-2.0
"""Tries, from inside a capsule, whatever it is asked to, and says how each ended.

``OUT/<index>-ask-<n>.json`` holds a list of probes, each a list of a word and its arguments;
``OUT/<index>-said-<n>.json`` the list of what came of them. It ends with ``OUT/enough``. Its own
UDP port and two listening sockets, one of them abstract, are there to be tried by others.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PORT = 5000
ABSTRACT = "\0liveshift-prober"


def tcp(address: str, port: int) -> str:
    with socket.socket() as line:
        line.settimeout(5)
        return outcome(line.connect_ex((address, port)))


def udp(address: str, port: int) -> str:
    """Whether a datagram comes back as an ICMP error, or not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.settimeout(1)
        line.connect((address, port))
        line.send(b"x")
        try:
            line.recv(1)
        except TimeoutError:
            return "no complaint"
        except OSError as error:
            return outcome(error.errno or 0)
        return "answered"


def unix(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as line:
        return outcome(line.connect_ex(name))


def listing(path: str) -> list[str]:
    return sorted(os.listdir(path))


def read(path: str) -> str:
    return Path(path).read_text(errors="replace")


def write(path: str) -> str:
    Path(path).write_text("x")
    return "written"


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return f"{done.returncode} {done.stdout}{done.stderr}"


def say(address: str, words: str, source: str) -> str:
    """A datagram to another capsule's port, with any source: raw sockets are root's."""
    if not source:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.sendto(words.encode(), (address, PORT))
        return "sent"
    payload = words.encode()
    header = bytearray(28)
    header[0], header[8], header[9] = 0x45, 64, socket.IPPROTO_UDP
    header[12:16], header[16:20] = socket.inet_aton(source), socket.inet_aton(address)
    header[20:22] = header[22:24] = PORT.to_bytes(2, "big")
    header[24:26] = (8 + len(payload)).to_bytes(2, "big")
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as line:
        line.sendto(bytes(header) + payload, (address, 0))
    return "sent"


def rights() -> list[str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("Cap", "Uid"))]


def outcome(number: int) -> str:
    return errno.errorcode.get(number, str(number)) if number else "connected"


class Heard:
    """Datagrams that came in: who from, and what they said."""

    def __init__(self) -> None:
        self._port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._port.bind(("0.0.0.0", PORT))
        self._port.settimeout(10)

    def until(self, last: str) -> list[list[str]]:
        found: list[list[str]] = []
        while not found or found[-1][1] != last:
            words, (source, _) = self._port.recvfrom(100)
            found.append([source, words.decode()])
        return found


def listeners() -> None:
    kept = [socket.create_server(("0.0.0.0", PORT)), socket.socket(socket.AF_UNIX)]
    kept[1].bind(ABSTRACT)
    kept[1].listen()
    for server in kept:
        threading.Thread(target=accept, args=(server,), daemon=True).start()


def accept(server: socket.socket) -> None:
    while True:
        server.accept()[0].close()


def tried(probes: dict[str, Callable[..., Any]], ask: list[str]) -> Any:
    try:
        return probes[ask[0]](*ask[1:])
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    index = os.environ["LIVESHIFT_CAPSULE"].rpartition("/")[2]
    listeners()
    heard = Heard()
    probes: dict[str, Callable[..., Any]] = {
        "tcp": tcp,
        "udp": udp,
        "unix": unix,
        "list": listing,
        "read": read,
        "write": write,
        "run": run,
        "say": say,
        "heard": heard.until,
        "rights": rights,
    }
    number = 0
    while not (out / "enough").exists():
        ask = out / f"{index}-ask-{number}.json"
        if ask.exists():
            said = [tried(probes, words) for words in json.loads(ask.read_text())]
            half = out / f"{index}-half"
            half.write_text(json.dumps(said))
            half.rename(out / f"{index}-said-{number}.json")
            number += 1
        time.sleep(0.02)


if __name__ == "__main__":
    main()
