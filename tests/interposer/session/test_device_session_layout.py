# SPDX-License-Identifier: Apache-2.0
"""device_session.h and its Python mirror describe the same messages."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from checkout import INTERPOSER

from liveshift.interposer import device_session
from liveshift.interposer.device_session import Op

RECORDS = {"request": device_session.REQUEST, "reply": device_session.REPLY}


def test_messages_and_operations_are_the_same_in_c(tmp_path: Path) -> None:
    expected, lines = [], []
    for owner, record in RECORDS.items():
        ends = [*record.offsets.values(), record.size][1:]
        for (name, at), end in zip(record.offsets.items(), ends, strict=True):
            expected.append(f"{owner}.{name} {at} {end - at}")
            field = f"struct liveshift_device_{owner}, {name}"
            size = f"sizeof(((struct liveshift_device_{owner} *)0)->{name})"
            lines.append(f'printf("{owner}.{name} %zu %zu\\n", offsetof({field}), {size});')
        expected.append(f"{owner} {record.size}")
        lines.append(f'printf("{owner} %zu\\n", sizeof(struct liveshift_device_{owner}));')
    constants = {f"LIVESHIFT_DEVICE_{op.name}": op.value for op in Op} | {
        "LIVESHIFT_DEVICE_PROTOCOL": device_session.PROTOCOL,
        "LIVESHIFT_DEVICE_SAMPLE": device_session.SAMPLE,
    }
    expected += [f"{name} {value}" for name, value in constants.items()]
    lines += [f'printf("{name} %d\\n", (int){name});' for name in constants]
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "session/device_session.h"\n'
        "int main(void) {\n" + "\n".join(lines) + "\n}\n"
    )
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-std=gnu11", f"-I{INTERPOSER}", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == expected


def test_every_operation_of_the_header_is_mirrored() -> None:
    text = (INTERPOSER / "session/device_session.h").read_text()
    body = text.split("enum liveshift_device_op {", 1)[1].split("\n};", 1)[0]
    named = [line.split("=")[0].strip() for line in body.splitlines() if " = " in line]
    assert named == [f"LIVESHIFT_DEVICE_{op.name}" for op in Op]


def test_a_reply_is_read() -> None:
    packet = device_session.REPLY.struct.pack(
        Op.RELEASE, -errno.ENOENT, 1, 2, 3, 4, 15, b"u" * 16, b"no arena block begins there"
    )
    seen = device_session.reply(packet)
    assert (seen.op, seen.address, seen.size, seen.value, seen.device) == (Op.RELEASE, 1, 2, 3, 4)
    assert seen.ended
    assert seen.failure == "no arena block begins there (No such file or directory)"
    with pytest.raises(ValueError, match="100 bytes"):
        device_session.reply(packet[:100])


def test_a_process_may_say_any_error_number() -> None:
    packet = device_session.REPLY.struct.pack(Op.SYNC, -(2**31), 0, 0, 0, 0, 0, b"u" * 16, b"")
    assert device_session.reply(packet).failure


def test_a_request_is_the_headers() -> None:
    packet = device_session.request(Op.CHECKSUM, 0x1000, 4096, 8)
    assert device_session.REQUEST.struct.unpack(packet) == (2, 0, 0x1000, 4096, 8)
