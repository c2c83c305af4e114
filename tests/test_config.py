# SPDX-License-Identifier: Apache-2.0
"""The cluster file: what it says, where it is wrong, and that writing it loses nothing."""

from __future__ import annotations

import json
import tomllib
from dataclasses import MISSING, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liveshift.errors import ConfigError, NotFound
from liveshift.launcher import config_cmd
from liveshift.runtime.config import (
    SCHEMA,
    Cluster,
    Endpoint,
    Env,
    Files,
    Host,
    Paths,
    Spare,
    Timeouts,
    dump,
    load,
    parse,
    settings_of,
    toml_value,
)
from liveshift.runtime.config_errors import WrongCluster
from liveshift.runtime.config_values import Size
from liveshift.runtime.toml_lines import Key, key_lines

EXAMPLE = Path(__file__).parents[1] / "docs" / "cluster.example.toml"

SMALL = """\
[cluster]
name = "prod"
orchestrator = "10.88.0.2:7400"
overlay = "10.99.0.0/16"

[hosts.h0]
address = "10.88.0.10"

[hosts.h1]
address = "10.88.0.11"
"""

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def mistakes(text: str) -> list[str]:
    with pytest.raises(WrongCluster) as caught:
        parse(text)
    assert caught.value.exit_code == 3
    return caught.value.message.splitlines()


# What it says


def test_only_four_values_have_to_be_given() -> None:
    cluster = parse(SMALL).cluster
    assert cluster.name == "prod"
    assert cluster.orchestrator == Endpoint("10.88.0.2", 7400)
    assert cluster.orchestrator.url == "tcp://10.88.0.2:7400"
    assert cluster.overlay == IPv4Network("10.99.0.0/16")
    assert [host.name for host in cluster.hosts] == ["h0", "h1"]
    assert cluster.host("h1") == Host(
        name="h1", address="10.88.0.11", data_port=7401, slots=1, spare=Spare.FLOATING, memory=None
    )
    assert cluster.host("h1").data == Endpoint("10.88.0.11", 7401)
    assert cluster.paths == Paths() == Paths(criu=None, state=Path("/var/lib/liveshift"))
    assert (cluster.env, cluster.files, cluster.timeouts) == (Env(), Files(), Timeouts())
    assert cluster.timeouts.suspicion == 5.0


def test_example_names_every_key_and_says_the_defaults() -> None:
    text = EXAMPLE.read_text().splitlines()
    lines = key_lines(EXAMPLE.read_text())
    values = tomllib.loads(EXAMPLE.read_text())
    for table, keys in SCHEMA.items():
        for name, setting in keys.items():
            places = [k for k in lines if k[0] == table and k[-1] == name]
            assert places, f"{table}.{name} is not in {EXAMPLE.name}"
            # A value is its default, unless the comment beside it says "default: …".
            if setting.default is not MISSING and "default: " not in text[lines[places[0]] - 1]:
                value: Any = values
                for part in places[0]:
                    value = value[part]
                assert setting.kind.read(value) == setting.default, f"{table}.{name}"


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
    assert Size().read(text) == size
    assert Size().read(Size().write(size)) == size


@pytest.mark.parametrize(
    "text", ["8", "8G", "GiB", "-1GiB", "0GiB", "8gib", "1.5B", "9" * 19 + "TB"]
)
def test_no_sizes(text: str) -> None:
    (mistake,) = mistakes(SMALL + f'memory = "{text}"\n')
    assert f'hosts.h1.memory: found "{text}", expected a size such as "8GiB"' in mistake


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
    assert cluster.digest == "3aecf6cd31478f92"  # pinned: agents of different builds compare it


# Where it is wrong

