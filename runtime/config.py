# SPDX-License-Identifier: Apache-2.0
"""One TOML file describes one cluster; this is what it says, read and checked.

``load`` gives a frozen :class:`Cluster`; ``read`` also says on which line each value stands;
``dump`` writes the same format back. Every wrong value raises ConfigError with file, line, what
was found and what was expected, all of them in one message. A cluster made in code is checked by
the same rules. ``docs/cluster.example.toml`` explains every key.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from ..errors import ConfigError, no_such
from .access import Role
from .config_errors import Mistake, WrongCluster, syntax_mistake
from .config_jobs import Jobs
from .config_logs import Logs
from .config_memory import Compress, Precopy, Way, WireSettings
from .config_network import NetworkSettings, Outside
from .config_notice import Severity, WithinSettings
from .config_rules import HOSTS, Setting, Values, examine
from .config_values import (
    CLUSTER_NAME,
    MOVABLE_NAME,
    PATTERN,
    PORT,
    USER_OR_GROUP,
    VALUE,
    VALUE_OR_NONE,
    VARIABLE,
    AbsolutePath,
    Address,
    AddressAndPort,
    Choice,
    Endpoint,
    ListOf,
    Network,
    Size,
    TableOf,
    WholeNumber,
)
from .timeouts import Timeouts
from .toml_lines import Key, key_lines

__all__ = [
    "Access",
    "Cluster",
    "Compress",
    "Endpoint",
    "Env",
    "FastPath",
    "Files",
    "Gpu",
    "Host",
    "Jobs",
    "Logs",
    "NetworkSettings",
    "Outside",
    "Paths",
    "Precopy",
    "Reading",
    "Severity",
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
"""Bytes of a cluster file: room for ten thousand hosts."""


class Spare(StrEnum):
    """Whether a host may receive capsules that move."""

    FLOATING = "floating"  # jobs start here, and any free slot may receive
    DEDICATED = "dedicated"  # kept idle: only receives migrations
    NONE = "none"  # jobs start here; never receives


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the cluster, from its table [hosts.NAME]."""

    name: str
    address: Annotated[str, Address()]  # underlay: VXLAN and data
    data_port: Annotated[int, PORT] = 7401
    pages_port: Annotated[int, PORT] = 7402
    slots: Annotated[int, WholeNumber(1, 64)] = 1  # capsules that may run here at once
    spare: Annotated[Spare, Choice(Spare)] = Spare.FLOATING
    memory: Annotated[int | None, Size()] = None  # bytes for incoming capsules; None: no limit

    @property
    def data(self) -> Endpoint:
        """Where this host's agent listens for images."""
        return Endpoint(self.address, self.data_port)

    @property
    def pages(self) -> Endpoint:
        """Where it listens for pages of memory."""
        return Endpoint(self.address, self.pages_port)


@dataclass(frozen=True, kw_only=True)
class Files:
    """Which files a move leaves alone and which it takes along.

    A listed path covers what is on its own filesystem, not mounts below it. Where one listed path
    lies inside another, the longer one decides.
    """

    shared: Annotated[tuple[Path, ...], ListOf(AbsolutePath())] = ()
    carried: Annotated[tuple[Path, ...], ListOf(AbsolutePath())] = ()


