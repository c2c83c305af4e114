# SPDX-License-Identifier: Apache-2.0
"""sd_notify over a real socket, and the units that wait for it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from checkout import ROOT
from systemd_verify import complaints

from liveshift.runtime.daemon import notify

UNITS = ROOT / "launcher" / "systemd"


def test_nothing_is_sent_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify.ready()


@pytest.mark.parametrize("abstract", [False, True])
def test_ready_and_stopping_arrive(
    abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(2)
        systemd.bind("\0" + name if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name if abstract else name)
        assert notify.ready()
        assert systemd.recv(100) == b"READY=1"
        assert notify.stopping()
        assert systemd.recv(100) == b"STOPPING=1"


def test_a_socket_nobody_reads_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        notify.ready()
    monkeypatch.setenv("NOTIFY_SOCKET", "tcp://x")
    with pytest.raises(OSError, match="expected a path or an abstract name"):
        notify.ready()


@pytest.mark.needs("systemd-analyze")
def test_units_are_accepted_by_systemd(tmp_path: Path) -> None:
    units = sorted(UNITS.glob("*.service"))
    assert len(units) == 2
    assert complaints(units, tmp_path) == []
