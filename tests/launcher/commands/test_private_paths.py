# SPDX-License-Identifier: Apache-2.0
"""`liveshift run` says before the start what a capsule would not find below its own /tmp."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_harness import Call

from liveshift.errors import WrongUsage
from liveshift.launcher.commands import private_paths
from liveshift.runtime.messages import RunJob


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Path]:
    """A directory that every host has, with a script in it and a link to one below /tmp."""
    place = Path(f"/var/tmp/ls-test-there-{os.getpid()}")
    place.mkdir()
    (place / "train.py").touch()
    (tmp_path / "train.py").touch()
    (place / "link.py").symlink_to(tmp_path / "train.py")
    (tmp_path / "link.py").symlink_to(place / "train.py")
    yield place
    for path in place.iterdir():
        path.unlink()
    place.rmdir()


def check(argv: list[str], cwd: Path | str, *shared: Path | str, path: str = "/usr/bin") -> str:
    """What it warns of, in one text."""
    said: list[str] = []
    private_paths.check(
        argv, str(cwd), {"PATH": path}, lambda: ["/", *map(str, shared)], said.append
    )
    return "\n".join(said)


@pytest.mark.parametrize(
    "how", ["python {}", "torchrun --nproc-per-node 1 {}", "bash -x {} --lr 1"]
)
@pytest.mark.parametrize(
    "script", ["{tmp}/train.py", "{there}/link.py", "link.py", "{tmp}/link.py"]
)
def test_a_script_that_a_capsule_cannot_find_is_no_use(
    there: Path, tmp_path: Path, how: str, script: str
) -> None:
    argv = how.format(script.format(tmp=tmp_path, there=there)).split()
    lies = str(tmp_path / ("link.py" if script.startswith("{tmp}/l") else "train.py"))
    with pytest.raises(WrongUsage, match=f"the script {lies} is not there.* /tmp is its") as no:
        check(argv, there)
    assert "files.shared" in (no.value.hint or "")
    assert check(argv, there, tmp_path) == "", "it is shared"


def test_a_working_directory_and_a_program_below_tmp_are_no_use(
    there: Path, tmp_path: Path
) -> None:
    with pytest.raises(WrongUsage, match=f"working directory {tmp_path} is not there"):
        check(["python", "-c", "pass"], tmp_path)
    with pytest.raises(
        WrongUsage, match=r"working directory /dev/shm/x is not there in .* /dev/shm"
    ):
        check(["true"], "/dev/shm/x")
    program = tmp_path / "trainer"
    program.touch(mode=0o755)
    for argv in (["trainer"], [str(program)]):
        with pytest.raises(WrongUsage, match=f"the program {program} is not there"):
            check(argv, there, path=f"{tmp_path}:/usr/bin")


def test_other_paths_there_are_warned_of(there: Path, tmp_path: Path) -> None:
    out, new = tmp_path / "out", tmp_path / "new"
    out.mkdir()
    for words in ([f"--out={out}"], ["--out", str(out)], ["--out", str(new)]):
        said = check(["python", "train.py", *words], there)
        assert said.startswith(f"warning: {words[-1].removeprefix('--out=')} is another one")
        assert said.count("\n") == 0
        assert "gone with the job. For what is to stay, a path that all hosts share will do" in said
        assert "also one below /tmp that files.shared lists" in said
    assert "/tmp is another one" in check(["python", "/data/x.py"], "/tmp"), (
        "it is there, and empty"
    )
    assert check(["python", "train.py", "--out", str(out)], there, tmp_path) == ""


def test_what_lies_elsewhere_asks_nobody(there: Path) -> None:
    def asked() -> list[str]:
        pytest.fail("the orchestrator is asked for nothing")

    argv = ["python", "train.py", "--lr", "1e-3", "--tmp", "tmp/x", "--name=/var/tmp/x", ""]
    private_paths.check(argv, str(there), os.environ, asked, pytest.fail)


def test_run_starts_nothing_that_cannot_work(double: Any, call: Call, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ("run", "-d", "--", "python", "train.py", "--out", "/tmp/out")
    code, out, err = call(*words)
    assert (code, out) == (0, "job1\n")
    assert "warning: /tmp/out is another one in the capsule" in err
    double.shared = ["/"]
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert f"error: the working directory {tmp_path} is not there in a capsule" in err
    assert "hint: " in err
    assert len([ask for ask in double.asks if isinstance(ask, RunJob)]) == 1