@dataclass(frozen=True, kw_only=True)
class Env:
    """Which of the caller's variables reach a job, and what is set besides (environment.py)."""

    pass_: Annotated[tuple[str, ...], ListOf(PATTERN)] = ("*",)
    drop: Annotated[tuple[str, ...], ListOf(PATTERN)] = ()
    set_: Annotated[Mapping[str, str], TableOf(VARIABLE, VALUE)] = field(
        default_factory=dict, hash=False
    )
    defaults: Annotated[Mapping[str, str | None], TableOf(MOVABLE_NAME, VALUE_OR_NONE)] = field(
        default_factory=dict, hash=False
    )  # in the place of liveshift's own; None: set nothing

    def select(self, caller: Mapping[str, str]) -> dict[str, str]:
        """The job's variables: those of the caller that pass and are not dropped, then ``set``."""
        passed = {
            name: value
            for name, value in caller.items()
            if any(fnmatchcase(name, pattern) for pattern in self.pass_)
            and not any(fnmatchcase(name, pattern) for pattern in self.drop)
        }
        return passed | dict(self.set_)


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Where liveshift keeps its own things on every host."""

    state: Annotated[Path, AbsolutePath()] = Path("/var/lib/liveshift")  # survives a reboot
    run: Annotated[Path, AbsolutePath()] = Path("/run/liveshift")  # sockets, gone with a reboot
    keys: Annotated[Path, AbsolutePath()] = Path("/etc/liveshift/keys")
    criu: Annotated[Path | None, AbsolutePath(may_be_empty=True)] = None  # None: search


class FastPath(StrEnum):
    """How device memory leaves a host."""

    AUTO = "auto"  # from the GPU to the wire, where the host's probe says that the driver bears it
    OFF = "off"  # into host memory, by the driver's own checkpoint


class Verify(StrEnum):
    """Which bytes of device memory are compared after a move."""

    SAMPLED = "sampled"
    FULL = "full"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """How ranks that hold GPUs move; the lock's deadline is ``timeouts.gpu_lock``."""

    libraries: Annotated[Path | None, AbsolutePath(may_be_empty=True)] = None
    fast_path: Annotated[FastPath, Choice(FastPath)] = FastPath.AUTO
    verify: Annotated[Verify, Choice(Verify)] = Verify.SAMPLED


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who may do what besides root and a job's owner: users, or groups as "@name"."""

    view: Annotated[tuple[str, ...], ListOf(USER_OR_GROUP)] = ()
    operate: Annotated[tuple[str, ...], ListOf(USER_OR_GROUP)] = ()
    admin: Annotated[tuple[str, ...], ListOf(USER_OR_GROUP)] = ()
    relayed: Annotated[Role, Choice(Role)] = Role.USER  # the most an ask through an agent counts


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The whole file; raises ConfigError when made of values that cannot be used together."""

    name: Annotated[str, CLUSTER_NAME]
    orchestrator: Annotated[Endpoint, AddressAndPort()]  # where the orchestrator listens
    overlay: Annotated[IPv4Network, Network()]  # each job gets a /24 of it
    hosts: tuple[Host, ...]  # in the order of the file
    network: NetworkSettings = field(default_factory=NetworkSettings)
    files: Files = field(default_factory=Files)
    env: Env = field(default_factory=Env)
    paths: Paths = field(default_factory=Paths)
    gpu: Gpu = field(default_factory=Gpu)
    wire: WireSettings = field(default_factory=WireSettings)
    precopy: Precopy = field(default_factory=Precopy)
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

    def host(self, name: str) -> Host:
        """The host of that name; raises NotFound, naming those there are."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = (host.name for host in self.hosts)
        raise no_such(f'no host "{name}" in cluster "{self.name}"', name, known, "its hosts are")

    @property
    def relay(self) -> Host | None:
        """The host through which capsules reach the world; None: each uses the host it is on."""
        if self.network.outside is not Outside.RELAY:
            return None
        if self.network.relay:
            return self.host(self.network.relay)
        return next(host for host in self.hosts if host.address == self.orchestrator.address)

    @cached_property
    def digest(self) -> str:
        """Equal on two machines if and only if their files say the same (16 hex digits).

        Only what differs from its default counts. So the order of tables, comments, and defaults
        that are written out make no difference. A key that an older build does not know makes a
        difference once its value is not the default.
        """
        tables = settings_of(self)
        hosts = {name: _unlike_defaults(HOSTS, host) for name, host in tables.pop(HOSTS).items()}
        settings = {name: _unlike_defaults(name, table) for name, table in tables.items()}
        settings |= {HOSTS: hosts, "timeouts": self.timeouts.unlike_derived}
        settings = {name: table for name, table in settings.items() if table}
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_TABLES: dict[str, type[Any]] = {
    "cluster": Cluster,
    HOSTS: Host,
    "network": NetworkSettings,
    "files": Files,
    "env": Env,
    "paths": Paths,
    "gpu": Gpu,
    "wire": WireSettings,
    "precopy": Precopy,
    "within": WithinSettings,
    "jobs": Jobs,
    "logs": Logs,
    "timeouts": Timeouts,
    "access": Access,
}


