# SPDX-License-Identifier: Apache-2.0
"""``python -m liveshift.criu_glue.fetch``: make sure that this environment has a CRIU that works.

A. A CRIU that is new enough and passes ``criu check`` is there already, fetched earlier or the
   system's: done.
B. Debian, Ubuntu: ``criu`` and every library it needs, down to libc, come from a newer suite of the
   archive that apt is configured with (apt.py). They are unpacked into a private prefix, tried
   there, and renamed into place. Nothing of the system changes.
C. Elsewhere: say what to install.

Hosts without a network: ``--download DIR`` puts the packages of B into a folder on a machine of the
same distribution and processor; ``--from DIR`` on the host unpacks and tries them as in B.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..errors import LiveshiftError, NotFound, NotPermitted, Refused, StepFailed
from .criu import apt
from .criu.tool import MINIMUM, Criu, at, dotted, find, loader_argv, places, private_prefix, version

DEBIAN_SUITES = ("forky", "sid")
"""The Debian suites to fetch from. Debian 13 (trixie) has CRIU 4.1.1; forky and sid have 4.2.1."""

UBUNTU_SERIES = Path("/usr/share/distro-info/ubuntu.csv")

SUMS = "SHA256SUMS"
"""The name of the checksum file in a folder of downloaded packages."""

T = TypeVar("T")

WRAPPER = """\
#!/bin/sh
# CRIU {version} with the loader and the libraries that it was built for; made by liveshift.
exec {command} "$@"
"""


def fetch(prefix: Path) -> Criu:
    """Return the CRIU to use; fetch it into ``prefix`` if none works yet.

    Raises Refused if none can be fetched (with what to install), NotPermitted if the caller is not
    root, StepFailed if a download or the fetched CRIU fails; the prefix is then as it was before.
    """
    _need_root()
    if (present := working(prefix)) is not None:
        return present
    with _alone(prefix) as work:
        if (present := working(prefix)) is not None:  # another process has fetched it meanwhile
            return present
        return _from_archive(prefix.parent, lambda packages: _unpack(packages, prefix, work))


def download(folder: Path) -> list[Path]:
    """Put CRIU and every library it needs into a folder, with their checksums; returns the files.

    Raises like :func:`fetch`, and Refused if the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise Refused(f"{folder} is not empty", hint="name a folder that is new or empty")
    folder.mkdir(parents=True, exist_ok=True)

    def keep(packages: list[Path]) -> list[Path]:
        kept = [Path(shutil.copy(package, folder)) for package in packages]
        sums = "".join(f"{_sha256(package)}  {package.name}\n" for package in kept)
        (folder / SUMS).write_text(sums)
        return [*kept, folder / SUMS]

    return _from_archive(folder.parent, keep)


def install(folder: Path, prefix: Path) -> Criu:
    """Install into ``prefix`` the packages that :func:`download` has put into a folder.

    Raises NotPermitted if the caller is not root, NotFound if the folder holds no such download,
    StepFailed if a file has changed since the download or if the CRIU does not work here; the
    prefix is then as it was before.
    """
    _need_root()
    try:
        sums = dict(line.split()[::-1] for line in (folder / SUMS).read_text().splitlines())
    except (OSError, ValueError) as error:
        raise NotFound(
            f"{folder} holds no downloaded CRIU: {error}",
            hint=f"`python -m {__package__}.fetch --download DIR` makes such a folder elsewhere",
        ) from error
    for name, digest in sums.items():
        package = folder / Path(name).name
        if not package.is_file() or _sha256(package) != digest:
            raise StepFailed(
                "read the download", f"{package} is not as it was downloaded", hint="copy it again"
            )
    with _alone(prefix) as work:
        return _unpack([folder / Path(name).name for name in sums], prefix, work)


def working(prefix: Path) -> Criu | None:
    """A CRIU in ``prefix`` or of the system that is new enough and passes its own check."""
    fetched = [prefix / "criu"] if (prefix / "criu").is_file() else []
    for place in [*fetched, *places()]:
        try:
            criu = at(place)
        except Refused:
            continue
        if criu.version >= MINIMUM and criu.check()[0]:
            return criu
    return None


def _need_root() -> None:
    if os.geteuid() != 0:
        raise NotPermitted(
            "only root can check that a CRIU works here", hint="run the same command as root"
        )


def _from_archive(place: Path, use: Callable[[list[Path]], T]) -> T:
    """Download the packages below ``place``, suite by suite, until ``use`` succeeds with them.

    Returns what ``use`` returns. Raises Refused on other distributions, StepFailed if no suite's
    packages work."""
    system = platform.freedesktop_os_release()
    family = _family(system)
    if family is None or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        name = system.get("PRETTY_NAME", platform.system())
        raise Refused(
            f"there is no CRIU {dotted(MINIMUM)} or newer here, and on {name} liveshift can't "
            "fetch one (it can on Debian and Ubuntu)",
            hint=f"install the distribution's package criu if it is {dotted(MINIMUM)} or newer, or "
            "build CRIU from its sources (release 4.2.1); then put it on PATH, or name it by "
            '$LIVESHIFT_CRIU or by criu = "…" in the cluster file, and check it by: criu check',
        )
    # Ubuntu has criu in universe, and its libraries in main.
    components = ("main",) if family == "debian" else ("main", "universe")
    sources = apt.archives(apt.configured(), system.get("VERSION_CODENAME", ""), components)
    tried = []
    for suite in DEBIAN_SUITES if family == "debian" else _ubuntu_suites(system):
        for source in sources:
            try:
                with _workplace(place) as work:
                    return use(_packages(replace(source, suites=(suite,)), family, work))
            except LiveshiftError as error:
                tried.append(f"  {error.message}")
    if not sources:
        tried.append(f"  apt is configured with no {system.get('VERSION_CODENAME')} main archive")
    raise StepFailed(
        "fetch CRIU",
        f"no CRIU {dotted(MINIMUM)} or newer that works came from a newer suite:\n"
        + "\n".join(tried),
        hint="check apt's sources and the network (apt-get update), install the current "
        f"{family}-archive-keyring; or install CRIU {dotted(MINIMUM)} or newer yourself and name "
        "it by $LIVESHIFT_CRIU",
    )


