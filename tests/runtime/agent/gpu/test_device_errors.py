# SPDX-License-Identifier: Apache-2.0
"""Errors of GPUs in the kernel's log, which is a file here."""

from __future__ import annotations

from pathlib import Path

import pytest

from liveshift.runtime.agent.gpu.device_errors import DeviceErrors, address

LOST = "3,911,7000,-;NVRM: Xid (PCI:0000:65:00): 79, pid=7, name=python, GPU has fallen off.\n"
OWN = "3,912,7001,-;NVRM: Xid (PCI:0000:65:00): 31, pid=7, name=python, MMU Fault\n"
OTHER = "3,913,7002,-;NVRM: Xid (PCI:0000:ca:00): 48, pid=9, An uncorrectable error\n"
BARE = "3,914,7003,-;NVRM: Xid (PCI:0000:65:00): 119\n"

A, B = (0, 0x65, 0), (0, 0xCA, 0)
GPUS = {A: "GPU-a", B: "GPU-b"}


def test_addresses_of_nvml_and_of_the_log_are_the_same() -> None:
    assert address("00000000:65:00.0") == address("0000:65:00") == A
    assert address("0001:CA:1f.0") == (1, 0xCA, 0x1F)
    assert address("65:00.0") is None
    assert address("") is None


def test_what_comes_into_the_log_is_told_with_its_gpu(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(LOST)  # before: of another life
    errors = DeviceErrors(log)
    assert errors.within(60, GPUS) == []
    with log.open("a") as file:
        file.write("6,910,6999,-;eth0: link up\n" + LOST + OWN + OTHER)
        file.flush()
        found = errors.within(60, GPUS)
        assert [(each.gpu, each.text) for each in found] == [
            ("GPU-a", "Xid 79 (pid=7, name=python, GPU has fallen off.)"),
            ("GPU-b", "Xid 48 (pid=9, An uncorrectable error)"),
        ], "a program's own error is none of its GPU"
        assert all(0 <= each.ago < 5 for each in found)
        assert [each.gpu for each in errors.within(60, {B: "GPU-b"})] == ["GPU-b"]
        file.write(BARE)
    assert [each.text for each in errors.within(60, {A: "GPU-a"})][-1] == "Xid 119"
    assert errors.within(-1, GPUS) == [], "it is over"
    assert errors.within(60, GPUS) == []
    errors.close()
    assert errors.within(60, GPUS) == []


def test_without_a_log_nothing_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert DeviceErrors(tmp_path / "none").within(60, GPUS) == []
    assert "errors of GPUs stay unknown" in caplog.text