# fmt: off
WRONG = [  # what to replace in SMALL, by what, and the answer
    ('address = "10.88.0.11"', 'address = "10.88.0.11"\nslots = "two"',
     '11: hosts.h1.slots: found "two", expected a whole number from 1 to 64'),
    ('address = "10.88.0.11"', 'address = "10.88.0.11"\nslots = true',
     "11: hosts.h1.slots: found true, expected a whole number from 1 to 64"),
    ('address = "10.88.0.11"', 'address = "10.88.0.11"\ndata_port = 65536',
     "11: hosts.h1.data_port: found 65536, expected a whole number from 1 to 65535"),
    ('address = "10.88.0.11"', 'address = "10.88.0.11"\nslot = 2',
     "11: hosts.h1.slot: found an unknown key, expected one of address, data_port, slots, spare,"
     ' memory (did you mean "slots"?)'),
    ('address = "10.88.0.11"', 'address = "10.88.0.11"\nspare = "maybe"',
     '11: hosts.h1.spare: found "maybe", expected "floating", "dedicated" or "none"'),
    ('"10.88.0.11"', '"10.88.0.10"',
     '10: hosts.h1.address: found "10.88.0.10", expected an address of its own'
     " (hosts.h0.address, line 7, has the same one)"),
    ('"10.88.0.11"', '"10.88.0.256"',
     '10: hosts.h1.address: found "10.88.0.256", expected an IPv4 address of this host such as'
     ' "10.88.0.10"'),
    ('address = "10.88.0.11"', "",
     "9: hosts.h1.address: found nothing, expected an IPv4 address of this host such as"
     ' "10.88.0.10"'),
    ("hosts.h1", "hosts.Node_1",
     '9: hosts.Node_1: found "Node_1", expected a DNS label of at most 15 characters (a-z, 0-9 and,'
     ' inside, -) other than "orchestrator"'),
    ("hosts.h1", "hosts.orchestrator",
     '9: hosts.orchestrator: found "orchestrator", expected a DNS label of at most 15 characters'
     ' (a-z, 0-9 and, inside, -) other than "orchestrator"'),
    ('[hosts.h1]\naddress = "10.88.0.11"', "[host.h1]\n",
     "9: host: found an unknown table, expected one of cluster, hosts, files, env, paths, timeouts,"
     ' access (did you mean "hosts"?)'),
    ('name = "prod"', 'name = "prod"\nheartbeat = 2',
     "3: cluster.heartbeat: found an unknown key, expected one of name, orchestrator, overlay,"
     ' network ("heartbeat" belongs in [timeouts])'),
    ('"prod"', '"Prod"',
     '2: cluster.name: found "Prod", expected 1 to 20 of the characters a-z, 0-9 and -'),
    ('"10.88.0.2:7400"', '"10.88.0.2"',
     '3: cluster.orchestrator: found "10.88.0.2", expected an IPv4 address and a port such as'
     ' "10.88.0.2:7400"'),
    ('"10.88.0.2:7400"', '"10.88.0.2:70000"',
     '3: cluster.orchestrator: found "10.88.0.2:70000", expected an IPv4 address and a port such as'
     ' "10.88.0.2:7400" (port 1 to 65535)'),
    ('"10.99.0.0/16"', '"10.99.0.1/16"',
     '4: cluster.overlay: found "10.99.0.1/16", expected the network\'s own address:'
     ' "10.99.0.0/16"'),
    ('"10.99.0.0/16"', '"10.99.0.0/25"',
     '4: cluster.overlay: found "10.99.0.0/25", expected an IPv4 network of /8 to /24 such as'
     ' "10.99.0.0/16"'),
    ('"10.99.0.0/16"', '"10.88.0.0/24"',
     '4: cluster.overlay: found "10.88.0.0/24", expected a network without any machine\'s own'
     " address (10.88.0.10 is hosts.h0.address, line 7; 10.88.0.11 is hosts.h1.address, line 10;"
     " 10.88.0.2 is cluster.orchestrator, line 3)"),
    ('"10.99.0.0/16"', '"10.99.0.0/16"\nnetwork = "bridge"',
     '5: cluster.network: found "bridge", expected "overlay": bridge mode (all hosts on one layer-2'
     " segment) is not built yet"),
    ('"10.88.0.2:7400"', '"10.88.0.10:7401"',
     "6: hosts.h0.data_port: found 7401, expected a port other than the orchestrator's"
     " (cluster.orchestrator, line 3)"),
    ("[cluster]", '[timeouts]\nsuspicion = 0.5\n[cluster]',
     "2: timeouts.suspicion: found 0.5, expected more than 1.0 (timeouts.heartbeat)"),
    ("[cluster]", '[timeouts]\ngrace = nan\n[cluster]',
     "2: timeouts.grace: found nan, expected a number of seconds from 0.01 to 86400"),
    ("[cluster]", '[files]\nshared = [\n  "/home",\n  "data",\n]\n[cluster]',
     '4: files.shared[1]: found "data", expected an absolute path such as "/var/lib/liveshift"'),
    ("[cluster]", '[files]\nshared = ["/a/../b"]\n[cluster]',
     '2: files.shared[0]: found "/a/../b", expected an absolute path without ".." (perhaps "/b")'),
    ("[cluster]", '[files]\nshared = ["/a"]\ncarried = ["/a/"]\n[cluster]',
     '3: files.carried: found ["/a"], expected no path of files.shared ("/a" stands in both)'),
    ("[cluster]", '[files]\ncarried = ["/a", "/a"]\n[cluster]',
     '2: files.carried[1]: found "/a", expected every element to be listed once'),
    ("[cluster]", '[env]\nset = { A = 1 }\n[cluster]',
     '2: env.set.A: found 1, expected a string such as "1"'),
    ("[cluster]", '[env.set]\n"A B" = "1"\n[cluster]',
     '2: env.set."A B": found "A B", expected the name of a variable (A-Z, a-z, 0-9 and _)'),
    ("[cluster]", '[paths]\nrun = "run"\n[cluster]',
     '2: paths.run: found "run", expected an absolute path such as "/var/lib/liveshift"'),
    ("[cluster]", 'files = 3\n[cluster]', "1: files: found 3, expected a table [files]"),
    ('"prod"', '"prod"\nname = "twice"',
     '3: found name = "twice", expected correct TOML: Cannot overwrite a value at column 15'),
    ('"prod"', "prod",
     "2: found name = prod, expected correct TOML: Invalid value at column 8"),
]
# fmt: on


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_mistake_is_answered_with_line_found_and_expected(old: str, new: str, message: str) -> None:
    assert old in SMALL
    assert mistakes(SMALL.replace(old, new, 1))[0] == f"cluster.toml:{message}"


