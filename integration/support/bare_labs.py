# SPDX-License-Identifier: Apache-2.0
"""Labs of hosts without daemons, each for a test or a file of tests, and what hosts of them see."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_place import lab_name

from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab, making, wiring


def without_daemons(name: str, hosts: int = 3, **options: list[str]) -> Lab:
    with making.fresh(name, hosts, **options) as lab:  # type: ignore[arg-type]
        wiring.make_switch(lab)
        for machine in lab.machines:
            making.boot(lab, machine)
        lab.state = "up"
        lab.save()
    return lab


def output(lab: Lab, host: str, *argv: str) -> str:
    command = [*labs.entry(lab.machine(host)), *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


REACH = """
import socket, time
until = time.monotonic() + {seconds}
while (left := until - time.monotonic()) > 0:
    try:
        socket.create_connection(({address!r}, 9), left)
    except ConnectionRefusedError:
        print("answered")
        break
    except TimeoutError:
        break
    except OSError:
        time.sleep(0.05)
"""
"""A host that has not answered ARP for three seconds is unreachable for every connection begun in
them, though it may be back; the kernel asks again for the next one."""


def reaches(lab: Lab, source: str, destination: str, seconds: float = 2.0) -> bool:
    """Does a TCP connection get through (a refusal is an answer too)?"""
    address = lab.machine(destination).address
    code = REACH.format(address=address, seconds=seconds)
    return output(lab, source, sys.executable, "-c", code).strip() == "answered"


def fresh_name() -> str:
    return lab_name()


@pytest.fixture(scope="module", autouse=True)
def lab_root() -> Iterator[Path]:
    """Right below /tmp: sockets' paths may not be long, and pytest's own directories can be."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="liveshift-labs-", dir="/tmp") as path,
    ):
        os.chmod(path, 0o755)
        patch.setenv("LIVESHIFT_LAB_ROOT", path)
        yield Path(path)


@pytest.fixture
def name() -> Iterator[str]:
    """A name for a lab that the test makes itself; the lab goes in any case."""
    name = fresh_name()
    yield name
    labs.down(name)
    assert labs.leftovers(name) == []
