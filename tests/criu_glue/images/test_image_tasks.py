# SPDX-License-Identifier: Apache-2.0
"""The tasks of an image have the rights that the user of their capsule has, and no others."""

from __future__ import annotations

import os
import re
from pathlib import Path

import checkout
import pytest
from capsule_images import ALICE, BOB, ROOT, Image, plain, rich
from image_edits import decode, encode, put, varint

from liveshift.criu_glue.files.rights import User
from liveshift.criu_glue.images import image_rights
from liveshift.errors import StepFailed

__all__ = ["plain", "rich"]

pytestmark = pytest.mark.root  # only root can act as another user


CREDS = (5, 10)


@pytest.mark.parametrize("task", ["core-1001", "core-1002"], ids=["process", "thread"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "uid 0"),
        (3, "euid 0"),
        (5, "suid 0"),
        (7, "fsuid 0"),
        (2, "gid 0"),
        (4, "egid 0"),
        (6, "sgid 0"),
        (8, "fsgid 0"),
    ],
)
def test_a_task_of_root_in_a_users_capsule(
    plain: Image, task: str, number: int, words: str
) -> None:
    plain.change(task, (*CREDS, number), 0)
    with pytest.raises(
        StepFailed, match=f"{task}.img' .*of a task with {words}, but its capsule is user 64001's"
    ):
        plain.check()
    plain.check(ROOT)


@pytest.mark.parametrize(
    ("number", "value", "words"),
    [
        (9, 1 << 23, "inheritable capabilities"),
        (10, 1, "permitted capabilities"),
        (11, 1, "effective capabilities"),
        (11, varint(1 << 7) + varint(0), "effective capabilities"),  # packed
        (19, 1, "ambient capabilities"),
        (14, 0, "group 0"),
        (14, varint(64001) + varint(27), "group 27"),
    ],
)
def test_capabilities_and_groups(plain: Image, number: int, value: int | bytes, words: str) -> None:
    plain.change("core-1001", (*CREDS, number), value)
    with pytest.raises(StepFailed, match=f"of a task with {words}, but"):
        plain.check()


@pytest.mark.parametrize("user", [ALICE, ROOT])
@pytest.mark.parametrize("field", [9, 10, 11, 12, 19])
@pytest.mark.parametrize(
    ("words", "number"),
    [(varint(1 << 21) + varint(0), 21), (varint(0) + varint(1 << 7), 39), (varint(1 << 27), 27)],
)
def test_capabilities_that_no_capsule_has(
    plain: Image, user: User, field: int, words: bytes, number: int
) -> None:
    (core,) = plain.entries("core-1001")
    plain.write("core-1001", [put(put(core, (*CREDS, field), None), (*CREDS, field), words)])
    with pytest.raises(StepFailed, match=f"of a task with capability {number}, which no capsule"):
        plain.check(user)


def test_the_capabilities_are_those_that_capsule_init_keeps() -> None:
    source = Path(image_rights.__file__).parent / "capsule_task.c"
    if not source.exists():
        source = checkout.ROOT / "criu_glue" / "capsule" / "capsule_task.c"
    kept = re.search(r"kept\[\] = \{(.*?)\}", source.read_text(), re.DOTALL)
    assert kept
    header = Path("/usr/include/linux/capability.h").read_text()
    numbers = dict(re.findall(r"#define (CAP_\w+)\s+(\d+)", header))
    names = re.findall(r"CAP_\w+", kept[1])
    assert sorted(int(numbers[name]) for name in names) == sorted(image_rights.KEPT)


def test_another_users_tasks(plain: Image) -> None:
    with pytest.raises(StepFailed, match="of a task with uid 64001, euid 64001"):
        plain.check(BOB)
    plain.check(User(64001, 27, (64001,)))


def test_what_criu_would_read_otherwise_is_damaged(plain: Image) -> None:
    """protobuf-c cuts to 32 bits, takes the last of several and merges messages."""
    (core,) = plain.entries("core-1001")
    (thread,) = [v for n, v in decode(core) if n == 5]
    assert isinstance(thread, bytes)
    (creds,) = [v for n, v in decode(thread) if n == 10]
    assert isinstance(creds, bytes)
    root = put(creds, (1,), 0)
    for changed in (
        put(core, (*CREDS, 1), 1 << 32),
        put(core, (*CREDS, 1), (1 << 32) + 64001),
        put(core, CREDS, creds + encode([(1, 0)])),
        put(core, (5,), thread + encode([(10, root)])),
        core + encode([(5, encode([(10, encode([(1, 0)]))]))]),
        put(core, (*CREDS, 1), b"\0\0\0\0"),
        put(core, (*CREDS, 1), None),
    ):
        plain.write("core-1001", [changed])
        with pytest.raises(StepFailed, match="the image is damaged"):
            plain.check()


def test_a_task_must_say_whose_it_is(rich: Image) -> None:
    rich.check()  # one of its tasks has ended and says nothing
    rich.change("core-1001", CREDS, None)
    with pytest.raises(StepFailed, match="of a task that belongs to no user"):
        rich.check()


def test_only_a_task_that_has_ended_need_not(rich: Image) -> None:
    rich.change("core-1003", (3, 1), 1)
    with pytest.raises(StepFailed, match=r"missing|no user"):
        rich.check()
    rich.change("core-1003", (3, 1), 2)
    rich.change("core-1003", (2,), b"")  # registers to go on from
    with pytest.raises(StepFailed, match="of a task that belongs to no user"):
        rich.check()


@pytest.mark.parametrize("number", image_rights.NAMESPACES)
def test_other_namespaces_than_those_of_the_sandbox(plain: Image, number: int) -> None:
    plain.change("ids-1001", (number,), 99)
    with pytest.raises(StepFailed, match="namespace that is not the sandbox's"):
        plain.check()


def test_another_root_directory(plain: Image) -> None:
    plain.reg(500, "/tmp", os.O_RDONLY)
    plain.change("fs-1001", (2,), 500)
    with pytest.raises(StepFailed, match="of a task whose root is '/tmp'"):
        plain.check()