def test_no_hosts_and_no_cluster() -> None:
    assert mistakes("") == [
        "cluster.toml:1: cluster: found nothing, expected a table [cluster]",
        "cluster.toml:1: hosts: found nothing, expected at least one table [hosts.NAME]",
    ]
    assert mistakes("hosts = []\n" + SMALL.split("\n\n")[0]) == [
        "cluster.toml:1: hosts: found [], expected at least one table [hosts.NAME]"
    ]


def test_only_dedicated_spares_can_start_no_job() -> None:
    text = SMALL.replace("]\naddress", ']\nspare = "dedicated"\naddress')
    (mistake,) = mistakes(text)
    assert mistake.startswith('cluster.toml:7: hosts.h0.spare: found "dedicated", expected one')


def test_all_mistakes_come_at_once_in_the_order_of_lines() -> None:
    text = SMALL.replace('"prod"', '"PROD"').replace("10.88.0.11", "10.88.0.10")
    text += 'slots = 0\ncolour = "red"\n[timeouts]\nheartbeat = 6\nfreeze = "long"\n'
    found = mistakes(text)
    assert [int(line.split(":")[1]) for line in found] == [2, 10, 11, 12, 13, 15]
    with pytest.raises(WrongCluster) as caught:
        parse(text)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("6 mistakes; ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot read .*: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# one\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.toml:2: found the byte 0xe9, expected UTF-8"):
        load(tmp_path / "latin.toml")


