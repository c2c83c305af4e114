# SPDX-License-Identifier: Apache-2.0
"""The kinds of value a cluster file holds: how each is read, written and described.

A kind turns what TOML gives into what the program uses (``read``) and back (``write``), and says
in words what it takes (``expected``). A value that does not fit raises :class:`Unfit`, which can
name several places inside a list or a table.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .config_errors import shown
from .environment import NAMES
from .toml_lines import Key

ORCHESTRATOR = "orchestrator"
"""The orchestrator's name among the keys, and therefore no host's."""


class Flaw(NamedTuple):
    """One thing wrong inside a value; ``inside`` is the way to it, empty for the value itself."""

    inside: Key
    found: str
    expected: str


class Unfit(ValueError):
    """The value is not of the kind expected."""

    def __init__(self, *flaws: Flaw) -> None:
        super().__init__("; ".join(f"found {f.found}, expected {f.expected}" for f in flaws))
        self.flaws = flaws


class Kind(Protocol):
    """One kind of value."""

    @property
    def expected(self) -> str:
        """What it takes, in words that follow "expected"."""

    def read(self, raw: object) -> Any:
        """From TOML's value to the program's; raises Unfit."""

    def write(self, value: Any) -> Any:
        """From the program's value to TOML's; None leaves the key out."""


class Endpoint(NamedTuple):
    """An IPv4 address and a TCP port."""

    address: str
    port: int

    @property
    def url(self) -> str:
        """As ZeroMQ wants it."""
        return f"tcp://{self}"

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def _unfit(raw: object, expected: str) -> Unfit:
    return Unfit(Flaw((), shown(raw), expected))


@dataclass(frozen=True)
class Text:
    """A string that matches the pattern from end to end."""

    pattern: str
    expected: str

    def read(self, raw: object) -> str:
        if isinstance(raw, str) and re.fullmatch(self.pattern, raw):
            return raw
        raise _unfit(raw, self.expected)

    def write(self, value: str) -> str:
        return value


@dataclass(frozen=True)
class HostOrNone:
    """A host's name, or "" for none."""

    expected: str = 'the name of a host, or ""'

    def read(self, raw: object) -> str:
        if raw == "":
            return ""
        try:
            return HOST_NAME.read(raw)
        except Unfit:
            raise _unfit(raw, self.expected) from None

    def write(self, value: str) -> str:
        return value


