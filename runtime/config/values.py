# SPDX-License-Identifier: Apache-2.0
"""The types of the cluster file's values, and how one value is checked, read and written.

A type is declared once: the program's type, annotated with what the file may hold. msgspec checks
numbers, strings, true or false, and choices by that annotation. TOML has no type for an address, a
network, a size or a path. These are strings in the file, and a :class:`Spelling` reads them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from msgspec import Meta, ValidationError, convert

from .errors import shown

ORCHESTRATOR = "orchestrator"
"""The orchestrator's name among the keys. No host may have it."""

SHORTEST_S, LONGEST_S = 0.01, 86400.0
"""The least and greatest number of seconds that the file may hold."""


class Unfit(ValueError):
    """A value that does not fit its type."""

    def __init__(self, raw: object, expected: str) -> None:
        self.found, self.expected = shown(raw), expected
        super().__init__(f"found {self.found}, expected {expected}")


class Spelling(NamedTuple):
    """How the file spells a type that TOML lacks.

    ``read`` converts TOML's value, of the type ``raw``, to the program's value. It raises
    ValueError, or Unfit where it can say better than ``expected`` what would fit.
    """

    expected: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = str
    raw: Any = str


class Endpoint(NamedTuple):
    """An IPv4 address and a TCP port."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def read_value(kind: Any, raw: object) -> Any:
    """Convert TOML's ``raw`` (no list or table) to the program's value; raises Unfit."""
    _, annotation = parts(kind)
    try:
        if isinstance(annotation, Spelling):
            return annotation.read(convert(raw, annotation.raw))
        return convert(raw, kind)
    except Unfit:
        raise
    except (ValidationError, ValueError):
        raise Unfit(raw, expected(kind)) from None


def write_value(kind: Any, value: Any) -> Any:
    """Convert the program's value to TOML's. None: the file leaves the key out."""
    if value is None and get_origin(kind) is not Annotated:
        return None
    base, annotation = parts(kind)
    if isinstance(annotation, Spelling):
        return annotation.write(value)
    if isinstance(value, tuple):
        return [write_value(get_args(base)[0], element) for element in value]
    if isinstance(value, Mapping):
        return {name: write_value(get_args(base)[1], element) for name, element in value.items()}
    if isinstance(value, str):
        return str(value)  # a choice has its own string class
    return float(value) if base is float else value


def expected(kind: Any) -> str:
    """What fits, in words that follow "expected" in an error."""
    base, annotation = parts(kind)
    if isinstance(annotation, Spelling):
        return annotation.expected
    if annotation and annotation.description:
        return annotation.description
    if annotation:
        what = "a whole number" if base is int else "a number of seconds"
        return f"{what} from {annotation.ge:g} to {annotation.le:g}"
    if get_origin(base) is tuple:
        return f"a list, each element {expected(get_args(base)[0])}"
    if get_origin(base) is Mapping:
        return f"a table, each value {expected(get_args(base)[1])}"
    *others, last = ("true", "false") if base is bool else (f'"{word}"' for word in base)
    return f"{', '.join(others)} or {last}"


def parts(kind: Any) -> tuple[Any, Meta | Spelling | None]:
    """The program's type and its annotation, without an "or None" around them. That "or None" says
    that the key may be left out, because TOML has no null."""
    if get_origin(kind) in (Union, UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is Annotated:
        return kind.__origin__, kind.__metadata__[0]
    return kind, None


def read_size(raw: str, low: int = 1) -> int:
    """Parse a size in bytes, which must be at least ``low``."""
    match = re.fullmatch(r"([0-9]{1,19})(?:\.([0-9]{1,6}))? ?([KMGT]i?)?B", raw)
    if match:
        integer, part, prefix = match[1], match[2] or "", match[3] or ""
        power = " KMGT".index(prefix[:1] or " ")
        unit: int = (1024 if prefix.endswith("i") else 1000) ** power
        size, rest = divmod(int(integer + part) * unit, int(10 ** len(part)))
        if rest == 0 and low <= size < 2**63:
            return size
    raise ValueError


def write_size(value: int) -> str:
    """Write a number of bytes as the file spells it."""
    for base, between in ((1000, ""), (1024, "i")):  # binary only if not exact in decimal
        for power in (4, 3, 2, 1):
            if value and value % base**power == 0:
                return f"{value // base**power}{'KMGT'[power - 1]}{between}B"
    return f"{value}B"


def read_duration(raw: str) -> float:
    """Return the seconds in ``90``, ``90s``, ``1.5m``, ``2h`` or ``300ms``; raises ValueError for
    all else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?", raw)
    if not match:
        raise ValueError
    return float(match[1]) * {"ms": 0.001, None: 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _read_interval(raw: str | float) -> float | Literal["auto"] | None:
    if raw == "auto":
        return "auto"
    if raw == "off":
        return None
    return convert(read_duration(raw) if isinstance(raw, str) else raw, _Interval)


def _read_lifetime(raw: str | float) -> float:
    if isinstance(raw, str):
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([hd])", raw)
        if not match:
            raise ValueError
        raw = float(match[1]) * {"h": 3600, "d": 86400}[match[2]]
    if not 60 <= raw <= 100 * 365 * 86400:
        raise ValueError
    return float(raw)


def _read_address(raw: str) -> str:
    address = IPv4Address(raw)
    if address.is_multicast or address.is_reserved or address in IPv4Network("0.0.0.0/8"):
        raise ValueError
    return str(address)


def _read_endpoint(raw: str) -> Endpoint:
    match = re.fullmatch(r"([0-9.]+):([0-9]{1,5})", raw)
    if not match:
        raise ValueError
    try:
        return Endpoint(_read_address(match[1]), read_value(Port, int(match[2])))
    except ValueError:
        raise Unfit(raw, f"{_LISTENS} (port 1 to 65535)") from None


def _read_network(raw: str) -> IPv4Network:
    network = IPv4Network(raw, strict=False)
    if "/" not in raw or not 8 <= network.prefixlen <= 24:
        raise ValueError
    first = network.network_address
    if str(first) != raw.partition("/")[0]:
        raise Unfit(raw, f'the network\'s own address: "{network}"')
    if first.is_multicast or first.is_reserved or first.is_loopback or not int(first) >> 24:
        raise Unfit(raw, f"{_NETWORK}, of unicast addresses")
    return network


def _read_path(raw: str) -> Path:
    if not raw.startswith("/") or "\0" in raw:
        raise ValueError
    plain = "/" + posixpath.normpath(raw).lstrip("/")
    if ".." in raw.split("/"):
        # ".." after a symbolic link leads to another place than the text says.
        raise Unfit(raw, f'an absolute path without ".." (perhaps "{plain}")')
    return Path(plain)


def _read_command(raw: list[str]) -> tuple[str, ...]:
    if any("\0" in word for word in raw) or (raw and not raw[0].startswith("/")):
        raise ValueError
    return tuple(raw)


Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(ge=SHORTEST_S, le=LONGEST_S)]
_SIZE = 'a size such as "8GB" (units: B KB MB GB TB)'
Size = Annotated[int, Spelling(_SIZE, read_size, write_size)]
LEAST_INTERVAL_S = 1.0
_Interval = Annotated[float, Meta(ge=LEAST_INTERVAL_S, le=LONGEST_S)]
Interval = Annotated[
    float | Literal["auto"] | None,
    Spelling(
        f"a time of {LEAST_INTERVAL_S:g} to {LONGEST_S:g} seconds such as"
        ' 90, "90s", "5m" or "1h", or "auto" or "off"',
        _read_interval,
        lambda every: "off" if every is None else every,
        raw=str | float,
    ),
]
_LIFETIME = 'a time such as "1000h" or "42d", or a number of seconds, of 1 minute to 100 years'
Lifetime = Annotated[float, Spelling(_LIFETIME, _read_lifetime, float, raw=str | float)]
_ADDRESS = 'an IPv4 address of this host such as "10.88.0.10"'
Address = Annotated[str, Spelling(_ADDRESS, _read_address)]
_LISTENS = 'an IPv4 address and a port such as "10.88.0.2:7400"'
ListenAddress = Annotated[Endpoint, Spelling(_LISTENS, _read_endpoint)]
_NETWORK = 'an IPv4 network of /8 to /24 such as "10.99.0.0/16"'
Network = Annotated[IPv4Network, Spelling(_NETWORK, _read_network)]
_PATH = 'an absolute path such as "/var/lib/liveshift"'
AbsolutePath = Annotated[Path, Spelling(_PATH, _read_path)]
PathOrSearch = Annotated[
    Path | None,
    Spelling(
        f'{_PATH}, or "" to search for it',
        lambda raw: _read_path(raw) if raw else None,
        lambda path: str(path or ""),
    ),
]
Command = Annotated[
    tuple[str, ...],
    Spelling(
        'a list of strings such as ["/usr/local/bin/notify", "--all"], the first of which is an'
        " absolute path, or [] for none",
        _read_command,
        list,
        raw=list[str],
    ),
]
ClusterName = Annotated[
    str,
    Meta(pattern=r"\A[a-z0-9-]{1,20}\Z", description="1 to 20 of the characters a-z, 0-9 and -"),
]
_LABEL = rf"(?!{ORCHESTRATOR}\Z)[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?"
HostName = Annotated[
    str,
    Meta(
        pattern=rf"\A{_LABEL}\Z",
        description="a DNS label of at most 63 characters (a-z, 0-9 and, inside, -) other than"
        f' "{ORCHESTRATOR}"',
    ),
]
HostNameOrNone = Annotated[
    str, Meta(pattern=rf"\A(?:{_LABEL})?\Z", description='the name of a host, or ""')
]
DomainOrNone = Annotated[
    str,
    Meta(
        pattern=rf"\A(?:{_LABEL})?\Z",
        description='the name of a failure domain such as "rack-3", written like that of a host,'
        ' or ""',
    ),
]
UserOrGroup = Annotated[
    str,
    Meta(
        pattern=r"\A@?[^\s@:,\0\ud800-\udfff][^\s:,\0\ud800-\udfff]*\Z",
        description='the name of a user such as "alice", or of a group such as "@ops"',
    ),
]
Pattern = Annotated[
    str, Meta(pattern=r"\A[^=\0]+\Z", description='a pattern of variable names such as "NCCL_*"')
]
Variable = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\Z",
        description="the name of a variable (A-Z, a-z, 0-9 and _)",
    ),
]
_VALUE = 'a string such as "1"'
Value = Annotated[str, Meta(pattern=r"\A[^\0\ud800-\udfff]*\Z", description=_VALUE)]
ValueOrFalse = Annotated[
    str | None,
    Spelling(
        f"{_VALUE}, or false",
        lambda raw: None if raw is False else convert(raw, Value),
        lambda value: False if value is None else value,
        raw=str | bool,
    ),
]
