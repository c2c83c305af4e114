# SPDX-License-Identifier: Apache-2.0
"""Every command that ``liveshift host`` and ``install-units`` print or give to systemd, executed.

Each machine here is a mount and a network namespace with addresses and an /etc of its own. ``ssh``
and ``scp`` are scripts that reach these machines by address, ``systemctl`` is one that writes down
its words; all else is as on a real machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from systemd_verify import complaints

pytestmark = pytest.mark.root

ORCHESTRATOR, H0, H1, H2 = "10.88.0.2", "10.88.0.10", "10.88.0.11", "10.88.0.12"

CONFIG = "/etc/liveshift/cluster.toml"

TEXT = f"""\
[cluster]
name = "prod"
orchestrator = "{ORCHESTRATOR}:7400"
overlay = "10.99.0.0/16"
"""

ENTER = """\
#!/bin/sh -e
# enter ADDRESS COMMAND…: run a command on the machine that has the address.
test -d "$MACHINES/$1" || { echo "no route to $1" >&2; exit 255; }
machine=$(readlink -f "$MACHINES/$1"); shift
export HERE="$machine"
exec unshare -mn sh -ec '
    mount --bind "$HERE/etc" /etc
    ip link set lo up
    while read -r address; do ip address add "$address/32" dev lo; done < "$HERE/addresses"
    cd /
    exec "$@"' sh "$@"