def test_cluster_made_in_code_is_held_to_the_same_rules() -> None:
    h0 = Host(name="h0", address="10.88.0.10")
    cluster = parse(SMALL).cluster
    with pytest.raises(ConfigError, match=r"^hosts\.h0: found the name twice, expected every host"):
        replace(cluster, hosts=(h0, h0))
    with pytest.raises(ConfigError, match=r"^hosts\.h0\.slots: found 65, expected a whole"):
        replace(cluster, hosts=(replace(h0, slots=65),))
    with pytest.raises(ConfigError, match=r"^hosts: found \{\}, expected at least one table"):
        replace(cluster, hosts=())


# The lines of keys


def paths_in(value: object, at: Key = ()) -> set[Key]:
    if isinstance(value, dict):
        return {
            k for name, part in value.items() for k in {(*at, name)} | paths_in(part, (*at, name))
        }
    if isinstance(value, list):
        return {k for i, part in enumerate(value) for k in {(*at, i)} | paths_in(part, (*at, i))}
    return set()


ODD = r'''
a.b."c.d".'e' = 1 # a comment = [
"quo\"ted" = """
not = "a key"
[nor.a.table] \""" still in"""""
lit = \'\'\'
x = 1'\'\'\'
empty = ""
[t] # [u]
when = 1979-05-27 07:32:00
list = [ # first
  1, [2, "]"],
  { x = 1, y.z = ["a"] },
]
[ "t" . "u" ]
k=true
[[many]]
n = 1
[many.sub]
s = 1
[[many]]
n = 2
[[many.deep]]
d = {}
[[many.deep]]
d = []
'''.replace("\\'", "'")


def test_lines_are_found_through_all_of_toml() -> None:
    lines = key_lines(ODD)
    assert set(lines) == paths_in(tomllib.loads(ODD))
    assert key_lines(ODD.replace("\n", "\r\n")) == lines
    text = ODD.split("\n")

    def at(*key: str | int) -> str:
        return text[lines[key] - 1]

    assert at("a", "b", "c.d", "e").startswith("a.b.")
    assert at('quo"ted').startswith('"quo')
    assert at("lit") == "lit = '''"
    assert at("empty") == 'empty = ""'
    assert at("t", "when").startswith("when")
    assert at("t", "list", 1, 1) == '  1, [2, "]"],'
    assert at("t", "list", 2, "y", "z", 0).startswith("  { x")
    assert at("t", "u", "k") == "k=true"
    assert at("many", 1, "n") == "n = 2"
    assert at("many", 1, "deep", 1, "d") == "d = []"


def test_line_of_every_key_in_a_plain_file() -> None:
    text = EXAMPLE.read_text()
    for key, line in key_lines(text).items():
        if not isinstance(key[-1], int):
            assert str(key[-1]) in text.split("\n")[line - 1]


# Writing loses nothing

labels = st.from_regex(r"[a-z0-9](?:[a-z0-9-]{0,13}[a-z0-9])?", fullmatch=True).filter(
    lambda name: name != "orchestrator"
)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
folders = texts.map(lambda t: Path("/x" + t.replace("/", "_")))
seconds = st.floats(0.01, 86400)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    names = draw(st.lists(labels, min_size=1, max_size=4, unique=True))
    hosts = [
        Host(
            name=name,
            address=f"192.168.{index}.{draw(st.integers(1, 254))}",
            data_port=draw(st.integers(1, 65535)),
            slots=draw(st.integers(1, 64)),
            spare=draw(st.sampled_from([Spare.FLOATING, Spare.NONE])),
            memory=draw(st.none() | st.integers(1, 2**63 - 1)),
        )
        for index, name in enumerate(names)
    ]
    listed = draw(st.lists(folders, max_size=4, unique=True))
    cut = draw(st.integers(0, 4))
    ordered = sorted(draw(st.lists(seconds, min_size=3, max_size=3, unique=True)))
    patterns = st.lists(texts.map(lambda t: "N" + t.replace("=", "")), max_size=3, unique=True)
    variables = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
    return Cluster(
        name=draw(st.from_regex(r"[a-z0-9-]{1,20}", fullmatch=True)),
        orchestrator=Endpoint("172.16.0.1", draw(st.integers(1, 65535))),
        overlay=IPv4Network((10 << 24, draw(st.integers(8, 24)))),
        hosts=tuple(hosts),
        files=Files(shared=tuple(listed[:cut]), carried=tuple(listed[cut:])),
        env=Env(
            pass_=tuple(draw(patterns)),
            drop=tuple(draw(patterns)),
            set_=draw(st.dictionaries(variables, texts, max_size=3)),
        ),
        paths=Paths(state=draw(folders), criu=draw(st.none() | folders)),
        timeouts=Timeouts(
            heartbeat=ordered[0],
            suspicion=ordered[1],
            **{step: ordered[2] for step in ("prepare", "freeze", "restore")},
            grace=draw(seconds),
        ),
    )


