# SPDX-License-Identifier: Apache-2.0
"""The cluster file: what it says."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from cluster_files import EXAMPLE, SMALL, mistakes

from liveshift.errors import ConfigError, NotFound
from liveshift.runtime.config.choices import SealChoice
from liveshift.runtime.config.cluster import (
    SCHEMA,
    Compress,
    Endpoint,
    Env,
    FastPathChoice,
    Files,
    GpuSettings,
    HostSettings,
    Paths,
    PrecopySettings,
    SnapshotSettings,
    Spare,
    Timeouts,
    Verify,
    Way,
    WireSettings,
    dump,
    load,
    parse,
)
from liveshift.runtime.config.toml_lines import key_lines
from liveshift.runtime.config.values import Size, read_value, write_value


def test_only_four_values_have_to_be_given() -> None:
    cluster = parse(SMALL).cluster
    assert cluster.name == "prod"
    assert cluster.orchestrator == Endpoint("10.88.0.2", 7400)
    assert str(cluster.orchestrator) == "10.88.0.2:7400"
    assert cluster.overlay == IPv4Network("10.99.0.0/16")
    assert [host.name for host in cluster.hosts] == ["h0", "h1"]
    assert cluster.host("h1") == HostSettings(
        name="h1",
        address="10.88.0.11",
        data_port=7401,
        pages_port=7402,
        slots=1,
        spare=Spare.FLOATING,
        memory=None,
    )
    assert cluster.host("h1").data == Endpoint("10.88.0.11", 7401)
    assert cluster.host("h1").pages == Endpoint("10.88.0.11", 7402)
    assert cluster.paths == Paths() == Paths(criu=None, state=Path("/var/lib/liveshift"))
    assert (cluster.env, cluster.files, cluster.timeouts) == (Env(), Files(), Timeouts())
    assert cluster.timeouts.suspicion == 5.0


def test_example_names_every_key_and_says_the_defaults() -> None:
    whole = EXAMPLE.read_text()
    # What is derived stands in comments, so that nobody copies it: it would no longer be.
    whole = re.sub(r"^# (?=[a-z_]+ = )", "", whole, flags=re.MULTILINE)
    text, lines, values = whole.splitlines(), key_lines(whole), tomllib.loads(whole)
    for table, keys in SCHEMA.items():
        for name, setting in keys.items():
            places = [k for k in lines if k[0] == table and k[-1] == name]
            assert places, f"{table}.{name} is not in {EXAMPLE.name}"
            # A value is its default, unless the comment beside it says "default: …".
            if setting.default is not MISSING and "default: " not in text[lines[places[0]] - 1]:
                value: Any = values
                for part in places[0]:
                    value = value[part]
                default = getattr(Timeouts(), name) if table == "timeouts" else setting.default
                assert write_value(setting.kind, default) == value, f"{table}.{name}"
    assert load(EXAMPLE).timeouts.given.keys() == {"collective", "grace"}


def test_gpus_move_as_the_driver_bears_it_unless_told_otherwise() -> None:
    assert parse(SMALL).cluster.gpu == GpuSettings(
        libraries=None, fast_path=FastPathChoice.AUTO, verify=Verify.SAMPLED
    )
    table = '[gpu]\nlibraries = "/usr/local/nvidia/lib64"\nfast_path = "off"\nverify = "full"\n'
    assert parse(SMALL + table).cluster.gpu == GpuSettings(
        libraries=Path("/usr/local/nvidia/lib64"), fast_path=FastPathChoice.OFF, verify=Verify.FULL
    )


def test_memory_goes_over_before_the_stop_unless_told_otherwise() -> None:
    cluster = parse(SMALL).cluster
    assert cluster.wire == WireSettings(streams=4, compress=Compress.AUTO)
    assert cluster.precopy == PrecopySettings(
        enabled=True, way=Way.AUTO, slow_down=None, max_pause=None, rounds=30
    )
    tables = (
        '[wire]\nstreams = 8\ncompress = "never"\nseal = "off"\ntrusted = true\n'
        "[precopy]\nenabled = false\nslow_down = 0.05\nrounds = 3\n"
        'way = "round"\nmax_pause = 5\n'
    )
    told = parse(SMALL + tables).cluster
    assert told.wire == WireSettings(
        streams=8, compress=Compress.NEVER, seal=SealChoice.OFF, trusted=True
    )
    assert told.precopy == PrecopySettings(
        enabled=False,
        way=Way.ROUND,
        slow_down=0.05,
        max_pause=5.0,
        rounds=3,
    )
    assert told.digest != cluster.digest


def test_the_orchestrator_chooses_the_interval_unless_told_otherwise() -> None:
    cluster = parse(SMALL).cluster
    assert cluster.snapshots == SnapshotSettings(every="auto", cost=0.005, mttf=None, memory=None)
    assert cluster.domains == {}
    table = '[snapshots]\nevery = 150\nmemory = "4GiB"\n'
    told = parse(SMALL + 'domain = "rack-1"\n' + table).cluster
    assert told.snapshots == SnapshotSettings(every=150.0, memory=4 << 30)
    assert told.domains == {"h1": "domain rack-1"}
    assert told.digest != cluster.digest
    same = parse(SMALL + '[snapshots]\nevery = "auto"\n').cluster
    assert same.digest == cluster.digest
    assert cluster.snapshots.on_rewind == ()
    given = parse(SMALL + '[snapshots]\non_rewind = ["/bin/echo", "-n", "-n"]\n').cluster
    assert given.snapshots.on_rewind == ("/bin/echo", "-n", "-n"), "words may come twice"
    off = parse(SMALL + '[snapshots]\nevery = "off"\n').cluster
    assert off.snapshots.every is None
    assert 'every = "off"' in dump(off)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("2.5m", 150.0), ("1h", 3600.0), ("1500ms", 1.5), ("24h", 86400.0), ("45", 45)],
)
def test_an_interval_is_written_as_on_the_command_line(text: str, seconds: float) -> None:
    told = parse(SMALL + f'[snapshots]\nevery = "{text}"\n').cluster
    assert told.snapshots.every == seconds
    assert told.digest == parse(SMALL + f"[snapshots]\nevery = {seconds}\n").cluster.digest
    assert parse(dump(told)).cluster == told


@pytest.mark.parametrize(
    "text", ["999ms", "0s", "25h", "1d", "30 s", "-30s", "1e3s", "٣s", "s", ""]
)
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"snapshots\.every: found .*, expected a time of 1 to"):
        parse(SMALL + f'[snapshots]\nevery = "{text}"\n')


def test_liveshift_may_choose_the_interval() -> None:
    table = '[snapshots]\nevery = "auto"\ncost = 0.01\nmttf = "42d"\n'
    told = parse(SMALL + table).cluster
    assert told.snapshots == SnapshotSettings(every="auto", cost=0.01, mttf=42 * 86400.0)
    assert 'every = "auto"' in dump(told)
    for text, seconds in (('"1000h"', 3.6e6), ('"0.5 d"', 43200.0), ("3600", 3600.0)):
        assert parse(SMALL + f"[snapshots]\nmttf = {text}\n").cluster.snapshots.mttf == seconds
    for wrong in ('"1m"', '"1e3h"', "59", "inf", "nan", "true", '"200y"', '"876001h"'):
        with pytest.raises(ConfigError, match=r"snapshots\.mttf"):
            parse(SMALL + f"[snapshots]\nmttf = {wrong}\n")


def test_unknown_host_is_answered_with_those_there_are() -> None:
    with pytest.raises(NotFound, match='no host "h7" in cluster "prod"') as caught:
        parse(SMALL).cluster.host("h7")
    assert caught.value.hint == "its hosts are: h0, h1"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("512 MiB", 512 << 20),
        ("2GB", 2 * 10**9),
        ("1024B", 1024),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert read_value(Size, text) == size
    assert read_value(Size, write_value(Size, size)) == size


@pytest.mark.parametrize(
    "text", ["8", "8G", "GiB", "-1GiB", "0GiB", "8gib", "1.5B", "9" * 19 + "TB"]
)
def test_no_sizes(text: str) -> None:
    (mistake,) = mistakes(SMALL + f'memory = "{text}"\n')
    assert f'hosts.h1.memory: found "{text}", expected a size such as "8GB"' in mistake


def test_variables_pass_then_drop_then_set() -> None:
    env = Env(pass_=("NCCL_*", "PATH", "HF_*"), drop=("*_TOKEN",), set_={"PATH": "/bin", "X": "1"})
    caller = {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "secret",
        "PATH": "/usr/bin",
        "path": "",
        "HOME": "/",
    }
    assert env.select(caller) == {"NCCL_DEBUG": "INFO", "PATH": "/bin", "X": "1"}


def test_paths_are_written_plainly() -> None:
    files = parse(SMALL + '[files]\nshared = ["//data/", "/home/./x", "/"]\n').cluster.files
    assert [str(p) for p in files.shared] == ["/data", "/home/x", "/"]


def test_digest_sees_content_only() -> None:
    cluster = parse(SMALL).cluster
    assert parse("# a comment\n" + dump(cluster)).cluster.digest == cluster.digest
    head, h0, h1 = SMALL.split("\n\n")
    assert parse("\n\n".join([h1, h0, head])).cluster.digest == cluster.digest
    other = replace(cluster, timeouts=Timeouts(grace=11.0))
    assert other.digest != cluster.digest
    assert len(cluster.digest) == 16
    assert parse(SMALL + "slots = 1\n[files]\nshared = []\n").cluster.digest == cluster.digest
    assert parse(SMALL + "slots = 2\n").cluster.digest != cluster.digest
    assert replace(cluster, timeouts=Timeouts(freeze=120)).digest == cluster.digest
    assert replace(cluster, timeouts=Timeouts(collective=599)).digest != cluster.digest
    slow = replace(cluster, gpu=GpuSettings(fast_path=FastPathChoice.OFF))
    assert slow.digest != cluster.digest == replace(cluster, gpu=GpuSettings()).digest
    assert replace(cluster, timeouts=Timeouts(gpu_lock=20)).digest == cluster.digest
    assert replace(cluster, timeouts=Timeouts(gpu_lock=21)).digest != cluster.digest
    assert cluster.digest == "12612e5c5f8ec330"  # pinned: agents of different builds compare it
