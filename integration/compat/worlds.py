# SPDX-License-Identifier: Apache-2.0
"""Finding worlds: Pythons of this machine, and Debian suites unpacked into folders of their own."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from liveshift.criu_glue.criu import apt
from liveshift.errors import LiveshiftError, Refused, StepFailed

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SUITES = {"bullseye": "2.31", "bookworm": "2.36", "trixie": "2.41", "forky": "2.42 or newer"}
"""Debian's, with their glibc; each has a Python of its own time."""

HOMES = ("~/.pyenv/versions/*/bin/python3", "~/.local/share/uv/python/*/bin/python3")


@dataclass(frozen=True)
class World:
    """A Python, and the root folder that it sees."""

    name: str
    python: str
    """Its path, inside the root."""
    root: Path | None = None
    """None: this machine's own."""
    path: str = ""
    """PYTHONPATH, inside the root."""

    def argv(self, *arguments: str) -> list[str]:
        chroot = ["chroot", str(self.root)] if self.root else []
        return [*chroot, self.python, *arguments]


def pythons(named: list[str]) -> Iterator[World]:
    """The Pythons of this machine, the first of each version, and those that are named."""
    candidates = [sys.executable]
    candidates += [p for v in PYTHONS if (p := shutil.which(f"python{v}"))]
    for pattern in HOMES:
        home = Path(pattern).expanduser()
        first = Path(*home.parts[: home.parts.index("*")])
        candidates += sorted(map(str, first.glob(str(home.relative_to(first)))))
    found: dict[str, World] = {}
    for candidate in candidates:
        version = _version(candidate)
        if version in PYTHONS and version not in found:
            found[version] = World(f"python {version} of this machine", candidate)
    yield from (found[version] for version in sorted(found, key=PYTHONS.index))
    for path in named:
        if not _version(path):
            raise Refused(f"{path} is no Python that runs here")
        yield World(f"python {_version(path)} at {path}", path)


def _version(python: str) -> str:
    """ "3.12", or "" for what does not run (a shim of a version that is not chosen, say)."""
    return _answer(World("", python), "import sys; print('%d.%d' % sys.version_info[:2])")


def _answer(world: World, program: str) -> str:
    """What a short program prints there; "" where it fails."""
    try:
        done = subprocess.run(world.argv("-c", program), capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def with_torch(world: World, version: str, place: Path) -> World:
    """The world with a torch that fits its Python, fetched from the package index if it has none:
    ``version`` is pip's specifier behind the name, such as "==2.13.0" or "". Several GB each.

    Raises StepFailed where there is none for that Python.
    """
    if _answer(world, "import torch; print(1)") == "1":
        return world
    python = _answer(world, "import sys; print('%d.%d' % sys.version_info[:2])")
    home = world.root or place
    folder = home / f"torch-{python}"
    if not folder.is_dir():
        staged = home / f".torch-{python}"
        shutil.rmtree(staged, ignore_errors=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--target",
            str(staged),
            "--python-version",
            python,
            "--only-binary",
            ":all:",
        ]
        done = subprocess.run([*pip, f"torch{version}"], capture_output=True, text=True)
        if done.returncode != 0:
            shutil.rmtree(staged, ignore_errors=True)
            raise StepFailed("fetch torch", f"for Python {python}: {done.stderr.strip()[-200:]}")
        staged.rename(folder)
    return replace(world, path=str(Path("/") / folder.relative_to(world.root or "/")))


def suite(name: str, place: Path) -> World:
    """A Debian suite's Python with all it needs down to libc, below ``place``; fetched if need be.

    Raises LiveshiftError where it can't be had: no apt, no such suite in its archive.
    """
    root = place / name
    if not root.is_dir():
        _fetch(name, root)
    (python,) = sorted(root.glob("usr/bin/python3"))
    return World(f"Debian {name}", f"/{python.relative_to(root)}", root)


def _fetch(name: str, root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    # Not below a home directory: apt downloads as a user of its own, who must get there.
    work = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    try:
        work.chmod(0o755)
        codename = _codename()
        sources = apt.archives(apt.configured(), codename, ("main",))
        if not sources:
            raise Refused(f"apt is configured with no {codename} main archive")
        source = sources[0]
        download = apt.Download(
            work / "apt", apt.AptSource(source.uri, (name,), ("main",), source.signed_by)
        )
        download.update()
        download.packages("python3")
        packages = download.packages("libstdc++6")  # torch wants it; with what is there already
        staged = work / "root"
        for folder in ("usr/bin", "usr/lib", "usr/lib64", "usr/sbin", "dev", "tmp"):
            (staged / folder).mkdir(parents=True)
        for minor, device in ((3, "null"), (9, "urandom")):
            os.mknod(staged / "dev" / device, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        for link in ("bin", "lib", "lib64", "sbin"):
            (staged / link).symlink_to(f"usr/{link}")
        for package in packages:
            _unpack(package, staged)
        subprocess.run(["cp", "-a", str(staged), str(root)], check=True)
    finally:
        shutil.rmtree(work)


def _unpack(package: Path, root: Path) -> None:
    """As dpkg does it: what a package has in /lib goes where the link /lib leads."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as deb:
        done = subprocess.run(
            ["tar", "--extract", "--keep-directory-symlink", "--directory", str(root)],
            stdin=deb.stdout,
        )
    if done.returncode != 0 or deb.returncode != 0:
        raise StepFailed("unpack", f"{package.name} is damaged")


def _codename() -> str:
    system = platform.freedesktop_os_release()
    if system.get("ID") != "debian":
        raise Refused("other suites are fetched on Debian only")
    return system.get("VERSION_CODENAME", "")


def suites(place: Path, fetch: bool) -> Iterator[World | str]:
    """Every suite that is there, or can be fetched; a sentence for each that can not."""
    for name, libc in SUITES.items():
        if os.geteuid() != 0:
            yield f"Debian {name} (glibc {libc}): chroot needs root"
        elif not fetch and not (place / name).is_dir():
            yield f"Debian {name} (glibc {libc}): not fetched here (--fetch does)"
        else:
            try:
                yield suite(name, place)
            except (LiveshiftError, OSError, subprocess.SubprocessError) as error:
                yield f"Debian {name} (glibc {libc}): {error}"
