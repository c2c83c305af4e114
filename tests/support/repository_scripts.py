# SPDX-License-Identifier: Apache-2.0
"""The programs below scripts/, which belong to no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from checkout import ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