@dataclass(frozen=True)
class WholeNumber:
    """An integer from ``low`` to ``high``, both included."""

    low: int
    high: int

    @property
    def expected(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def read(self, raw: object) -> int:
        if type(raw) is int and self.low <= raw <= self.high:  # bool is an int to isinstance
            return raw
        raise _unfit(raw, self.expected)

    def write(self, value: int) -> int:
        return value


@dataclass(frozen=True)
class Flag:
    """true or false."""

    expected: str = "true or false"

    def read(self, raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        raise _unfit(raw, self.expected)

    def write(self, value: bool) -> bool:
        return value


@dataclass(frozen=True)
class Share:
    """A part of a whole, from ``low`` to ``high``."""

    low: float
    high: float

    @property
    def expected(self) -> str:
        return f"a share from {self.low:g} to {self.high:g}, such as 0.2 for a fifth"

    def read(self, raw: object) -> float:
        if isinstance(raw, float) and self.low <= raw <= self.high:
            return raw
        raise _unfit(raw, self.expected)

    def write(self, value: float | None) -> float | None:
        return value


@dataclass(frozen=True)
class Seconds:
    """A span of time; whole numbers are taken too."""

    low: float = 0.01
    high: float = 86400.0

    @property
    def expected(self) -> str:
        return f"a number of seconds from {self.low:g} to {self.high:g}"

    def read(self, raw: object) -> float:
        # A comparison with nan is never true. TOML's true is no number, though Python's is.
        if type(raw) is not bool and isinstance(raw, int | float) and self.low <= raw <= self.high:
            return float(raw)
        raise _unfit(raw, self.expected)

    def write(self, value: float | None) -> float | None:
        return None if value is None else float(value)


@dataclass(frozen=True)
class Size:
    """An amount of memory, in bytes once read. None, no limit, is written by leaving it out."""

    expected: str = 'a size such as "8GB" (units: B KB MB GB TB)'
    low: int = 1

    def read(self, raw: object) -> int:
        match = re.fullmatch(r"([0-9]{1,19})(?:\.([0-9]{1,6}))? ?([KMGT]i?)?B", str(raw))
        if isinstance(raw, str) and match:
            whole, part, prefix = match[1], match[2] or "", match[3] or ""
            power = " KMGT".index(prefix[:1] or " ")
            unit: int = (1024 if prefix.endswith("i") else 1000) ** power
            size, rest = divmod(int(whole + part) * unit, int(10 ** len(part)))
            if rest == 0 and self.low <= size < 2**63:
                return size
        raise _unfit(raw, self.expected)

    def write(self, value: int | None) -> str | None:
        if value is None:
            return None
        for base, between in ((1000, ""), (1024, "i")):  # binary only where decimal is not exact
            for power in (4, 3, 2, 1):
                if value and value % base**power == 0:
                    return f"{value // base**power}{'KMGT'[power - 1]}{between}B"
        return f"{value}B"


@dataclass(frozen=True)
class Address:
    """An IPv4 address that one machine can have."""

    expected: str = 'an IPv4 address of this host such as "10.88.0.10"'

    def read(self, raw: object) -> str:
        try:
            address = IPv4Address(raw if isinstance(raw, str) else "")
        except AddressValueError:
            raise _unfit(raw, self.expected) from None
        if address.is_multicast or address.is_reserved or address in IPv4Network("0.0.0.0/8"):
            raise _unfit(raw, self.expected)
        return str(address)

    def write(self, value: str) -> str:
        return value


@dataclass(frozen=True)
class AddressAndPort:
    """``address:port``, where somebody listens."""

    expected: str = 'an IPv4 address and a port such as "10.88.0.2:7400"'

    def read(self, raw: object) -> Endpoint:
        match = re.fullmatch(r"([0-9.]+):([0-9]{1,5})", raw if isinstance(raw, str) else "")
        if not match:
            raise _unfit(raw, self.expected)
        try:
            return Endpoint(Address().read(match[1]), PORT.read(int(match[2])))
        except Unfit:
            raise _unfit(raw, f"{self.expected} (port 1 to 65535)") from None

    def write(self, value: Endpoint) -> str:
        return str(value)


@dataclass(frozen=True)
class Network:
    """An IPv4 network that holds at least one /24, the size of a job's share."""

    expected: str = 'an IPv4 network of /8 to /24 such as "10.99.0.0/16"'

    def read(self, raw: object) -> IPv4Network:
        text = raw if isinstance(raw, str) else ""
        try:
            network = IPv4Network(text, strict=False)
        except ValueError:
            raise _unfit(raw, self.expected) from None
        if "/" not in text or not 8 <= network.prefixlen <= 24:
            raise _unfit(raw, self.expected)
        if str(network.network_address) != text.partition("/")[0]:
            raise _unfit(raw, f'the network\'s own address: "{network}"')
        first = network.network_address
        if first.is_multicast or first.is_reserved or first.is_loopback or not int(first) >> 24:
            raise _unfit(raw, f"{self.expected}, of unicast addresses")
        return network

    def write(self, value: IPv4Network) -> str:
        return str(value)


@dataclass(frozen=True)
class Choice:
    """One word out of a few."""

    words: type[StrEnum]

    @property
    def expected(self) -> str:
        *others, last = (f'"{w.value}"' for w in self.words)
        return f"{', '.join(others)} or {last}" if others else last

    def read(self, raw: object) -> StrEnum:
        if isinstance(raw, str) and raw in {w.value for w in self.words}:
            return self.words(raw)
        raise _unfit(raw, self.expected)

    def write(self, value: StrEnum) -> str:
        return str(value)


@dataclass(frozen=True)
class AbsolutePath:
    """A path from the root. With ``may_be_empty`` the empty string is read as None."""

    may_be_empty: bool = False

    @property
    def expected(self) -> str:
        empty = ', or "" to search for it' if self.may_be_empty else ""
        return f'an absolute path such as "/var/lib/liveshift"{empty}'

    def read(self, raw: object) -> Path | None:
        if raw == "" and self.may_be_empty:
            return None
        if not isinstance(raw, str) or not raw.startswith("/") or "\0" in raw:
            raise _unfit(raw, self.expected)
        plain = "/" + posixpath.normpath(raw).lstrip("/")
        if ".." in raw.split("/"):
            # Through a symbolic link ".." leads elsewhere than the text says.
            raise _unfit(raw, f'an absolute path without ".." (perhaps "{plain}")')
        return Path(plain)

    def write(self, value: Path | None) -> str:
        return "" if value is None else str(value)


@dataclass(frozen=True)
class OrFalse:
    """A value of a kind, or false, which is read as None."""

    kind: Kind

    @property
    def expected(self) -> str:
        return f"{self.kind.expected}, or false"

    def read(self, raw: object) -> Any:
        if raw is False:
            return None
        try:
            return self.kind.read(raw)
        except Unfit:
            raise _unfit(raw, self.expected) from None

    def write(self, value: Any) -> Any:
        return False if value is None else self.kind.write(value)


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind, each listed once."""

    kind: Kind

    @property
    def expected(self) -> str:
        return f"a list, each element {self.kind.expected}"

    def read(self, raw: object) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise _unfit(raw, self.expected)
        values: list[Any] = []
        flaws: list[Flaw] = []
        for index, element in enumerate(raw):
            try:
                value = self.kind.read(element)
            except Unfit as unfit:
                flaws += [Flaw((index, *f.inside), f.found, f.expected) for f in unfit.flaws]
                continue
            if value in values:
                flaws.append(Flaw((index,), shown(element), "every element to be listed once"))
            values.append(value)
        if flaws:
            raise Unfit(*flaws)
        return tuple(values)

    def write(self, value: tuple[Any, ...]) -> list[Any]:
        return [self.kind.write(element) for element in value]


@dataclass(frozen=True)
class TableOf:
    """A table with free key names of one kind and values of another."""

    name: Kind
    kind: Kind

    @property
    def expected(self) -> str:
        return f"a table, each value {self.kind.expected}"

    def read(self, raw: object) -> dict[str, Any]:
        if not isinstance(raw, dict):
            raise _unfit(raw, self.expected)
        flaws: list[Flaw] = []
        values: dict[str, Any] = {}
        for name, element in raw.items():
            for kind, part in ((self.name, name), (self.kind, element)):
                try:
                    values[name] = kind.read(part)
                except Unfit as unfit:
                    flaws += [Flaw((name, *f.inside), f.found, f.expected) for f in unfit.flaws]
        if flaws:
            raise Unfit(*flaws)
        return values

    def write(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.kind.write(element) for name, element in value.items()}


PORT = WholeNumber(1, 65535)
CLUSTER_NAME = Text(r"[a-z0-9-]{1,20}", "1 to 20 of the characters a-z, 0-9 and -")
HOST_NAME = Text(
    rf"(?!{ORCHESTRATOR}$)[a-z0-9](?:[a-z0-9-]{{0,61}}[a-z0-9])?",
    f'a DNS label of at most 63 characters (a-z, 0-9 and, inside, -) other than "{ORCHESTRATOR}"',
)
USER_OR_GROUP = Text(
    r"@?[^\s@:,\0\ud800-\udfff][^\s:,\0\ud800-\udfff]*",
    'the name of a user such as "alice", or of a group such as "@ops"',
)
PATTERN = Text(r"[^=\0]+", 'a pattern of variable names such as "NCCL_*"')
VARIABLE = Text(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable (A-Z, a-z, 0-9 and _)")
VALUE = Text(r"(?s:[^\0\ud800-\udfff]*)", 'a string such as "1"')
MOVABLE_NAME = Text(
    "|".join(NAMES), f"a variable that liveshift gives a default, one of {', '.join(NAMES)}"
)
VALUE_OR_NONE = OrFalse(VALUE)
