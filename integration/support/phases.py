# SPDX-License-Identifier: Apache-2.0
"""The phases of a migration, by name."""

from __future__ import annotations

from liveshift.runtime.messages import MigrationRow, Phase


def phase(row: MigrationRow, name: str) -> Phase:
    return next(found for found in row.phases if found.name == name)
