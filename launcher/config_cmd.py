# SPDX-License-Identifier: Apache-2.0
"""``liveshift config validate|show``: is the cluster file right, and what does it come to?"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..runtime.config import Reading, load, read, settings_of, toml_value


def validate(path: Path) -> None:
    """Say that the file is right; raises ConfigError with every mistake if it is not."""
    cluster = load(path)
    count = len(cluster.hosts)
    hosts = f"{count} host{'s' if count > 1 else ''}"
    sys.stdout.write(f'{path}: good: cluster "{cluster.name}", {hosts}, {cluster.digest}\n')


def show(path: Path, output: str = "text") -> None:
    """Print every setting in effect and where it comes from, as TOML or as JSON."""
    if output not in ("text", "json"):
        raise Refused(f'cannot show the configuration as "{output}"', hint="use -o text or -o json")
    reading = read(path)
    sys.stdout.write(_as_json(reading) if output == "json" else _as_toml(reading))


def _settings(reading: Reading) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    tables = settings_of(reading.cluster)
    for name, table in tables.items():
        if name == "hosts":
            yield from ((("hosts", host), settings) for host, settings in table.items())
        else:
            yield (name,), table


def _as_toml(reading: Reading) -> str:
    """The file again with nothing left out, the origin of each value in a comment beside it."""
    tables = [
        (at, [(f"{key} = {toml_value(value)}", (*at, key)) for key, value in table.items()])
        for at, table in _settings(reading)
    ]
    width = min(48, max(len(text) for _, rows in tables for text, _ in rows))
    blocks = [f"# {reading.file}, digest {reading.cluster.digest}\n"]
    for at, rows in tables:
        block = f"[{'.'.join(at)}]\n"
        for text, key in rows:
            line = reading.line(*key)
            block += f"{text:<{width}}  # {f'line {line}' if line else 'default'}\n"
        blocks.append(block)
    return "\n".join(blocks)


def _as_json(reading: Reading) -> str:
    """One object per setting; ``line`` is null where the value is the default."""
    settings = [
        {"key": ".".join((*at, key)), "value": value, "line": reading.line(*at, key)}
        for at, table in _settings(reading)
        for key, value in table.items()
    ]
    whole = {"file": reading.file, "digest": reading.cluster.digest, "settings": settings}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
