# SPDX-License-Identifier: Apache-2.0
"""Which CRIU this host uses, and how it is called.

If the cluster file (``criu = …``) or $LIVESHIFT_CRIU names a path, only that CRIU is used.
Otherwise the search takes the first CRIU that is new enough: first in the private prefix that
``python -m liveshift.criu_glue.fetch`` fills, then in the system's folders.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ...errors import Refused

MINIMUM = (4, 2)
"""The oldest CRIU version that works. Older versions can dump no socket on kernels >= 6.16, where
SO_PASSCRED returns EOPNOTSUPP on AF_INET (criu issues 2705, 2718, 2829)."""

VARIABLE = "LIVESHIFT_CRIU"
FETCH = "python -m liveshift.criu_glue.fetch"

KERNEL_DATA = Path("/run/criu.kdat")
"""The file in which CRIU keeps what it found out about this kernel (criu: kerndat.c). It saves
20-40 ms at each start. CRIU keeps it on a tmpfs only, so that it does not survive a reboot into
another kernel."""

_SYSTEM_PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
_CAP_SYS_RESOURCE = 24  # linux/capability.h
_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Criu:
    """A CRIU that ran once and reported its version."""

    path: Path
    """What a person would run: the program, or the private prefix's wrapper script."""
    version: tuple[int, ...]
    argv: tuple[str, ...]
    """What we run: the program itself, or the private loader with its library path and program."""

    def command(self, *args: str, preload: Sequence[Path] = ()) -> list[str]:
        """The command line that runs CRIU with ``args`` and the libraries of ``preload`` in it.

        Where root lacks CAP_SYS_RESOURCE, rlimit_shim.so is preloaded too (see there).
        """
        libraries = ":".join(map(str, filter(None, (*preload, _rlimit_shim()))))
        if not libraries:
            return [*self.argv, *args]
        if len(self.argv) > 1:  # the loader's option, which CRIU's hooks don't inherit
            return [self.argv[0], "--preload", libraries, *self.argv[1:], *args]
        return ["/usr/bin/env", f"LD_PRELOAD={libraries}", *self.argv, *args]

    def files(self) -> list[Path]:
        """The program, and its private loader and libraries if it has them."""
        loader = Path(self.argv[0])
        libraries = loader.parent.glob("*.so*") if len(self.argv) > 1 else ()
        return [Path(self.argv[-1]), *libraries]

    def warm(self) -> None:
        """Let CRIU probe the kernel now, so that the next run need not; 50 ms if no data exist.

        The caller reads CRIU's own files (:meth:`files`) into memory."""
        if not KERNEL_DATA.exists():
            self.check()

    def check(self) -> tuple[bool, str]:
        """Run ``criu check`` (50 ms, needs root).

        Returns (True if this kernel has what CRIU needs, CRIU's message)."""
        try:
            done = subprocess.run(
                self.command("check"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_DEADLINE_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return False, str(error)
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0:
            return True, lines[-1] if lines else "ok"
        complaints = [line for line in lines if "Error" in line or "Warn" in line] or lines
        return False, "; ".join(complaints[:3]) or f"criu check ended with {done.returncode}"


def private_prefix() -> Path:
    """The folder that fetch.py fills; it belongs to this Python environment."""
    return Path(sys.prefix) / "libexec" / "liveshift" / "criu"


def loader_argv(prefix: Path) -> tuple[str, ...]:
    """How to run the CRIU unpacked below ``prefix``/root: by the loader and libraries it came with.

    These are newer than the system's, so the system's loader could not start that CRIU. Returns ()
    if the prefix holds no program or no loader.
    """
    root = prefix / "root"
    program = root / "usr/sbin/criu"
    patterns = ("usr/lib/*/ld-linux*.so.*", "usr/lib/*/ld64.so.*")
    loaders = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    if not loaders or not program.is_file():
        return ()
    return (str(loaders[0]), "--library-path", str(loaders[0].parent), str(program))


def find(path: str | Path | None = None) -> Criu:
    """The CRIU to use; ``path`` is the cluster file's setting (None or "": search).

    Raises Refused, with what to do, if there is none or it is too old. :meth:`Criu.check` tests
    whether the kernel has what CRIU needs.
    """
    named, by = (path, "the cluster file") if path else (os.environ.get(VARIABLE), f"${VARIABLE}")
    if named:
        criu = at(Path(named))
        if criu.version < MINIMUM:
            raise Refused(
                f"{criu.path}, which {by} names, is CRIU {dotted(criu.version)}; "
                f"{dotted(MINIMUM)} or newer is needed",
                hint=f"let {by} name a newer one, or take the setting away and run: {FETCH}",
            )
        return criu
    seen = []
    for place in places():
        try:
            criu = at(place)
        except Refused as refusal:
            seen.append(refusal.message)
            continue
        if criu.version >= MINIMUM:
            return criu
        seen.append(f"{place} is CRIU {dotted(criu.version)}")
    found = "; ".join(seen) if seen else f"none in {private_prefix()}, $PATH or /usr/sbin"
    raise Refused(f"CRIU {dotted(MINIMUM)} or newer is needed: {found}", hint=f"run: {FETCH}")


def places() -> list[Path]:
    """Existing programs that a search tries: the private prefix's first, then the system's."""
    candidates = [private_prefix() / "criu"]
    on_path = shutil.which("criu")
    if on_path:
        candidates.append(Path(on_path))
    candidates += [Path(place) / "criu" for place in _SYSTEM_PLACES]
    return list(dict.fromkeys(c for c in candidates if c.is_file()))


def at(path: Path) -> Criu:
    """The CRIU at ``path``, of any version; raises Refused if it cannot be run."""
    argv = loader_argv(path.parent) or (str(path),)
    return Criu(path, version(argv), argv)


def version(argv: tuple[str, ...]) -> tuple[int, ...]:
    """Ask the program for its version; raises Refused if it cannot be run or prints none."""
    what = argv[-1]
    try:
        done = subprocess.run(
            [*argv, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{what} can't be run: {error}", hint=f"run: {FETCH}") from error
    match = re.search(r"^Version:\s*(\d+(?:\.\d+)*)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or match is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Refused(
            f"{what} --version ended with {done.returncode} and said "
            f'"{said[-1] if said else ""}", not a version of CRIU',
            hint=f"run: {FETCH}",
        )
    return tuple(int(part) for part in match[1].split("."))


def dotted(number: tuple[int, ...]) -> str:
    """(4, 2, 1) as "4.2.1"."""
    return ".".join(map(str, number))


def capabilities() -> int:
    """The effective capabilities of this process as a bit mask (capabilities(7))."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return int(match[1], 16) if match else 0


def _rlimit_shim() -> Path | None:
    if capabilities() >> _CAP_SYS_RESOURCE & 1:
        return None
    shim = Path(str(files(__package__) / "rlimit_shim.so"))
    return shim if shim.is_file() else None
