# SPDX-License-Identifier: Apache-2.0
"""The rules of a cluster file: known keys, fitting values, and values that agree.

``examine`` checks everything and collects every mistake. So msgspec gets one value at a time: of a
whole table it would name only the first mistake. Values that could be read are checked against each
other even when others could not. So one run shows all that must be corrected.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from ipaddress import IPv4Address
from typing import Any, get_args, get_origin

from .errors import NOTHING, Mistake, dotted, shown
from .timeouts import DERIVATIONS, DERIVED, breaches
from .toml_lines import Key
from .values import HostName, Spelling, Unfit, expected, parts, read_value, write_value

HOSTS = "hosts"
"""The only table of tables: ``[hosts.NAME]``."""
PORTS = ("data_port", "pages_port")
"""The keys that hold a host's ports, all of them on its one address."""


@dataclass(frozen=True)
class SettingRule:
    """One key of a table: the field that holds it, its type, and the default of the field.

    A default of MISSING means that the key must be there.
    """

    field: str
    kind: Any
    default: Any = MISSING


Schema = Mapping[str, Mapping[str, SettingRule]]
"""The settings of each table. Those under HOSTS hold for each host."""

Values = dict[Key, Any]
"""Every value that could be read, defaults included: (table, key) or (HOSTS, name, key)."""

Contradiction = tuple[Key, str]
"""A key whose value conflicts with other values, and what was expected of it."""


def examine(
    tables: Mapping[str, Any], schema: Schema, lines: Mapping[Key, int]
) -> tuple[Values, list[Mistake]]:
    """Read the tables by the schema. ``lines`` may be empty if the tables come from no file."""
    reading = _Examination(schema, lines)
    reading.top(tables)
    for key, text in contradictions(reading.values, reading.place):
        kind = schema[str(key[0])][str(key[-1])].kind
        reading.mistake(key, shown(write_value(kind, reading.values[key])), text)
    return reading.values, reading.mistakes


class _Examination:
    def __init__(self, schema: Schema, lines: Mapping[Key, int]) -> None:
        self.schema = schema
        self.lines = lines
        self.values: Values = {}
        self.mistakes: list[Mistake] = []

    def top(self, tables: Mapping[str, Any]) -> None:
        for name in tables:
            if name not in self.schema:
                what = "table" if isinstance(tables[name], dict) else "key"
                self._unknown((name,), what, self.schema)
        for name, settings in self.schema.items():
            found = tables.get(name, NOTHING if name in ("cluster", HOSTS) else {})
            if name != HOSTS:
                self._table((name,), found, settings)
            elif not isinstance(found, dict) or not found:
                self.mistake((HOSTS,), shown(found), f"at least one table [{HOSTS}.NAME]")
            else:
                for host, table in found.items():
                    self._read(HostName, host, (HOSTS, host))
                    self._table((HOSTS, host), table, settings)

    def _table(self, at: Key, table: object, settings: Mapping[str, SettingRule]) -> None:
        if not isinstance(table, dict):
            self.mistake(at, shown(table), f"a table [{dotted(at)}]")
            return
        for name in table:
            if name not in settings:
                self._unknown((*at, name), "key", settings)
        for name, setting in settings.items():
            key = (*at, name)
            if name in table:
                value = self._read(setting.kind, table[name], key)
                if value is not NOTHING:
                    self.values[key] = value
            elif setting.default is MISSING:
                self.mistake(key, shown(NOTHING), expected(setting.kind))
            else:
                self.values[key] = setting.default

    def _read(self, kind: Any, raw: object, at: Key) -> Any:
        """The value; NOTHING if it is wrong, after noting each mistake in it."""
        base, annotation = parts(kind)
        whole = isinstance(annotation, Spelling)  # which reads the list itself
        if get_origin(base) is tuple and isinstance(raw, list) and not whole:
            values: list[Any] = []
            for index, element in enumerate(raw):
                value = self._read(get_args(base)[0], element, (*at, index))
                if value is not NOTHING and value in values:
                    once = "every element to be listed once"
                    self.mistake((*at, index), shown(element), once)
                    value = NOTHING
                values.append(value)
            return NOTHING if NOTHING in values else tuple(values)
        if get_origin(base) is Mapping and isinstance(raw, dict):
            of_name, of_value = get_args(base)
            table = {
                self._read(of_name, name, (*at, name)): self._read(of_value, value, (*at, name))
                for name, value in raw.items()
            }
            return NOTHING if NOTHING in (*table, *table.values()) else table
        try:
            return read_value(kind, raw)
        except Unfit as unfit:
            self.mistake(at, unfit.found, unfit.expected)
            return NOTHING

    def _unknown(self, key: Key, what: str, known: Mapping[str, Any]) -> None:
        name = str(key[-1])
        near = difflib.get_close_matches(name, known, n=1)
        homes = [table for table, settings in self.schema.items() if name in settings]
        if near:
            hint = f' (did you mean "{near[0]}"?)'
        elif homes:
            places = (f"[{table}.NAME]" if table == HOSTS else f"[{table}]" for table in homes)
            hint = f' ("{name}" belongs in {" or ".join(places)})'
        else:
            hint = ""
        self.mistake(key, f"an unknown {what}", f"one of {', '.join(known)}{hint}")

    def mistake(self, key: Key, found: str, expected: str) -> None:
        self.mistakes.append(Mistake(self._line(key), dotted(key), found, expected))

    def place(self, key: Key) -> str:
        """The key, with its line if it has one, for a message about another key."""
        line = self.lines.get(key)
        return f"{dotted(key)}, line {line}" if line else dotted(key)

    def _line(self, key: Key) -> int | None:
        """The line of the key, or of the nearest enclosing key or table that the file has."""
        return next(
            (self.lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.lines), None
        )


