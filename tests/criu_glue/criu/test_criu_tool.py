# SPDX-License-Identifier: Apache-2.0
"""Finding CRIU, calling it, and fetching it without touching apt's own configuration."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from machine_needs import needs_fact

from liveshift.criu_glue import fetch
from liveshift.criu_glue.criu import apt, tool
from liveshift.errors import NotPermitted, Refused, StepFailed

CAP_SYS_RESOURCE = 1 << 24


def _program(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Version: {version}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without any CRIU: an empty PATH folder, an empty private prefix."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(tool.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(tool, "_SYSTEM_PLACES", ())
    return tmp_path


# Finding it


def test_without_any_criu_the_refusal_says_what_to_run(bare: Path) -> None:
    with pytest.raises(Refused, match=r"CRIU 4\.2 or newer is needed: none in") as caught:
        tool.find()
    assert caught.value.hint == "run: python -m liveshift.criu_glue.fetch"


def test_one_on_the_path_is_taken(bare: Path) -> None:
    program = _program(bare / "bin/criu", "4.2.1")
    assert tool.find() == tool.Criu(program, (4, 2, 1), (str(program),))
    assert tool.find("") == tool.find(None)


def test_the_private_prefix_comes_before_the_path(bare: Path) -> None:
    _program(bare / "bin/criu", "4.3")
    private = _program(tool.private_prefix() / "criu", "4.2")
    assert tool.find().path == private
    assert tool.find().version == (4, 2)


def test_an_old_one_is_passed_over_and_named(bare: Path) -> None:
    old = _program(tool.private_prefix() / "criu", "4.1.1")
    with pytest.raises(Refused, match=r"criu is CRIU 4\.1\.1"):
        tool.find()
    newer = _program(bare / "bin/criu", "4.10")
    assert tool.find().path == newer
    assert old.exists()


@pytest.mark.parametrize("by", ["the cluster file", "$LIVESHIFT_CRIU"])
def test_a_named_one_is_taken_or_refused_and_nothing_else_is_tried(
    bare: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    _program(bare / "bin/criu", "4.3")
    named = bare / "own/criu"

    def find() -> tool.Criu:
        if by == "the cluster file":
            return tool.find(named)
        monkeypatch.setenv(tool.VARIABLE, str(named))
        return tool.find()

    with pytest.raises(Refused, match="own/criu can't be run"):
        find()
    _program(named, "3.17.1")
    with pytest.raises(Refused, match=r"is CRIU 3\.17\.1; 4\.2 or newer is needed") as caught:
        find()
    assert by in caught.value.message
    _program(named, "4.2")
    assert find().path == named


def test_what_is_no_criu_is_refused_with_its_words(bare: Path) -> None:
    program = _program(bare / "bin/criu", "4.2")
    program.write_text("#!/bin/sh\necho 'libfoo.so.1: not found' >&2\nexit 127\n")
    with pytest.raises(Refused, match=r"ended with 127 and said \"libfoo\.so\.1: not found\""):
        tool.at(program)


# Calling it


def test_the_private_one_is_run_by_its_own_loader(bare: Path) -> None:
    prefix = bare / "prefix"
    libraries = prefix / "root/usr/lib/x86_64-linux-gnu"
    _program(libraries / "ld-linux-x86-64.so.2", "4.2.1")
    _program(prefix / "root/usr/sbin/criu", "0.0")
    _program(prefix / "criu", "0.1")
    criu = tool.find(prefix / "criu")
    assert criu.version == (4, 2, 1), "the loader was started, neither wrapper nor program"
    assert criu.argv == (
        str(libraries / "ld-linux-x86-64.so.2"),
        "--library-path",
        str(libraries),
        str(prefix / "root/usr/sbin/criu"),
    )


def test_the_shim_is_preloaded_only_where_the_capability_lacks(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "capabilities", lambda: CAP_SYS_RESOURCE)
    plain = tool.Criu(Path("/c"), (4, 2), ("/c",))
    loaded = tool.Criu(Path("/c"), (4, 2), ("/ld", "--library-path", "/l", "/c"))
    assert plain.command("check") == ["/c", "check"]
    assert loaded.command("check") == ["/ld", "--library-path", "/l", "/c", "check"]

    monkeypatch.setattr(tool, "capabilities", lambda: ~CAP_SYS_RESOURCE)
    preload, shim = loaded.command("check")[1:3]
    assert preload == "--preload"
    assert Path(shim).is_file()
    assert loaded.command("check")[3:] == ["--library-path", "/l", "/c", "check"]
    assert plain.command("check") == ["/usr/bin/env", f"LD_PRELOAD={shim}", "/c", "check"]


@pytest.mark.parametrize("capabilities", [CAP_SYS_RESOURCE, 0])
@pytest.mark.root
def test_the_criu_of_this_environment_works(
    monkeypatch: pytest.MonkeyPatch, capabilities: int
) -> None:
    monkeypatch.setattr(tool, "capabilities", lambda: capabilities)
    criu = tool.find()
    assert criu.version >= tool.MINIMUM
    assert criu.check() == (True, "Looks good.")
    said = subprocess.run(criu.command("--version"), capture_output=True, text=True, check=True)
    assert tool.dotted(criu.version) in said.stdout
    assert said.stderr == "", "the loader found what it was told to preload"


def test_a_failing_check_tells_what_criu_said(bare: Path) -> None:
    program = _program(bare / "criu", "4.2")
    program.write_text(
        "#!/bin/sh\necho 'Warn  (criu/kerndat.c:1): odd'\necho noise\n"
        "echo 'Error (criu/cr-check.c:2): no PAGEMAP' >&2\nexit 1\n"
    )
    good, text = tool.Criu(program, (4, 2), (str(program),)).check()
    assert not good
    assert text == "Warn  (criu/kerndat.c:1): odd; Error (criu/cr-check.c:2): no PAGEMAP"


# Fetching it

DEB822 = """\
# a comment
Types: deb deb-src
# one in the middle
URIs: http://a.example/debian http://b.example/debian/
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://c.example/apt
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBFoo
 -----END PGP PUBLIC KEY BLOCK-----
