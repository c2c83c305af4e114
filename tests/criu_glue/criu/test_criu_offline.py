# SPDX-License-Identifier: Apache-2.0
"""CRIU for hosts without a network: packages in a folder, installed from there, or refused."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from liveshift.criu_glue import fetch
from liveshift.criu_glue.criu import apt, tool
from liveshift.errors import NotFound, Refused, StepFailed

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CRIU that is in use here, with its libraries, as a package again. It may be the system's
    own, so that what it is linked with is collected."""
    tree = tmp_path_factory.mktemp("package")
    libraries = tree / "usr/lib" / f"{platform.machine()}-linux-gnu"
    libraries.mkdir(parents=True)
    *loader, program = tool.loader_argv(tool.private_prefix()) or (tool.find().path,)
    lists = [*loader, "--list", program] if loader else ["ldd", program]
    listed = subprocess.run(lists, check=True, capture_output=True, text=True).stdout
    for name, path in re.findall(r"^\s+(\S+) (?:=> (\S+) )?\(0x", listed, re.MULTILINE):
        if (found := Path(path or name)).is_absolute():  # linux-vdso.so.1 is no file
            shutil.copy(found, libraries / Path(name).name)
    (tree / "usr/sbin").mkdir()
    shutil.copy(program, tree / "usr/sbin/criu")
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        "Package: criu\nVersion: 4.2.1-1\nArchitecture: all\nMaintainer: t <t@example.org>\n"
        "Description: test\n"
    )
    built = tree.parent / "criu_4.2.1-1_all.deb"
    subprocess.run(["dpkg-deb", "--build", "-Znone", tree, built], check=True, capture_output=True)
    return built


@pytest.fixture
def folder(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``download`` makes, of an archive that has that package."""

    class Download:
        def __init__(self, directory: Path, source: apt.AptSource) -> None:
            directory.mkdir(parents=True)

        def update(self) -> None: ...

        def origin(self) -> str:
            return "Debian"

        def version(self, name: str) -> str:
            return "4.2.1-1"

        def packages(self, name: str) -> list[Path]:
            return [package]

    source = apt.AptSource("file:/nowhere/debian", ("bookworm",), ("main",))
    monkeypatch.setattr(apt, "configured", lambda: [source])
    monkeypatch.setattr(apt, "Download", Download)
    system = {"ID": "debian", "VERSION_CODENAME": "bookworm"}
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: system)
    made = tmp_path / "download"
    files = fetch.download(made)
    assert [file.name for file in files] == [package.name, fetch.SUMS]
    assert [file.name for file in tmp_path.iterdir()] == ["download"], "nothing else is left"
    return made


def test_a_downloaded_criu_is_installed_and_works(folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "host/criu"
    installed = fetch.install(folder, prefix)
    assert installed.path == prefix / "criu"
    assert installed.version >= tool.MINIMUM
    assert installed.check()[0]
    assert (
        str(prefix)
        in subprocess.run(
            ["cat", installed.path], capture_output=True, text=True, check=True
        ).stdout
    ), "the wrapper names its own libraries"


def _shorten(folder: Path) -> None:
    package = next(folder.glob("*.deb"))
    os.truncate(package, package.stat().st_size - 1)


def _remove(folder: Path) -> None:
    next(folder.glob("*.deb")).unlink()


@pytest.mark.parametrize("harm", [_shorten, _remove])
def test_a_damaged_download_is_refused(
    folder: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    harm(folder)
    with pytest.raises(StepFailed, match="not as it was downloaded"):
        fetch.install(folder, tmp_path / "host/criu")
    assert not (tmp_path / "host/criu").exists()


def test_names_outside_the_folder_are_not_followed(folder: Path, tmp_path: Path) -> None:
    sums = folder / fetch.SUMS
    sums.write_text(sums.read_text().replace("criu_", "../../criu_"))
    assert fetch.install(folder, tmp_path / "host/criu").path == tmp_path / "host/criu/criu"


def test_other_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotFound, match="holds no downloaded CRIU"):
        fetch.install(empty, tmp_path / "host/criu")
    with pytest.raises(Refused, match="is not empty"):
        fetch.download(folder)