def _family(system: dict[str, str]) -> str | None:
    """ "debian" or "ubuntu" for these and for distributions derived from them, else None."""
    ids = [system.get("ID", ""), *system.get("ID_LIKE", "").split()]
    return next((family for family in ids if family in ("ubuntu", "debian")), None)


def _ubuntu_suites(system: dict[str, str]) -> list[str]:
    """The series after this one, oldest first, then the one in development."""
    later = []
    if UBUNTU_SERIES.is_file():
        with UBUNTU_SERIES.open(newline="") as file:
            rows = list(csv.DictReader(file))
        today = datetime.date.today().isoformat()
        own = next(
            (r["release"] for r in rows if r["series"] == system.get("VERSION_CODENAME")), today
        )
        later = [r["series"] for r in rows if own < r["release"] <= today]
    return [*later, "devel"]


def _packages(source: apt.AptSource, family: str, work: Path) -> list[Path]:
    """Download CRIU and the libraries that it needs; raises StepFailed."""
    where = f"{source.uri} {source.suites[0]}"
    download = apt.Download(work / "apt", source)
    _say(f"looking for CRIU in {where}")
    download.update()
    if download.origin().lower() != family:
        raise StepFailed("fetch CRIU", f"{where} is signed by {download.origin()}, not {family}")
    offered = download.version("criu")
    if _upstream(offered) < MINIMUM:
        which = f"only criu {offered}" if offered else "no criu"
        raise StepFailed("fetch CRIU", f"{where} offers {which}")
    _say(f"downloading criu {offered} and its libraries")
    return download.packages("criu")


def _unpack(packages: list[Path], prefix: Path, work: Path) -> Criu:
    """Unpack the packages, try CRIU and install it; on StepFailed ``prefix`` is as it was."""
    staged = work / "staged"
    shutil.rmtree(staged, ignore_errors=True)  # left over from a suite that did not work
    (staged / "root").mkdir(parents=True)
    for package in packages:
        command = ["dpkg-deb", "--extract", str(package), str(staged / "root")]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise StepFailed("unpack", f"{' '.join(command)}: {done.stderr.strip()}")
    _finish(staged, prefix)
    if prefix.exists():
        prefix.rename(work / "before")
    staged.rename(prefix)
    return at(prefix / "criu")


@contextmanager
def _workplace(place: Path) -> Iterator[Path]:
    """A temporary folder that apt's unprivileged download user can enter."""
    with tempfile.TemporaryDirectory(prefix=".liveshift-criu-", dir=place) as name:
        work = Path(name)
        work.chmod(0o755)
        yield work


def _finish(staged: Path, prefix: Path) -> None:
    """Try the unpacked CRIU in ``staged``, then write the wrapper script for its final place."""
    argv = loader_argv(staged)
    if not argv:
        raise StepFailed("unpack", "the packages hold no usr/sbin/criu or no ld-linux to run it by")
    number = version(argv)
    good, text = Criu(staged / "criu", number, argv).check()
    if not good:
        raise StepFailed("criu check", f"CRIU {dotted(number)}: {text}")
    command = shlex.join(word.replace(str(staged), str(prefix), 1) for word in argv)
    wrapper = staged / "criu"
    wrapper.write_text(WRAPPER.format(version=dotted(number), command=command))
    wrapper.chmod(0o755)
    staged.chmod(0o755)


def _upstream(package_version: str) -> tuple[int, ...]:
    """(4, 2, 1) of "4.2.1-1" and of "1:4.2.1+dfsg-1"; () of ""."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", package_version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


@contextmanager
def _alone(prefix: Path) -> Iterator[Path]:
    """Keep other processes from the prefix. The workplace is beside the prefix, so that the rename
    into place stays on one file system."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with (prefix.parent / f".{prefix.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with _workplace(prefix.parent) as work:
            yield work


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Fetch CRIU if necessary, and print on stdout which CRIU will be used."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.fetch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prefix", type=Path, default=private_prefix(), help="where to unpack it")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--download", type=Path, metavar="DIR", help="only download, into this folder"
    )
    only.add_argument("--from", type=Path, metavar="DIR", dest="folder", help="install from there")
    asked = parser.parse_args()
    prefix = Path(os.path.abspath(asked.prefix))
    try:
        if asked.download:
            for path in download(Path(os.path.abspath(asked.download))):
                print(path)
            return 0
        criu = install(asked.folder, prefix) if asked.folder else fetch(prefix)
        if prefix == private_prefix():
            criu = find()  # the agent will use this one
    except LiveshiftError as error:
        _say(f"error: {error.message}")
        if error.hint:
            _say(f"hint: {error.hint}")
        return error.exit_code
    print(f"{criu.path}: CRIU {dotted(criu.version)}, passes criu check")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
