# SPDX-License-Identifier: Apache-2.0
"""The lab, as far as it can be told without making one: plans, records, links, processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from liveshift.criu_glue.capsule.mounts import Mount
from liveshift.errors import LiveshiftError, NotFound, NotPermitted, Refused, WrongUsage
from liveshift.launcher import lab as labs
from liveshift.launcher.lab import (
    Lab,
    LabHost,
    Link,
    clearing,
    cuts,
    links,
    plan,
    record,
    tasks,
    wiring,
)
from liveshift.launcher.lab.tasks import Task
from liveshift.runtime.config import cluster as config
from liveshift.runtime.config.cluster import Compress, FastPathChoice


@pytest.fixture(autouse=True)
def lab_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("labs")
    monkeypatch.setenv("LIVESHIFT_LAB_ROOT", str(path))
    monkeypatch.delenv("LIVESHIFT_CRIU", raising=False)
    return path


def recorded(name: str = "a", hosts: int = 2) -> Lab:
    """A lab that is but its lab.json."""
    lab = Lab(
        name=name,
        directory=record.root() / name,
        hosts={h: host(name, h, plan.address(i)) for i, h in enumerate(plan.host_names(hosts))},
        control=host(name, "ctl", plan.CONTROL_ADDRESS),
        shared=["/tmp/work"],
        local=["/scratch"],
    )
    lab.directory.mkdir()
    lab.save()
    return lab


def host(lab: str, name: str, address: str) -> LabHost:
    return LabHost(name=name, address=address, netns=plan.netns(lab, name))


class TestNames:
    @pytest.mark.parametrize("name", ["a", "lab", "a-b", "12345678", "a-h0"])
    def test_a_name_that_can_be(self, name: str) -> None:
        assert plan.checked_name(name) == name

    @pytest.mark.parametrize(
        "name", ["", "123456789", "-a", "a-", "A", "a_b", "a/b", "..", "a b", "lab\n", "ä"]
    )
    def test_a_name_that_cannot_be(self, name: str) -> None:
        with pytest.raises(WrongUsage, match="cannot be the name of a lab"):
            plan.checked_name(name)
        for verb in (labs.find, labs.down, labs.leftovers, lambda n: labs.up(n, 3)):
            with pytest.raises(WrongUsage, match="cannot be the name of a lab"):
                verb(name)

    def test_a_network_namespace_belongs_to_one_lab(self) -> None:
        for name in ("a", "a-h0", "h0", "a-sw", "12345678"):
            for machine in ("h0", "h31", "ctl", "sw"):
                assert plan.lab_of_netns(plan.netns(name, machine)) == name

    @pytest.mark.parametrize("name", ["ls-a", "ls-a-h0-x", "xls-a-h0", "ls--h0", "ls-a-h100", "h0"])
    def test_a_network_namespace_of_no_lab(self, name: str) -> None:
        assert plan.lab_of_netns(name) is None

    @pytest.mark.parametrize("count", [0, -1, 33])
    def test_a_number_of_hosts_that_cannot_be(self, count: int) -> None:
        with pytest.raises(WrongUsage, match=f"a lab has 1 to 32 hosts, got {count}"):
            labs.up("a", count)

    def test_all_hosts_fit_the_network(self) -> None:
        addresses = [plan.address(index) for index in range(plan.MOST_HOSTS)]
        assert addresses[0] == "10.88.0.10"
        assert len({*addresses, plan.CONTROL_ADDRESS}) == plan.MOST_HOSTS + 1
        assert plan.hosts_file(2).splitlines() == [
            "127.0.0.1\tlocalhost",
            "10.88.0.2\tctl",
            "10.88.0.10\th0",
            "10.88.0.11\th1",
        ]


class TestClusterFile:
    def test_it_reads_back_and_says_what_was_asked(self, tmp_path: Path) -> None:
        made = plan.cluster(
            "a",
            3,
            tmp_path,
            slots=2,
            spare={"h2": "dedicated"},
            memory={"h1": "2GiB"},
            shared=["/tmp/work"],
        )
        (tmp_path / "cluster.toml").write_text(config.dump(made))
        cluster = config.load(tmp_path / "cluster.toml")
        assert cluster == made
        assert cluster.name == "lab-a"
        assert str(cluster.orchestrator) == "10.88.0.2:7400"
        assert [(h.name, h.address, h.slots) for h in cluster.hosts] == [
            ("h0", "10.88.0.10", 2),
            ("h1", "10.88.0.11", 2),
            ("h2", "10.88.0.12", 2),
        ]
        assert [h.spare.value for h in cluster.hosts] == ["floating", "floating", "dedicated"]
        assert [h.memory for h in cluster.hosts] == [None, 2 << 30, None]
        assert cluster.files.shared == (Path("/"), Path("/tmp/work"))
        assert cluster.files.carried == (Path("/var/tmp"),)
        assert cluster.env.set_ == {"PYTHONUNBUFFERED": "1"}
        assert cluster.paths.keys == tmp_path / "keys"
        assert cluster.paths.criu is None

    def test_the_criu_of_the_environment_is_every_hosts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LIVESHIFT_CRIU", "/opt/criu/criu")
        assert plan.cluster("a", 1, tmp_path).paths.criu == Path("/opt/criu/criu")

    def test_mistakes_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(WrongUsage, match="spare of h3: no such host in a lab of 3") as refused:
            plan.cluster("a", 3, tmp_path, spare={"h3": "dedicated"})
        assert refused.value.hint == "its hosts are: h0, h1, h2"
        with pytest.raises(WrongUsage, match='spare of h0: found "often", expected "floating"'):
            plan.cluster("a", 3, tmp_path, spare={"h0": "often"})
        with pytest.raises(WrongUsage, match='memory of h1: found "much", expected a size'):
            plan.cluster("a", 3, tmp_path, memory={"h1": "much"})
        with pytest.raises(WrongUsage, match="slots of h0: found 0"):
            plan.cluster("a", 3, tmp_path, slots=0)
        with pytest.raises(WrongUsage, match='no timeout "patience"') as refused:
            plan.cluster("a", 3, tmp_path, timeouts={"patience": "1"})
        assert "suspicion" in (refused.value.hint or "")
        for text in ("soon", "-1", "nan"):
            with pytest.raises(WrongUsage, match=f'timeouts.grace: found "{text}", expected a num'):
                plan.cluster("a", 3, tmp_path, timeouts={"grace": text})

    def test_timeouts_are_given_by_their_keys(self, tmp_path: Path) -> None:
        given = {"heartbeat": "0.3", "suspicion": "1.5"}
        made = plan.cluster("a", 1, tmp_path, timeouts=given)
        assert (made.timeouts.heartbeat, made.timeouts.suspicion) == (0.3, 1.5)

    def test_gpu_settings_are_given_by_their_keys(self, tmp_path: Path) -> None:
        given = {"libraries": "/opt/nvidia/lib", "fast_path": "off"}
        made = plan.cluster("a", 1, tmp_path, tables={"gpu": given}).gpu
        assert (made.libraries, made.fast_path) == (Path("/opt/nvidia/lib"), FastPathChoice.OFF)
        with pytest.raises(WrongUsage, match='no setting of gpu "speed"') as refused:
            plan.cluster("a", 1, tmp_path, tables={"gpu": {"speed": "1"}})
        assert "there are: libraries, fast_path, verify" in (refused.value.hint or "")
        with pytest.raises(
            WrongUsage, match=r'gpu\.fast_path: found "no", expected "auto" or "off"'
        ):
            plan.cluster("a", 1, tmp_path, tables={"gpu": {"fast_path": "no"}})

    def test_how_memory_goes_is_given_by_keys(self, tmp_path: Path) -> None:
        given = {
            "wire": {"streams": "8", "compress": "never"},
            "precopy": {"enabled": "false", "slow_down": "0.5"},
        }
        made = plan.cluster("a", 1, tmp_path, tables=given)
        assert (made.wire.streams, made.wire.compress) == (8, Compress.NEVER)
        assert (made.precopy.enabled, made.precopy.slow_down) == (False, 0.5)
        known = {"2": 2.0, "1.5": 1.5, "30s": 30.0, "2m": 120.0, "off": None, "auto": "auto"}
        for text, seconds in known.items():
            made = plan.cluster("a", 1, tmp_path, tables={"snapshots": {"every": text}})
            assert made.snapshots.every == seconds
        made = plan.cluster("a", 1, tmp_path, tables={"logs": {"max": "2MiB", "keep": "3"}})
        assert (made.logs.max, made.logs.keep) == (2 << 20, 3)
        with pytest.raises(WrongUsage, match=r'logs.max: found "9KiB", expected a size from "1MB"'):
            plan.cluster("a", 1, tmp_path, tables={"logs": {"max": "9KiB"}})
        with pytest.raises(WrongUsage, match=r'precopy\.enabled: found "no"'):
            plan.cluster("a", 1, tmp_path, tables={"precopy": {"enabled": "no"}})


class TestMounts:
    def test_parents_come_before_what_lies_below_them(self, tmp_path: Path) -> None:
        options = plan.mounts(tmp_path, "h1", ["/tmp/work/venv"], ["/scratch", "/tmp/work/data"])
        targets = [
            options[i + (2 if option == "--bind" else 1)]
            for i, option in enumerate(options)
            if option in ("--bind", "--tmpfs")
        ]
        assert sorted(targets) == sorted(
            [*plan.OWN, "/scratch", "/tmp/work/venv", "/tmp/work/data"]
        )
        for above, below in [(a, b) for a in targets for b in targets if b.startswith(f"{a}/")]:
            assert targets.index(above) < targets.index(below)
        assert options[-1] == "--proc"
        text = " ".join(options)
        assert f"--bind {tmp_path}/h1/run /run/liveshift" in text
        assert f"--bind {tmp_path}/h1/local/tmp/work/data /tmp/work/data" in text
        assert "--bind /tmp/work/venv /tmp/work/venv" in text

    def test_what_private_places_hide_is_brought_back(self) -> None:
        wanted = [
            "/usr",
            "/tmp/venv",
            "/tmp/venv/lib",
            "/var/tmp/here",
            "/scratch/code",
            "/tmpfile",
        ]
        assert plan.brought_back(wanted, ["/scratch"]) == [
            "/scratch/code",
            "/tmp/venv",
            "/var/tmp/here",
        ]

    def test_a_private_place_itself_is_not_brought_back(self) -> None:
        assert plan.brought_back(["/tmp", "/tmp/", "/scratch", "/"], ["/scratch"]) == []

    @pytest.mark.parametrize("path", ["/", "/tmp", "/etc", "//", "/sys/x", "scratch", "/var/lib/"])
    def test_a_directory_that_cannot_be_each_hosts_own(self, path: str) -> None:
        with pytest.raises(WrongUsage, match="cannot be a directory of each host's own"):
            labs.up("a", 3, local=[path])

    def test_other_file_systems_of_the_machine_are_shared(self) -> None:
        table = [
            Mount("8:1", "/", "/", "ext4", "/dev/sda1"),
            Mount("0:5", "/", "/proc", "proc", "proc"),
            Mount("0:6", "/", "/sys", "sysfs", "sysfs"),
            Mount("8:2", "/", "/home", "ext4", "/dev/sda2"),
            Mount("0:40", "/", "/data sets", "nfs4", "server:/data"),
            Mount("0:41", "/", "/tmp", "tmpfs", "tmpfs"),
            Mount("0:42", "/", "/run/user/0", "tmpfs", "tmpfs"),
            Mount("8:3", "/", "/home/scratch", "xfs", "/dev/sdb"),
        ]
        assert plan.machine_mounts(table, ["/home/scratch"]) == ["/data sets", "/home"]
        assert plan.machine_mounts(table, []) == ["/data sets", "/home", "/home/scratch"]


class TestLinks:
    @pytest.mark.parametrize(
        ("text", "rate"),
        [
            ("200mbit", 200_000_000),
            ("1.5 Gbit/s", 1_500_000_000),
            ("64kbit", 64_000),
            ("10000bit", 10_000),
            ("none", 0),
        ],
    )
    def test_rates(self, text: str, rate: int) -> None:
        assert links.bits_per_second(text) == rate

    @pytest.mark.parametrize("text", ["", "200", "200mb", "-1mbit", "1bit", "2000gbit", "mbit"])
    def test_what_is_no_rate(self, text: str) -> None:
        with pytest.raises(WrongUsage, match="is no rate"):
            links.bits_per_second(text)

    def test_delays(self) -> None:
        given = ("5ms", "0.1s", "250us", "0", "none")
        assert [links.milliseconds(t) for t in given] == [5, 100, 0.25, 0, 0]
        for text in ("5", "ms", "11s", "-1ms"):
            with pytest.raises(WrongUsage, match="is no delay"):
                links.milliseconds(text)

    def test_a_slow_link_is_a_bucket_behind_a_delay(self) -> None:
        assert links.queues("eth0", Link()) == []
        bucket = "tbf rate 200000000bit burst 100000 latency 50ms"
        assert links.queues("eth0", Link(rate=200_000_000)) == [
            f"qdisc add dev eth0 root handle 10: {bucket}"
        ]
        assert links.queues("eth0", Link(rate=200_000_000, delay=2.5)) == [
            "qdisc add dev eth0 root handle 1: netem limit 100000 delay 2500us",
            f"qdisc add dev eth0 parent 1:1 handle 10: {bucket}",
        ]

    def test_drops_replace_earlier_ones(self) -> None:
        none = links.drops("eth0", Link())
        assert none.splitlines() == ["table netdev lab_eth0 {}", "delete table netdev lab_eth0"]
        some = links.drops("eth0", Link(loss=1.5))
        assert some.startswith(none)
        assert "numgen random mod 10000 < 150 drop" in some

    def test_a_pair_is_cut_in_both_directions(self) -> None:
        none = cuts.rules([])
        assert none.splitlines() == ["table bridge lab_cuts {}", "delete table bridge lab_cuts"]
        some = cuts.rules([("ctl", "h1")])
        assert some.startswith(none)
        assert 'iifname "ctl" oifname "h1" drop' in some
        assert 'iifname "h1" oifname "ctl" drop' in some


class TestRecord:
    def test_lab_json_reads_back(self) -> None:
        lab = recorded()
        lab.hosts["h1"].init = Task(4711, 99)
        lab.hosts["h1"].link = Link(rate=8000, loss=0.5, cut=True)
        lab.cuts = [("ctl", "h1")]
        lab.state = "up"
        lab.save()
        assert labs.find("a") == labs.find() == lab
        assert labs.cut_off_from(lab, "h1") == ["ctl"]
        assert labs.cut_off_from(lab, "h0") == []
        assert lab.config == lab.directory / "cluster.toml"
        assert lab.socket == lab.directory / "ctl" / "run" / "orchestrator.sock"
        assert [m.name for m in lab.machines] == ["ctl", "h0", "h1"]
        assert [p.name for p in lab.directory.iterdir()] == ["lab.json"]

    def test_another_commands_change_is_taken_over(self) -> None:
        lab = recorded()
        other = labs.find("a")
        other.hosts["h0"].link = Link(cut=True)
        other.save()
        lab.refresh()
        assert lab == other

    def test_finding_none_one_several(self) -> None:
        with pytest.raises(NotFound, match="no lab on this machine") as missing:
            labs.find()
        assert missing.value.hint == "`liveshift lab up --hosts 3` makes one"
        recorded("a")
        with pytest.raises(NotFound, match='no lab "b"') as missing:
            labs.find("b")
        assert missing.value.hint == "there are: a"
        recorded("b")
        assert labs.names() == ["a", "b"]
        with pytest.raises(WrongUsage, match="2 labs on this machine: a, b"):
            labs.find()
        assert labs.find("b").name == "b"

    def test_what_cannot_be_read_is_said_with_a_way_out(self, lab_root: Path) -> None:
        (lab_root / "a").mkdir()
        (lab_root / "No Lab").mkdir()
        assert labs.names() == ["a"]
        with pytest.raises(NotFound, match='lab "a" is not whole') as broken:
            labs.find("a")
        assert "liveshift lab down a" in str(broken.value.hint)
        (lab_root / "a" / "lab.json").write_text('{"name": 3}')
        with pytest.raises(LiveshiftError, match=r"lab\.json is not understood.*name"):
            labs.find("a")

    def test_a_host_that_is_not_there(self) -> None:
        with pytest.raises(NotFound, match='no host "h7" in lab "a"') as missing:
            recorded().machine("h7")
        assert missing.value.hint == "there are: ctl, h0, h1"

    def test_a_root_that_would_not_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for wrong in ("labs", "/a b", "/" + "x" * 80):
            monkeypatch.setenv("LIVESHIFT_LAB_ROOT", wrong)
            with pytest.raises(WrongUsage, match="LIVESHIFT_LAB_ROOT"):
                labs.names()

    @pytest.mark.root
    def test_one_command_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(record, "_LOCK_S", 0.05)
        lab = recorded()
        held = record.claim(lab.directory)
        with held, pytest.raises(Refused, match="another command is at work"):
            labs.link(lab, "h0", cut=True)
        with record.claim(lab.directory):
            pass
        with pytest.raises(NotFound), record.claim(lab.directory.with_name("b")):
            pass


class TestTasks:
    def test_a_pid_alone_is_nobody(self) -> None:
        me = Task.of(os.getpid())
        assert me is not None
        assert me.alive
        impostor = Task(me.pid, me.started + 1)
        assert not impostor.alive
        impostor.send(signal.SIGKILL)  # must not reach this process
        assert impostor.wait(0)

    def test_a_zombie_has_ended(self) -> None:
        child = subprocess.Popen(["sleep", "600"])
        task = Task.of(child.pid)
        assert task is not None
        assert not task.wait(0)
        tasks.kill([task])
        assert not task.alive
        assert Task.of(child.pid) is None
        assert child.wait() == -signal.SIGKILL

    def test_who_does_not_end_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that the kernel cannot end is not to be had; one that is not hit is."""
        monkeypatch.setattr(Task, "send", lambda task, signum: None)
        stubborn = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
        child = subprocess.Popen(stubborn, stdout=subprocess.PIPE)
        with child:
            assert child.stdout is not None
            child.stdout.readline()
            task = Task.of(child.pid)
            assert task is not None
            with pytest.raises(LiveshiftError, match=f"processes {child.pid} do not end"):
                tasks.kill([task], seconds=0.05)
            child.kill()

    def test_a_sandbox_is_known_by_what_is_mounted_there(self) -> None:
        line = "31 22 8:1 {root} /run/liveshift rw - ext4 /dev/sda1 rw"
        other = "30 22 8:1 / / rw - ext4 /dev/sda1 rw"
        lab = ("8:1", "/var/lib/liveshift-lab/a")
        for root, belongs in (
            ("/var/lib/liveshift-lab/a/h0/run", True),
            ("/var/lib/liveshift-lab/a/ctl/run//deleted", True),
            ("/var/lib/liveshift-lab/ab/h0/run", False),
            ("/srv/liveshift-lab/a/h0/run", False),
            ("/var/lib/liveshift-lab/a/h0/state", False),
        ):
            assert tasks._is_sandbox([other, line.format(root=root)], lab) is belongs
        assert not tasks._is_sandbox([other], lab)
        assert not tasks._is_sandbox([], lab), "the process has just ended"

    def test_where_a_directory_lies(self) -> None:
        device, path = tasks._on_filesystem(Path("/proc/sys"))
        assert path == "/sys"
        number = os.stat("/proc").st_dev
        assert device == f"{os.major(number)}:{os.minor(number)}"

    def test_this_process_is_in_no_lab(self, lab_root: Path) -> None:
        assert tasks.belonging([], lab_root / "a") == []
        mine = tasks.network("self")
        assert mine is not None
        assert Task.of(os.getpid()) in tasks.belonging([mine], lab_root / "a")