"""

SSH = """\
#!/bin/sh -e
to="${1#root@}"; shift
test "$to" != "$1" || { echo "not as root: $to" >&2; exit 255; }
test "$(readlink -f "$MACHINES/$to")" != "$HERE" || { echo "$to is this machine" >&2; exit 255; }
exec enter "$to" sh -c "$*"
"""

SCP = """\
#!/bin/sh -e
# scp OPTION FROM root@ADDRESS:TO, where TO lies below /etc.
to="${3#root@}"; address="${to%%:*}"; path="${to#*:}"
case "$path" in /etc/*) ;; *) echo "odd path: $path" >&2; exit 1;; esac
test "$(readlink -f "$MACHINES/$address")" != "$HERE" || { echo "this machine" >&2; exit 255; }
exec cp "$1" "$2" "$MACHINES/$address$path"
"""

SYSTEMCTL = """\
#!/bin/sh
echo "$*" >> /etc/systemctl.log
if test -e /etc/systemctl.fails; then cat /etc/systemctl.fails >&2; exit 1; fi
"""

LOOK = f"""\
import json
from pathlib import Path
from liveshift.launcher.checks.cluster import own_keys, this_host
from liveshift.runtime.config.cluster import load
cluster = load(Path("{CONFIG}"))
here = this_host(cluster)
(keys,) = own_keys(cluster)
print(json.dumps([here and here.name, [h.name for h in cluster.hosts], keys.verdict, keys.found]))
"""


@dataclass(frozen=True)
class Machine:
    """``command`` runs something on it; ``etc`` is its own."""

    etc: Path
    run: Callable[..., subprocess.CompletedProcess[str]]

    def liveshift(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "liveshift.launcher", *words)

    @property
    def systemctl(self) -> list[str]:
        log = self.etc / "systemctl.log"
        return log.read_text().splitlines() if log.exists() else []

    def unit(self, daemon: str) -> str:
        return (self.etc / f"systemd/system/liveshift-{daemon}.service").read_text()


MakeMachine = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path) -> MakeMachine:
    """Makes a machine with these addresses; all of them reach each other."""
    programs, machines = tmp_path / "bin", tmp_path / "machines"
    programs.mkdir()
    machines.mkdir()
    scripts = {"enter": ENTER, "ssh": SSH, "scp": SCP, "systemctl": SYSTEMCTL}
    for name, text in scripts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("LIVESHIFT_")},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "MACHINES": str(machines),
    }

    def make(*addresses: str) -> Machine:
        place = machines / addresses[0]
        place.mkdir()
        shutil.copytree("/etc", place / "etc", symlinks=True)
        shutil.rmtree(place / "etc/liveshift", ignore_errors=True)
        (place / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
        (place / "addresses").write_text("".join(f"{address}\n" for address in addresses))
        for further in addresses[1:]:
            (machines / further).symlink_to(place.name)

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [programs / "enter", addresses[0], *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                stdin=subprocess.DEVNULL,
            )

        return Machine(place / "etc", run)

    return make


def begin(on: Machine, paths: str = "") -> None:
    """What a person does before the first ``host add``."""
    done = on.run(
        "sh", "-c", f"mkdir -p /etc/liveshift && cat > {CONFIG} <<'EOF'\n{TEXT}{paths}EOF"
    )
    assert done.returncode == 0, done


def carry_out(on: Machine, *words: str) -> list[str]:
    """Run ``liveshift host …``, then each line that it prints, in a shell; returns the lines."""
    done = on.liveshift("host", *words)
    assert done.returncode == 0, done
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    for line in lines:
        did = on.run("sh", "-c", line)
        assert did.returncode == 0, f"{line}\n{did.stdout}{did.stderr}"
    return lines


def looked_at(on: Machine) -> list[object]:
    """The host it is, the hosts of its file, what the doctor says of its keys."""
    done = on.run(sys.executable, "-c", LOOK)
    assert done.returncode == 0, done
    found: list[object] = json.loads(done.stdout)
    return found


def test_every_printed_command_works_where_it_is_said_to(machine: MakeMachine) -> None:
    first, h1, h2 = machine(ORCHESTRATOR, H0), machine(H1), machine(H2)
    begin(first)
    program = f"{sys.executable} -m liveshift.launcher.cli"
    # The orchestrator's own machine is a host: nothing is copied, to it or from it.
    lines = carry_out(first, "add", "h0", H0)
    own = f"{program} install-units agent --host h0 --config {CONFIG} --start"
    assert lines == [f"{program} doctor --config {CONFIG}", own]
    assert looked_at(first) == ["h0", ["h0"], "ok", "of h0 and orchestrator, and public ones"]
    for machine_, name, address in ((h1, "h1", H1), (h2, "h2", H2)):
        lines = carry_out(first, "add", name, address)
        assert not [line for line in lines if H0 in line or ORCHESTRATOR in line]
        secrets = sorted(p.name for p in (machine_.etc / "liveshift/keys/hosts").iterdir())
        assert secrets == [f"{name}.key"]
    hosts = ["h0", "h1", "h2"]
    for machine_, name in ((h1, "h1"), (h2, "h2")):
        assert looked_at(machine_) == [name, hosts, "ok", f"of {name}, and public ones"]
        assert f"--host {name}\n" in machine_.unit("agent")
        assert not (machine_.etc / "systemd/system/liveshift-orchestrator.service").exists()
    started = ["daemon-reload", "enable --now liveshift-agent.service"]
    assert [m.systemctl for m in (first, h1, h2)] == [started] * 3

    done = first.liveshift("install-units", "orchestrator", "--start")
    assert done.returncode == 0, done
    assert first.systemctl[2:] == ["daemon-reload", "enable --now liveshift-orchestrator.service"]

    # Away again: a far host, then the orchestrator's own machine.
    carry_out(first, "remove", "h2")
    assert h2.systemctl[2:] == ["disable --now liveshift-agent"]
    assert looked_at(h1)[1] == ["h0", "h1"]
    lines = carry_out(first, "remove", "h0")
    assert lines[0] == "systemctl disable --now liveshift-agent"
    assert first.systemctl[4:] == ["disable --now liveshift-agent"]
    assert looked_at(h1)[1] == ["h1"]


def test_the_program_that_is_printed_runs_where_pip_made_no_script(machine: MakeMachine) -> None:
    first = machine(ORCHESTRATOR, H0)
    begin(first)
    (line, _) = carry_out(first, "add", "h0", H0)
    program = line.split(" doctor ")[0]
    done = first.run("sh", "-c", f"{program} version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "liveshift"), done


class TestStart:
    def test_what_systemctl_says_is_told(self, machine: MakeMachine) -> None:
        first = machine(ORCHESTRATOR, H0)
        begin(first)
        carry_out(first, "add", "h0", H0)
        (first.etc / "systemctl.fails").write_text("Failed to reload: no bus\n")
        done = first.liveshift("install-units", "agent", "--host", "h0", "--start")
        assert done.returncode == 1
        assert "systemctl daemon-reload failed: Failed to reload: no bus" in done.stderr
        assert "journalctl -u liveshift-agent" in done.stderr
        assert first.systemctl[2:] == ["daemon-reload"], "it tries nothing more"

    def test_where_there_is_no_systemctl(self, machine: MakeMachine, tmp_path: Path) -> None:
        first = machine(ORCHESTRATOR, H0)
        begin(first)
        carry_out(first, "add", "h0", H0)
        (first.etc / "systemd/system/liveshift-agent.service").unlink()
        words = (sys.executable, "-m", "liveshift.launcher", "install-units", "agent", "--start")
        nothing = tmp_path / "nothing"
        nothing.mkdir()
        done = first.run("env", f"PATH={nothing}", *words, "--host", "h0")
        assert done.returncode == 1
        assert "there is no systemctl on this machine, so the units were written" in done.stderr
        assert "ExecStart=" in first.unit("agent")


class TestOtherPaths:
    PATHS = '[paths]\nstate = "/srv/live shift/state"\nrun = "/srv/run"\n'

    @pytest.mark.needs("systemd-analyze")
    def test_the_orchestrator_may_write_to_the_paths_of_the_file(
        self, machine: MakeMachine, tmp_path: Path
    ) -> None:
        first = machine(ORCHESTRATOR, H0)
        begin(first, self.PATHS)
        assert first.liveshift("host", "add", "h0", H0).returncode == 0
        assert first.liveshift("install-units", "orchestrator").returncode == 0
        lines = first.unit("orchestrator").splitlines()
        for path, mode in (("/srv/live shift/state", 700), ("/srv/run", 755)):
            assert f'ReadWritePaths="{path}"' in lines
            # systemd refuses to start where such a path does not exist.
            assert f'ExecStartPre=+/bin/mkdir -p -m {mode} "{path}"' in lines
        units = [first.etc / "systemd/system/liveshift-orchestrator.service"]
        assert complaints(units, tmp_path) == []

    def test_the_usual_paths_need_nothing(self, machine: MakeMachine) -> None:
        first = machine(ORCHESTRATOR, H0)
        begin(first)
        assert first.liveshift("host", "add", "h0", H0).returncode == 0
        assert first.liveshift("install-units", "orchestrator").returncode == 0
        text = first.unit("orchestrator")
        assert "StateDirectory=liveshift\n" in text
        assert "ReadWritePaths" not in text
        assert "install-units writes here" not in text
