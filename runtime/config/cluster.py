# SPDX-License-Identifier: Apache-2.0
"""The cluster file: one TOML file describes one cluster. This module reads and checks it.

``load`` returns a frozen :class:`Cluster`; ``read`` also returns the line of each value; ``dump``
writes the same format back. If values are wrong, one ConfigError lists all of them, each with file,
line, the value and what was expected. The same rules check a cluster that is made in code.
``docs/cluster.example.toml`` explains every key.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from ...errors import ConfigError, no_such
from .choices import Compress, FastPathChoice, Outside, Severity, Spare, Verify, Way
from .errors import Mistake, WrongCluster, syntax_mistake
from .rules import HOSTS, SettingRule, Values, examine
from .tables import (
    Access,
    Env,
    Files,
    GpuSettings,
    HostSettings,
    Jobs,
    Logs,
    NetworkSettings,
    Paths,
    PrecopySettings,
    SnapshotSettings,
    WireSettings,
    WithinSettings,
)
from .timeouts import Timeouts
from .toml_lines import Key, key_lines
from .values import ClusterName, Endpoint, ListenAddress, Network, write_value

__all__ = [
    "Access",
    "Cluster",
    "Compress",
    "Endpoint",
    "Env",
    "FastPathChoice",
    "Files",
    "GpuSettings",
    "HostSettings",
    "Jobs",
    "Logs",
    "NetworkSettings",
    "Outside",
    "Paths",
    "PrecopySettings",
    "Reading",
    "Severity",
    "SnapshotSettings",
    "Spare",
    "Timeouts",
    "Verify",
    "Way",
    "WireSettings",
    "WithinSettings",
    "dump",
    "load",
    "parse",
    "read",
    "settings_of",
    "toml_value",
]

LIMIT = 1 << 20
"""A cluster file has at most this many bytes, which is enough for ten thousand hosts."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The whole file; raises ConfigError for values that cannot be used together."""

    name: ClusterName
    orchestrator: ListenAddress  # where the orchestrator listens
    overlay: Network  # each job gets a /24 of it
    hosts: tuple[HostSettings, ...]  # in the order of the file
    network: NetworkSettings = field(default_factory=NetworkSettings)
    files: Files = field(default_factory=Files)
    env: Env = field(default_factory=Env)
    paths: Paths = field(default_factory=Paths)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    wire: WireSettings = field(default_factory=WireSettings)
    precopy: PrecopySettings = field(default_factory=PrecopySettings)
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)
    within: WithinSettings = field(default_factory=WithinSettings)
    jobs: Jobs = field(default_factory=Jobs)
    logs: Logs = field(default_factory=Logs)
    timeouts: Timeouts = field(default_factory=Timeouts)
    access: Access = field(default_factory=Access)

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        mistakes = [
            Mistake(None, f"{HOSTS}.{name}", "the name twice", "every host once")
            for name in sorted({n for n in names if names.count(n) > 1})
        ]
        mistakes += examine(_chosen(self), SCHEMA, {})[1]
        if mistakes:
            raise WrongCluster(mistakes)

    @property
    def domains(self) -> dict[str, str]:
        """The failure domains of hosts. A host that is not in it is a domain of its own, and no
        domain has the name of a host here."""
        return {host.name: f"domain {host.domain}" for host in self.hosts if host.domain}

    def host(self, name: str) -> HostSettings:
        """The host of that name; raises NotFound with the names of all hosts."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = (host.name for host in self.hosts)
        raise no_such(f'no host "{name}" in cluster "{self.name}"', name, known, "its hosts are")

    @property
    def relay(self) -> HostSettings | None:
        """The host that relays for all capsules; None: each capsule uses the host it is on."""
        if self.network.outside is not Outside.RELAY:
            return None
        if self.network.relay:
            return self.host(self.network.relay)
        return next(host for host in self.hosts if host.address == self.orchestrator.address)

    @cached_property
    def digest(self) -> str:
        """16 hex digits that are equal on two machines if and only if their files mean the same.

        Only values that differ from their defaults count. So the order of tables, comments, and
        defaults that are written out make no difference. A key that an older build does not know
        makes a difference only if its value is not the default.
        """
        tables = settings_of(self)
        hosts = {name: _unlike_defaults(HOSTS, host) for name, host in tables.pop(HOSTS).items()}
        tables["timeouts"] = {}  # their defaults are derived
        settings = {name: _unlike_defaults(name, table) for name, table in tables.items()}
        settings |= {HOSTS: hosts, "timeouts": self.timeouts.unlike_derived}
        settings = {name: table for name, table in settings.items() if table}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_TABLES: dict[str, Any] = {
    "cluster": Cluster,
    HOSTS: HostSettings,
    **{name: kind for name, kind in get_type_hints(Cluster).items() if is_dataclass(kind)},
}


def _settings(table: type[Any]) -> dict[str, SettingRule]:
    """The keys of a table: its fields, except sub-tables and a host's name, which is in the header.
    The field ``pass_`` is the key ``pass``."""
    hints = get_type_hints(table, include_extras=True)
    no_keys = ((Cluster, HOSTS), (HostSettings, "name"))
    settings: dict[str, SettingRule] = {}
    for f in fields(table):
        if f.init and not is_dataclass(hints[f.name]) and (table, f.name) not in no_keys:
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            settings[f.name.rstrip("_")] = SettingRule(f.name, hints[f.name], default)
    return settings


SCHEMA = {name: _settings(table) for name, table in _TABLES.items()}


@dataclass(frozen=True)
class Reading:
    """A cluster, and the line of each of its values."""

    cluster: Cluster
    file: str
    lines: Mapping[Key, int]

    def line(self, *key: str) -> int | None:
        """The line of a key such as ("hosts", "h0", "slots"); None for a default."""
        return self.lines.get(key)


def load(path: str | Path) -> Cluster:
    """Read a cluster file; raises ConfigError listing every mistake in it."""
    return read(path).cluster


def read(path: str | Path) -> Reading:
    """Like :func:`load`, but keeps the lines."""
    try:
        with Path(path).open("rb") as opened:
            data = opened.read(LIMIT + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the cluster file: {error.strerror}",
            hint="--config names the file; docs/cluster.example.toml is one to start from",
        ) from None
    if len(data) > LIMIT:
        found = f"more than {LIMIT} bytes"
        raise WrongCluster([Mistake(None, "", found, "a cluster file")], file=str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"the byte 0x{data[error.start]:02x}"
        raise WrongCluster([Mistake(line, "", found, "UTF-8 text")], file=str(path)) from None
    return parse(text, str(path))


def parse(text: str, file: str = "cluster.toml") -> Reading:
    """Read a cluster from the text of a file; messages call the file ``file``."""
    try:
        tables = _tables(text)
        lines = key_lines(text)
        values, mistakes = examine(tables, SCHEMA, lines)
    except tomllib.TOMLDecodeError as error:
        raise WrongCluster([syntax_mistake(text, error)], file=file) from None
    except RecursionError:
        deep = Mistake(None, "", "tables or arrays nested too deeply", "tables of settings")
        raise WrongCluster([deep], file=file) from None
    if mistakes:
        raise WrongCluster(mistakes, file=file)
    return Reading(_build(values, list(tables[HOSTS])), file, lines)


def _tables(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # Python refuses a number with too many digits
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from None


def _build(values: Values, hosts: list[str]) -> Cluster:
    def table(*at: str) -> dict[str, Any]:
        keys = SCHEMA[at[0]].items()
        return {setting.field: values[*at, key] for key, setting in keys}

    return Cluster(
        **table("cluster"),
        hosts=tuple(HostSettings(name=name, **table(HOSTS, name)) for name in hosts),
        **{
            name: kind(**table(name))
            for name, kind in _TABLES.items()
            if name not in ("cluster", HOSTS)
        },
    )


def settings_of(cluster: Cluster) -> dict[str, Any]:
    """Every setting as TOML would hold it, by table. Settings without a value are left out."""

    def table(name: str, holder: object) -> dict[str, Any]:
        written = {
            key: write_value(setting.kind, getattr(holder, setting.field))
            for key, setting in SCHEMA[name].items()
        }
        return {key: value for key, value in written.items() if value is not None}

    tables: dict[str, Any] = {"cluster": table("cluster", cluster)}
    tables[HOSTS] = {host.name: table(HOSTS, host) for host in cluster.hosts}
    for name in [n for n in _TABLES if n not in tables]:
        tables[name] = table(name, getattr(cluster, name))
    return tables


def _unlike_defaults(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a table that differ from their defaults."""
    return {
        key: value
        for key, value in table.items()
        if (setting := SCHEMA[name][key]).default is MISSING
        or value != write_value(setting.kind, setting.default)
    }


def _chosen(cluster: Cluster) -> dict[str, Any]:
    """The settings without derived timeouts: written out, they would count as given."""
    tables = settings_of(cluster)
    written = tables["timeouts"].items()
    tables["timeouts"] = {k: value for k, value in written if k in cluster.timeouts.given}
    return tables


def dump(cluster: Cluster) -> str:
    """The text of a file that :func:`load` reads back to an equal cluster."""
    tables = _chosen(cluster)
    hosts = tables.pop(HOSTS)
    named = {"cluster": tables.pop("cluster")}
    named |= {f"{HOSTS}.{name}": table for name, table in hosts.items()} | tables
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in table.items())
        for name, table in named.items()
    )


def toml_value(value: object) -> str:
    """One value as TOML writes it, on one line."""
    if isinstance(value, str):
        # TOML has the same escapes as JSON, except DEL, which JSON does not escape.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {toml_value(part)}" for key, part in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