def contradictions(values: Values, place: Callable[[Key], str]) -> Iterator[Contradiction]:
    """Yield the conflicts between values that are each valid alone."""
    yield from _addresses(values, place)
    yield from _timeouts(values, place)
    yield from _hosts_that_run(values)
    yield from _relay(values)
    yield from _seal(values)
    shared = values.get(("files", "shared"), ())
    both = [path for path in values.get(("files", "carried"), ()) if path in shared]
    if both:
        names = ", ".join(f'"{path}"' for path in both)
        yield ("files", "carried"), f"no path of files.shared ({names} stands in both)"


def _addresses(values: Values, place: Callable[[Key], str]) -> Iterator[Contradiction]:
    addresses = {k: v for k, v in values.items() if k[0] == HOSTS and k[-1] == "address"}
    holders: dict[str, list[Key]] = defaultdict(list)
    for key, address in addresses.items():
        if holders[address]:
            other = place(holders[address][0])
            yield key, f"an address of its own ({other}, has the same one)"
        holders[address].append(key)

    orchestrator_key: Key = ("cluster", "orchestrator")
    orchestrator = values.get(orchestrator_key)
    if orchestrator:
        addresses[orchestrator_key] = orchestrator.address
        for key in holders[orchestrator.address]:
            for name in PORTS:
                port_key = (*key[:-1], name)
                if values.get(port_key) == orchestrator.port:
                    other = f"the orchestrator's ({place(orchestrator_key)})"
                    yield port_key, f"a port other than {other}"

    for key in addresses:
        data, pages = ((*key[:-1], name) for name in PORTS)
        if key[0] == HOSTS and data in values and values[data] == values.get(pages):
            yield pages, f"a port of its own ({place(data)}, has the same one)"

    overlay = values.get(("cluster", "overlay"))
    if overlay:
        inside = [k for k, address in addresses.items() if IPv4Address(address) in overlay]
        if inside:
            names = "; ".join(f"{addresses[k]} is {place(k)}" for k in inside)
            yield ("cluster", "overlay"), f"a network without any machine's own address ({names})"


def _timeouts(values: Values, place: Callable[[Key], str]) -> Iterator[Contradiction]:
    """Check the timeouts, with derived numbers for those that are not given."""
    read = {name: values[key] for name in DERIVATIONS if (key := ("timeouts", name)) in values}
    given = {name: value for name, value in read.items() if value is not DERIVED}
    unknown = DERIVATIONS.keys() - read.keys()
    for breach in breaches(given, unknown, lambda name: place(("timeouts", name))):
        yield ("timeouts", breach.name), breach.expected


def _hosts_that_run(values: Values) -> Iterator[Contradiction]:
    spares = {k: v for k, v in values.items() if k[0] == HOSTS and k[-1] == "spare"}
    if spares and all(v == "dedicated" for v in spares.values()):
        first = next(iter(spares))
        yield first, 'one host at least that is not "dedicated": no job could start anywhere'


def _seal(values: Values) -> Iterator[Contradiction]:
    """Memory may go in clear only over a network that the file calls trusted."""
    if values.get(("wire", "seal")) == "off" and values.get(("wire", "trusted")) is False:
        yield (
            ("wire", "seal"),
            '"on", or beside it trusted = true, which says that no stranger can read or change '
            "what goes between the hosts",
        )


def _relay(values: Values) -> Iterator[Contradiction]:
    """The relay must be a host of the file: the named one, or the one with the orchestrator."""
    if values.get(("network", "outside")) != "relay":
        return
    hosts = {
        str(key[1]): v for key, v in values.items() if key[0] == HOSTS and key[-1] == "address"
    }
    name, orchestrator = values.get(("network", "relay")), values.get(("cluster", "orchestrator"))
    if name and name not in hosts:
        yield ("network", "relay"), f"one of the hosts: {', '.join(hosts)}"
    elif name == "" and orchestrator and orchestrator.address not in hosts.values():
        yield (
            ("network", "relay"),
            "the name of a host, since none has the orchestrator's address",
        )
