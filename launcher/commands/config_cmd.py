# SPDX-License-Identifier: Apache-2.0
"""``liveshift config validate|show``: checks the cluster file, prints the settings in effect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...runtime.config.cluster import Reading, read, settings_of, toml_value
from ...runtime.config.environment import in_effect
from ...runtime.config.timeouts import DERIVATIONS
from ..show import render, timeouts_view


def validate(path: Path, output: str = "text") -> None:
    """Print that the file is right, and explain its deadlines, as text or as JSON. Raises
    ConfigError with every mistake if it is not."""
    reading = read(path)
    cluster = reading.cluster
    if output == "json":
        names = [host.name for host in cluster.hosts]
        head = {"file": str(path), "cluster": cluster.name, "hosts": names}
        render.print_json(head | {"digest": cluster.digest} | timeouts_view.as_data(reading))
        return
    hosts = render.count(len(cluster.hosts), "host")
    sys.stdout.write(f'{path}: good: cluster "{cluster.name}", {hosts}, {cluster.digest}\n\n')
    render.show(*timeouts_view.tables(reading))


def show(path: Path, output: str = "text") -> None:
    """Print every setting in effect and where it comes from, as TOML or as JSON. Raises
    ConfigError for a wrong file."""
    reading = read(path)
    if output == "json":
        render.print_json(_as_data(reading))
    else:
        sys.stdout.write(_as_toml(reading))


def _settings(reading: Reading) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    tables = settings_of(reading.cluster)
    for name, table in tables.items():
        if name == "hosts":
            yield from ((("hosts", host), settings) for host, settings in table.items())
        else:
            yield (name,), table


def _as_toml(reading: Reading) -> str:
    """Return the file with nothing left out, and a comment beside each value that says where it
    comes from. A derived value is a comment as a whole, so that a copy of this derives it again."""
    tables = [
        (at, [(_row(reading, (*at, key), value), (*at, key)) for key, value in table.items()])
        for at, table in _settings(reading)
    ]
    width = min(48, max(len(text) for _, rows in tables for text, _ in rows))
    blocks = [f"# {reading.file}, digest {reading.cluster.digest}\n"]
    for at, rows in tables:
        block = f"[{'.'.join(at)}]\n"
        for text, key in rows:
            line = reading.line(*key)
            source = f"line {line}" if line else _derived(key) or "default"
            block += f"{text:<{width}}  # {source}\n"
        blocks.append(block)
    blocks.append(_environment_lines(reading))
    return "\n".join(blocks)


def _environment_lines(reading: Reading) -> str:
    """Return comments: the variables of environment.MOVABLE as jobs get them."""
    rows = [
        (f"{name}={value}" if value is not None else f"{name} left alone", reason)
        for name, value, reason in in_effect(reading.cluster.env.defaults)
    ]
    width = max(len(text) for text, _ in rows)
    head = "# Every job gets, where the caller's own environment says nothing else:\n"
    return head + "".join(f"# {text:<{width}}  # {reason}\n" for text, reason in rows)


def _row(reading: Reading, key: tuple[str, ...], value: object) -> str:
    comment = "# " if _derived(key) and not reading.line(*key) else ""
    return f"{comment}{key[-1]} = {toml_value(value)}"


def _derived(key: tuple[str, ...]) -> str:
    """Return what a value follows from if it is not given; "" if it has a default."""
    how = DERIVATIONS[key[-1]] if key[0] == "timeouts" else None
    return how.text if how and how.base else ""


def _as_data(reading: Reading) -> dict[str, Any]:
    """Return one object per setting. ``line`` is None if the value is the default."""
    settings = [
        {"key": ".".join((*at, key)), "value": value, "line": reading.line(*at, key)}
        for at, table in _settings(reading)
        for key, value in table.items()
    ]
    variables = [
        {"name": name, "value": value, "reason": reason}
        for name, value, reason in in_effect(reading.cluster.env.defaults)
    ]
    whole = {"file": reading.file, "digest": reading.cluster.digest, "settings": settings}
    return whole | {"environment": variables}
