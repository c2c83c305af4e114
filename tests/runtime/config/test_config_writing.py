# SPDX-License-Identifier: Apache-2.0
"""Writing a cluster file loses nothing, and whatever it holds is answered in words."""

from __future__ import annotations

import json
import tomllib
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal

from cluster_files import EXAMPLE, paths_in, quick
from hypothesis import given
from hypothesis import strategies as st

from liveshift.runtime.config.choices import SealChoice
from liveshift.runtime.config.cluster import (
    Cluster,
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
    WithinSettings,
    dump,
    load,
    parse,
    settings_of,
    toml_value,
)
from liveshift.runtime.config.errors import WrongCluster
from liveshift.runtime.config.toml_lines import key_lines

labels = st.from_regex(r"[a-z0-9](?:[a-z0-9-]{0,13}[a-z0-9])?", fullmatch=True).filter(
    lambda name: name != "orchestrator"
)
AUTO: Literal["auto"] = "auto"
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
folders = texts.map(lambda t: Path("/x" + t.replace("/", "_")))


@st.composite
def timeouts(draw: st.DrawFn) -> Timeouts:
    """Some numbers given, a little off what would be derived: on the side that fits."""
    collective = draw(st.floats(60, 86400))
    less = {"standstill": 0.98, "freeze": 0.9, "restore": 0.9, "suspicion": 0.8, "heartbeat": 0.5}
    given = {
        name: value * draw(st.floats(less.get(name, 1.0), 1.0))
        for name, value in Timeouts(collective=collective).values.items()
        if draw(st.booleans())
    }
    return Timeouts(**(given | {"collective": collective}))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    names = draw(st.lists(labels, min_size=1, max_size=4, unique=True))
    hosts = [
        HostSettings(
            name=name,
            address=f"192.168.{index}.{draw(st.integers(1, 254))}",
            data_port=draw(st.integers(1, 32767)),
            pages_port=draw(st.integers(32768, 65535)),
            slots=draw(st.integers(1, 64)),
            spare=draw(st.sampled_from([Spare.FLOATING, Spare.NONE])),
            memory=draw(st.none() | st.integers(1, 2**63 - 1)),
            domain=draw(st.just("") | labels),
        )
        for index, name in enumerate(names)
    ]
    listed = draw(st.lists(folders, max_size=4, unique=True))
    cut = draw(st.integers(0, 4))
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
        gpu=GpuSettings(
            libraries=draw(st.none() | folders),
            fast_path=draw(st.sampled_from(FastPathChoice)),
            verify=draw(st.sampled_from(Verify)),
        ),
        wire=WireSettings(
            streams=draw(st.integers(1, 32)),
            compress=draw(st.sampled_from(Compress)),
            seal=draw(st.sampled_from(SealChoice)),
            trusted=True,
        ),
        precopy=PrecopySettings(
            enabled=draw(st.booleans()),
            way=draw(st.sampled_from(Way)),
            slow_down=draw(st.none() | st.floats(0.01, 0.9)),
            max_pause=draw(st.none() | st.floats(0.01, 86400.0)),
            rounds=draw(st.integers(1, 1000)),
        ),
        snapshots=SnapshotSettings(
            every=draw(st.one_of(st.none(), st.just(AUTO), st.floats(1.0, 86400.0))),
            cost=draw(st.floats(0.0001, 0.5)),
            mttf=draw(st.none() | st.floats(60.0, 3e9)),
            memory=draw(st.none() | st.integers(1, 2**63 - 1)),
            fence=draw(st.sampled_from([(), ("/bin/true", "--host", "")])),
            fence_after=draw(st.floats(0.01, 86400.0)),
            on_rewind=draw(st.sampled_from([(), ("/bin/echo",), ("/bin/echo", "-n", "-n", "")])),
        ),
        within=WithinSettings(
            maintenance=draw(st.none() | st.floats(0.01, 86400.0)),
            failing=draw(st.none() | st.floats(0.01, 86400.0)),
            notice=draw(st.none() | st.floats(0.01, 86400.0)),
        ),
        timeouts=draw(timeouts()),
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
    assert again.cluster.timeouts.given == cluster.timeouts.given
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
    if tables[table] and data.draw(st.booleans()):
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
