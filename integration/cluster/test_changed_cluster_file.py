# SPDX-License-Identifier: Apache-2.0
"""A changed cluster file under a running job: every daemon takes it up, the job notices nothing."""

from __future__ import annotations

from contextlib import suppress

import pytest
from lab_session import CHAIN, LabSession, NewLab, eventually

from liveshift.errors import Unreachable
from liveshift.runtime.config.cluster import load
from liveshift.runtime.messages import HostRow

pytestmark = pytest.mark.lab

NEW = '\n[hosts.h9]\naddress = "{}"\n'


def daemons(session: LabSession) -> dict[str, tuple[int, bool]]:
    """By machine, its daemon's pid and whether it runs."""
    found = {m.name: m.daemon for m in session.lab.machines}
    return {name: (d.pid, d.alive) for name, d in found.items() if d is not None}


def rows(session: LabSession) -> list[HostRow]:
    """The hosts as the orchestrator sees them; none while it starts again."""
    with suppress(Unreachable):
        return session.status().hosts
    return []


def test_a_host_is_added_and_one_in_use_is_not_taken_away(new_lab: NewLab) -> None:
    session = new_lab("--hosts", "2")
    job = session.start("chain", CHAIN)
    job.wait_step(5)
    before, text = daemons(session), session.lab.config.read_text()
    assert len(before) == 3
    reports = {host: session._reports(host) for host in ("h0", "h1")}

    address = load(session.lab.config).host("h1").address
    new = NEW.format(address.rpartition(".")[0] + ".99")
    session.lab.config.write_text(text + new)
    eventually(lambda: [r for r in rows(session) if r.name == "h9"], "h9 to be known", 20)
    for host in ("h0", "h1"):
        again = lambda h=host: session._reports(h) > reports[h]  # noqa: E731
        eventually(again, f"{host} to start again", 20)
    eventually(lambda: [r.state for r in rows(session)] == ["up", "up", "lost"], "hosts up", 20)
    assert [row.other_file for row in rows(session)] == [False] * 3
    assert daemons(session) == before, "the same processes, by exec"

    # The job went on, and can move by what the new daemons know.
    seen = job.seen(0)
    job.go_on(5)
    job.assert_moved(seen, job.migrate(0))

    # A file without the host that the job is on now is not used.
    away = job.capsule(0).host
    log = session.lab.log("ctl")
    cut = text.index(f"[hosts.{away}]")
    rest = text[cut:].find("\n[", 1)
    session.lab.config.write_text(text[:cut] + text[cut:][rest + 1 :] + new)
    assert [h.name for h in load(session.lab.config).hosts if h.name == away] == []
    eventually(
        lambda: f"chain/0 runs on {away}" in log.read_text(), "the orchestrator to object", 20
    )
    assert f"drain {away} before you remove it" in log.read_text()
    job.go_on(5)
    assert job.capsule(0).host == away
    job.stop()
    assert job.wait_end() == 0
    job.assert_trained_across()