def _settings(table: type[Any]) -> dict[str, Setting]:
    """The keys of a table: the annotated fields; ``pass_`` is written ``pass`` in the file."""
    hints = get_type_hints(table, include_extras=True)
    settings: dict[str, Setting] = {}
    for f in fields(table):
        if hasattr(hints[f.name], "__metadata__"):
            made = f.default_factory() if f.default_factory is not MISSING else f.default
            settings[f.name.rstrip("_")] = Setting(hints[f.name].__metadata__[0], made)
    return settings


SCHEMA = {name: _settings(table) for name, table in _TABLES.items()}


@dataclass(frozen=True)
class Reading:
    """A cluster together with where each of its values stands."""

    cluster: Cluster
    file: str
    lines: Mapping[Key, int]

    def line(self, *key: str) -> int | None:
        """The line of a key such as ("hosts", "h0", "slots"); None when it is a default."""
        return self.lines.get(key)


def load(path: str | Path) -> Cluster:
    """Read a cluster file; raises ConfigError listing every mistake in it."""
    return read(path).cluster


def read(path: str | Path) -> Reading:
    """Like :func:`load`, keeping the lines."""
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
    """Read a cluster from the text of a file; ``file`` is the name used in messages."""
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
    except ValueError as error:  # a number that Python makes no int of
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from None


def _build(values: Values, hosts: list[str]) -> Cluster:
    def table(*at: str) -> dict[str, Any]:
        names = {f.name.rstrip("_"): f.name for f in fields(_TABLES[at[0]])}
        return {names[str(k[-1])]: v for k, v in values.items() if k[:-1] == at}

    return Cluster(
        **table("cluster"),
        hosts=tuple(Host(name=name, **table(HOSTS, name)) for name in hosts),
        **{
            name: kind(**table(name))
            for name, kind in _TABLES.items()
            if name not in ("cluster", HOSTS)
        },
    )


def settings_of(cluster: Cluster) -> dict[str, Any]:
    """Every setting as TOML would give it, by table; what has no value (no limit) is left out."""

    def table(name: str, holder: object) -> dict[str, Any]:
        written = {
            f.name.rstrip("_"): SCHEMA[name][f.name.rstrip("_")].kind.write(getattr(holder, f.name))
            for f in fields(_TABLES[name])
            if f.name.rstrip("_") in SCHEMA[name]
        }
        return {key: value for key, value in written.items() if value is not None}

    tables: dict[str, Any] = {"cluster": table("cluster", cluster)}
    tables[HOSTS] = {host.name: table(HOSTS, host) for host in cluster.hosts}
    for name in [n for n in _TABLES if n not in tables]:
        tables[name] = table(name, getattr(cluster, name))
    return tables


def _unlike_defaults(name: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """What a table says beyond the defaults of its keys."""
    return {
        key: value
        for key, value in table.items()
        if (setting := SCHEMA[name][key]).default is MISSING
        or value != setting.kind.write(setting.default)
    }


def _chosen(cluster: Cluster) -> dict[str, Any]:
    """The settings less the timeouts that are derived: written out, they would no longer be."""
    tables = settings_of(cluster)
    written = tables["timeouts"].items()
    tables["timeouts"] = {k: value for k, value in written if k in cluster.timeouts.given}
    return tables


def dump(cluster: Cluster) -> str:
    """The cluster as a file that :func:`load` reads back to an equal cluster."""
    tables = _chosen(cluster)
    hosts = tables.pop(HOSTS)
    named = {"cluster": tables.pop("cluster")}
    named |= {f"{HOSTS}.{name}": table for name, table in hosts.items()} | tables
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in table.items())
        for name, table in named.items()
    )


def toml_value(value: object) -> str:
    """One value in TOML's spelling, on one line."""
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON lets stand.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {toml_value(part)}" for key, part in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
