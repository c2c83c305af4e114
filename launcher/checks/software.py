# SPDX-License-Identifier: Apache-2.0
"""Checks CRIU, Python, torch, and the gloo functions that the interposer hooks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from ...criu_glue.criu import tool
from ...errors import LiveshiftError
from ...interposer import library
from .finding import Finding, Verdict, judged


def criu(path: str | None) -> Iterator[Finding]:
    """Check the CRIU that would be used, and what it says about this kernel."""
    needed = f"CRIU {tool.dotted(tool.MINIMUM)} or newer"
    try:
        found = tool.find(path)
    except LiveshiftError as error:
        yield Finding("CRIU", error.message, needed, Verdict.FAIL, error.hint or "")
        return
    yield Finding("CRIU", f"{tool.dotted(found.version)} ({found.path})", needed, Verdict.OK)
    good, text = found.check()
    advice = "run as root; boot a kernel with what the message names"
    yield judged("criu check", text, "passes", good, advice)


def python() -> Iterator[Finding]:
    """Name the interpreter that runs liveshift: an older one cannot. A job may use another one."""
    found = f"{platform.python_version()} ({sys.executable})"
    yield Finding("python", found, "3.11 or newer", Verdict.OK)


def torch() -> Iterator[Finding]:
    """Check the torch of this environment, which is the job's if liveshift is installed there."""
    needed = "in the job's environment"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        advice = "install torch where the job runs; the demo needs it here"
        yield Finding("torch", "none in this environment", needed, Verdict.WARN, advice)
        return
    yield Finding("torch", version, needed, Verdict.OK)
    yield _gloo(version)


def _gloo(version: str) -> Finding:
    """Check whether torch exports the gloo functions that the interposer hooks. torch is not
    loaded."""
    spec = importlib.util.find_spec("torch")  # only finds it: an import takes seconds
    needed = "optional: gloo's exported functions, for step rates and collective boundaries"
    if spec is None or spec.origin is None:
        return Finding("interposer", f"torch {version} has no files", needed, Verdict.WARN)
    path = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    try:
        missing = library.missing_symbols(path)
        without_identity = library.missing_symbols(path, "identity")
    except LiveshiftError as error:
        return Finding("interposer", error.message, needed, Verdict.WARN, error.hint or "")
    lacks = missing or without_identity
    if not lacks:
        return Finding("interposer", "all there", needed, Verdict.OK)
    return Finding(
        "interposer",
        f"torch {version} lacks {len(lacks)}: {lacks[0]} …",
        needed,
        Verdict.WARN,
        "jobs move, but status shows no collective rate for them"
        if missing
        else "jobs move, but are frozen wherever they are, not at a collective boundary",
    )