"""


def test_deb822_sources_are_read() -> None:
    first, second, third = apt.parse_deb822(DEB822)
    assert first == apt.AptSource(
        "http://a.example/debian",
        ("bookworm", "bookworm-updates"),
        ("main", "contrib"),
        "/usr/share/keyrings/debian-archive-keyring.gpg",
    )
    assert second.uri == "http://b.example/debian/"
    assert third.uri == "http://c.example/apt"
    (again,) = apt.parse_deb822(third.stanza())
    assert again == third, "a key block survives"
    assert "\n mQINBFoo\n" in third.stanza()


def test_one_line_sources_are_read() -> None:
    text = (
        "# deb http://no.example/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/k/a.gpg,/k/b.gpg] http://a.example/debian bookworm main # x\n"
        "deb-src http://a.example/debian bookworm main\n"
        "  deb http://b.example/debian stable main contrib\n"
        "deb\n"
    )
    assert list(apt.parse_one_line(text)) == [
        apt.AptSource("http://a.example/debian", ("bookworm",), ("main",), "/k/a.gpg /k/b.gpg"),
        apt.AptSource("http://b.example/debian", ("stable",), ("main", "contrib")),
    ]


def test_the_likeliest_archive_comes_first() -> None:
    sources = [
        apt.AptSource("http://other.example/apt", ("bookworm",), ("main",)),
        apt.AptSource("http://sec.example/debian-security", ("bookworm-security",), ("main",)),
        apt.AptSource("http://mirror.example/debian", ("bookworm",), ("main", "non-free")),
        apt.AptSource("http://mirror.example/debian/", ("bookworm",), ("main",)),
        apt.AptSource("http://cloud.example/apt", ("bookworm",), ("stable",)),
        apt.AptSource("cdrom:[Debian 12]/", ("bookworm",), ("main",)),
    ]
    uris = [source.uri for source in apt.archives(sources, "bookworm", ("main",))]
    assert uris == ["http://mirror.example/debian", "http://other.example/apt"]


@pytest.fixture
def unsigned(tmp_path: Path) -> apt.AptSource:
    """An archive on this disk with a proper index that nobody has signed."""
    needs_fact("apt-get")
    index = tmp_path / "archive/dists/forky/main/binary-amd64"
    index.mkdir(parents=True)
    (index / "Packages").write_text("")
    (tmp_path / "archive/dists/forky/Release").write_text(
        "Origin: Debian\nSuite: forky\nCodename: forky\nComponents: main\nArchitectures: amd64\n"
    )
    return apt.AptSource(f"file:{tmp_path}/archive", ("bookworm",), ("main",))


def test_an_unsigned_archive_is_refused(unsigned: apt.AptSource, tmp_path: Path) -> None:
    forky = apt.AptSource(unsigned.uri, ("forky",), ("main",))
    with pytest.raises(StepFailed, match="not signed"):
        apt.Download(tmp_path / "apt", forky).update()


@pytest.mark.root
def test_a_failed_fetch_changes_nothing(
    unsigned: apt.AptSource, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setattr(fetch, "places", lambda: [])
    monkeypatch.setattr(apt, "configured", lambda: [unsigned])
    monkeypatch.setattr(
        platform,
        "freedesktop_os_release",
        lambda: {"ID": "debian", "VERSION_CODENAME": "bookworm"},
    )
    prefix = bare / "into/criu"
    _program(prefix / "criu", "4.1")
    with pytest.raises(StepFailed, match="not signed") as caught:
        fetch.fetch(prefix)
    assert "sid" in caught.value.message, "both suites were tried"
    assert caught.value.hint is not None
    assert [path.name for path in prefix.parent.iterdir() if path.is_dir()] == ["criu"]
    assert [path.name for path in prefix.iterdir()] == ["criu"]


@pytest.mark.root
def test_elsewhere_it_says_what_to_install(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        platform, "freedesktop_os_release", lambda: {"ID": "fedora", "PRETTY_NAME": "Fedora 43"}
    )
    with pytest.raises(Refused, match="on Fedora 43") as caught:
        fetch.fetch(bare / "into/criu")
    assert "package criu" in str(caught.value.hint)
    assert not (bare / "into/criu").exists()


def test_only_root_fetches(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotPermitted):
        fetch.fetch(bare / "into/criu")


@pytest.mark.root
def test_one_that_works_is_not_fetched_again(bare: Path) -> None:
    program = _program(bare / "into/criu/criu", "4.2.1")
    assert fetch.fetch(program.parent).path == program
    assert list((bare / "into").iterdir()) == [program.parent]


def test_package_versions_are_understood() -> None:
    assert fetch._upstream("4.2.1-1") == (4, 2, 1)
    assert fetch._upstream("1:4.2+dfsg-3~bpo13+1") == (4, 2)
    assert fetch._upstream("") == ()
    assert fetch._upstream("3.17.1-2+deb12u2") < tool.MINIMUM


def test_relatives_of_debian_and_ubuntu_are_known() -> None:
    assert fetch._family({"ID": "debian"}) == "debian"
    assert fetch._family({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}) == "ubuntu"
    assert fetch._family({"ID": "fedora"}) is None


def test_ubuntus_later_series_are_tried_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "ubuntu.csv"
    table.write_text(
        "version,codename,series,created,release,eol\n"
        "24.04 LTS,Noble,noble,2023-10-26,2024-04-25,2029-05-31\n"
        "24.10,Oracular,oracular,2024-04-25,2024-10-10,2025-07-10\n"
        "25.04,Plucky,plucky,2024-10-10,2025-04-17,2026-01-15\n"
        "99.04,Zany,zany,2098-10-26,2099-04-25,2104-05-31\n"
    )
    monkeypatch.setattr(fetch, "UBUNTU_SERIES", table)
    assert fetch._ubuntu_suites({"VERSION_CODENAME": "noble"}) == ["oracular", "plucky", "devel"]
    monkeypatch.setattr(fetch, "UBUNTU_SERIES", tmp_path / "none.csv")
    assert fetch._ubuntu_suites({"VERSION_CODENAME": "noble"}) == ["devel"]
