# SPDX-License-Identifier: Apache-2.0
"""Packages from another suite of the archive that apt is configured with; apt stays as it is.

Sources are read from where apt reads them, in both formats (sources.list(5)). A download then uses
its own apt configuration below a temporary folder. That configuration has one source entry and no
installed packages, so that apt resolves every library down to libc. It has the keys of the entry
that it was derived from, and apt refuses unsigned or unverifiable archives.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import Refused, StepFailed

_DOWNLOAD_DEADLINE_S = 900.0
_NO = frozenset({"no", "false", "0", "off", "without", "disable"})  # apt-pkg, StringToBool


@dataclass(frozen=True)
class AptSource:
    """One ``deb`` entry, reduced to one URI."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""
    """Keyring paths, fingerprints or a whole key block; "" means apt's trusted keyrings."""

    def stanza(self) -> str:
        """The entry in deb822 format."""
        lines = [
            "Types: deb",
            f"URIs: {self.uri}",
            f"Suites: {' '.join(self.suites)}",
            f"Components: {' '.join(self.components)}",
            "Targets: Packages",  # no translations, icons, lists of contents
        ]
        if self.signed_by:
            lines.append(f"Signed-By: {self.signed_by}")
        return "\n".join(lines) + "\n"


def parse_deb822(text: str) -> Iterator[AptSource]:
    """The enabled ``deb`` entries of a ``*.sources`` file, one per URI."""
    for paragraph in re.split(r"\n[ \t]*\n", re.sub(r"(?m)^#.*\n?", "", text + "\n")):
        fields: dict[str, str] = {}
        key = ""
        for line in paragraph.splitlines():
            if line[:1] in (" ", "\t"):
                if key:
                    fields[key] += "\n" + line
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split():
            continue
        if fields.get("enabled", "yes").lower() in _NO:
            continue
        for uri in fields.get("uris", "").split():
            suites = tuple(fields.get("suites", "").split())
            components = tuple(fields.get("components", "").split())
            yield AptSource(uri, suites, components, fields.get("signed-by", ""))


def parse_one_line(text: str) -> Iterator[AptSource]:
    """The ``deb`` entries of a ``sources.list``: ``deb [options] uri suite component…``."""
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[(?P<options>[^\]]*)\]\s*)?(?P<rest>[^#\[]+)", line)
        words = match["rest"].split() if match else []
        if match is None or len(words) < 2:
            continue
        options = dict(o.partition("=")[::2] for o in (match["options"] or "").split() if "=" in o)
        signed_by = " ".join(options.get("signed-by", "").split(","))
        yield AptSource(words[0], (words[1],), tuple(words[2:]), signed_by)


def configured() -> list[AptSource]:
    """Every ``deb`` entry that apt uses on this machine; raises Refused if there is no apt."""
    try:
        wanted = ("list", "Dir::Etc::sourcelist/f", "parts", "Dir::Etc::sourceparts/d")
        places = subprocess.run(
            ["apt-config", "shell", *wanted], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refused(f"cannot read apt's configuration: {error}") from error
    named = dict(word.partition("=")[::2] for word in shlex.split(places))
    parts = Path(named.get("parts", "/etc/apt/sources.list.d"))
    paths = [Path(named.get("list", "/etc/apt/sources.list"))]
    paths += sorted(parts.iterdir()) if parts.is_dir() else []
    sources: list[AptSource] = []
    for path in (p for p in paths if p.is_file() and p.suffix in (".list", ".sources")):
        parse = parse_deb822 if path.suffix == ".sources" else parse_one_line
        sources += parse(path.read_text(errors="replace"))
    return sources


def archives(
    sources: list[AptSource], codename: str, components: tuple[str, ...]
) -> list[AptSource]:
    """The entries that may be the distribution's own archive, likeliest first, with ``components``.

    Archives of third parties use the same suite names. The signed Release file shows which entry
    is the right one (:meth:`Download.origin`).
    """
    names = {codename, "stable", "oldstable", "testing", "unstable", "sid"}
    fitting = [
        replace(s, components=components)
        for s in sources
        if names & set(s.suites) and "main" in s.components and not s.uri.startswith("cdrom:")
    ]
    unique = {s.uri.rstrip("/"): s for s in reversed(fitting)}
    own = re.compile(r"/(debian|ubuntu|ubuntu-ports)/?$")
    return sorted(reversed(unique.values()), key=lambda s: own.search(s.uri) is None)


class Download:
    """One suite, seen through a separate apt configuration below ``directory``."""

    def __init__(self, directory: Path, source: AptSource) -> None:
        self._directory = directory
        self._source = source
        self._configuration = directory / "apt.conf"
        for name in ("state/lists/partial", "cache/archives/partial"):
            (directory / name).mkdir(parents=True)
        (directory / "status").touch()
        (directory / "archive.sources").write_text(source.stanza())
        self._configuration.write_text(_configuration(directory))

    def update(self) -> None:
        """Fetch and verify the suite's index; raises StepFailed with apt's message."""
        self._apt("update", "apt-get", "update")

    def origin(self) -> str:
        """The Origin of the suite's signed Release file: "Debian", "Ubuntu" or another name.

        Returns "nobody" if no Release file names one."""
        for release in sorted((self._directory / "state/lists").glob("*Release")):
            text = release.read_text(errors="replace")
            match = re.search(r"^Origin:\s*(.+?)\s*$", text, re.MULTILINE)
            if match:
                return match[1]
        return "nobody"

    def version(self, package: str) -> str:
        """The version of ``package`` in the suite; "" if the suite has no such package."""
        said = self._apt("look up", "apt-cache", "policy", package)
        match = re.search(r"^\s*Candidate:\s*(\S+)", said, re.MULTILINE)
        return match[1] if match and match[1] != "(none)" else ""

    def packages(self, package: str) -> list[Path]:
        """Download ``package`` and all it depends on; raises StepFailed with apt's message."""
        self._apt(
            "download", "apt-get", "install", "--download-only", "--no-install-recommends", package
        )
        return sorted((self._directory / "cache/archives").glob("*.deb"))

    def _apt(self, step: str, *command: str) -> str:
        done = subprocess.run(
            [command[0], "-c", str(self._configuration), *command[1:]],
            env={**os.environ, "LC_ALL": "C"},  # we parse apt's output
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_DOWNLOAD_DEADLINE_S,
        )
        if done.returncode != 0:
            lines = done.stdout.splitlines()
            said = [line for line in lines if line.startswith(("E:", "W:", "Err:"))] or lines
            where = f"{self._source.uri} {' '.join(self._source.suites)}"
            raise StepFailed(f"apt {step}", f"{where}: " + " ".join(said[-4:]))
        return done.stdout


def _configuration(directory: Path) -> str:
    """The text of apt.conf. apt reads it after its own files, so proxies and the like stay in
    force. Hooks and pins are cleared."""
    return f"""\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear APT::Default-Release;
Dir::Etc::sourcelist "{directory}/archive.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{directory}/state";
Dir::State::lists "{directory}/state/lists";
Dir::State::status "{directory}/status";
Dir::Cache "{directory}/cache";
Dir::Cache::archives "{directory}/cache/archives";
Dir::Log "{directory}";
APT::Get::Assume-Yes "true";
APT::Get::AllowUnauthenticated "false";
APT::Update::Error-Mode "any";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
Acquire::Retries "3";
"""