def test_awkward_strings_are_written_as_toml() -> None:
    for text in ('"', "\\", "\x7f", "\x00", "\n\r\t", "é", "\u2028", "\U0001f600", "'''"):
        assert tomllib.loads(f"k = {toml_value(text)}") == {"k": text}


@given(clusters())
@quick
def test_dump_and_parse_are_inverse(cluster: Cluster) -> None:
    text = dump(cluster)
    again = parse(text)
    assert again.cluster == cluster
    assert again.cluster.digest == cluster.digest
    assert dump(again.cluster) == text
    assert set(again.lines) == paths_in(tomllib.loads(text))


tree = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | texts
    | st.sampled_from(["10.88.0.11", "8GiB", "/", "dedicated", "overlay", "0.0.0.0/8", "1:1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "name", "h0"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(bool(value))
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(k)} = {written(v)}" for k, v in value.items()) + "}"
    return toml_value(value)


@given(st.data())
@quick
def test_whatever_stands_in_a_place_the_answer_is_a_cluster_or_its_line(
    data: st.DataObject,
) -> None:
    tables = settings_of(load(EXAMPLE))
    table = data.draw(st.sampled_from(sorted(tables)))
    holder: dict[str, Any] = tables
    key = table
    if data.draw(st.booleans()):
        holder, key = tables[table], data.draw(st.sampled_from(sorted(tables[table])))
    holder[key] = data.draw(tree)
    text = "".join(f"{name} = {written(part)}\n" for name, part in tables.items())
    lines = key_lines(text)
    assert set(lines) == paths_in(tomllib.loads(text))
    try:
        found = parse(text).cluster
    except WrongCluster as caught:
        wrong = caught
    else:
        assert parse(dump(found)).cluster == found
        return
    places = {f"cluster.toml:{m.line}: {m.key}: found " for m in wrong.mistakes}
    assert all(line.startswith(tuple(places)) for line in wrong.message.split("\n"))
    assert {m.line for m in wrong.mistakes} <= set(lines.values())


# The command


def test_validate(capsys: pytest.CaptureFixture[str]) -> None:
    config_cmd.validate(EXAMPLE)
    assert capsys.readouterr().out.startswith(f'{EXAMPLE}: good: cluster "prod", 3 hosts, ')


def test_show_is_a_cluster_file_with_the_origin_of_each_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL)
    config_cmd.show(path)
    out, err = capsys.readouterr()
    assert err == ""
    assert parse(out).cluster == load(path)
    rows = [line for line in out.splitlines() if " = " in line]
    assert all(row.endswith("# default") or "# line " in row for row in rows)
    (row,) = (row for row in rows if row.startswith("overlay"))
    assert row.endswith("# line 4")


def test_show_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL)
    config_cmd.show(path, "json")
    shown = json.loads(capsys.readouterr().out)
    assert shown["digest"] == load(path).digest
    by_key = {setting["key"]: setting for setting in shown["settings"]}
    assert by_key["hosts.h1.address"] == {
        "key": "hosts.h1.address",
        "value": "10.88.0.11",
        "line": 10,
    }
    assert by_key["timeouts.grace"] == {"key": "timeouts.grace", "value": 10.0, "line": None}