class TestDown:
    def test_no_lab_is_no_mistake(self) -> None:
        labs.down("nonesuch")
        assert labs.leftovers("nonesuch") == []

    def test_a_directory_alone_is_left_over_until_it_is_gone(self) -> None:
        lab = recorded()
        assert labs.leftovers("a") == [f"directory {lab.directory}"]
        if os.geteuid() != 0:
            with pytest.raises(NotPermitted, match="needs root"):
                labs.down("a")
            return
        labs.down("a")
        assert labs.leftovers("a") == []

    @pytest.mark.root
    def test_the_own_network_is_not_pulled_from_under_us(
        self, lab_root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wiring, "owner", lambda name: None)
        monkeypatch.setattr(wiring, "namespaces", lambda name: ["ls-a-h0"])
        monkeypatch.setattr(wiring, "identity", lambda netns: tasks.network("self"))
        with pytest.raises(Refused, match='in the network of lab "a"'):
            clearing.clear("a", lab_root / "a")

    def test_without_root_no_lab_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(NotPermitted, match="needs root"):
            labs.up("a", 3)
        assert labs.names() == []

    def test_without_root_no_lab_is_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lab = recorded()
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        for change in (
            lambda: labs.down("a"),
            lambda: labs.link(lab, "h0", cut=True),
            lambda: labs.run_in(lab, "h0", ["true"]),
            lambda: labs.separate(lab, "h0", "h1"),
            lambda: labs.kill_host(lab, "h0"),
            lambda: labs.stop_daemon(lab, "h0"),
        ):
            with pytest.raises(NotPermitted, match="needs root"):
                change()
        assert labs.find() == lab
