# SPDX-License-Identifier: Apache-2.0
"""What is written beside the images of a saved snapshot comes back, if a known cluster has signed
every byte of it; and which host reads it."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rewind_scene import CLUSTER, RewindScene

from liveshift.errors import LiveshiftError, NotFound, Refused, Unreachable
from liveshift.runtime import messages
from liveshift.runtime.control import keys
from liveshift.runtime.control.signatures import Signatures
from liveshift.runtime.messages import GpuSeat, Message
from liveshift.runtime.model.spares import GpuNeed
from liveshift.runtime.snapshot import saved_snapshot
from liveshift.runtime.snapshot.directory_images import DirectoryImages
from liveshift.runtime.snapshot.saved_snapshot import SavedSnapshot


@pytest.fixture
def signatures(tmp_path: Path) -> Signatures:
    keys.init(tmp_path / "keys", ["h0"])
    return Signatures(tmp_path / "keys")


def described() -> SavedSnapshot:
    scene = RewindScene()
    digests = {name: f"digest of {name}" for name in scene.job.capsules}
    return saved_snapshot.describe(CLUSTER, scene.job, scene.generation, digests)


def test_a_saved_snapshot_comes_back(signatures: Signatures) -> None:
    data = saved_snapshot.encode(described(), signatures)
    saved, signer = saved_snapshot.decode(data, signatures, "/kept")
    assert (saved, signer) == (described(), "")
    assert (saved.job, saved.snapshot, saved.boundary, saved.time) == ("gpt", "s17", "step 9", 100)
    assert (saved.cluster, saved.subnet) == ("rewind", "10.99.0.0/24")
    assert {c.index: c.image for c in saved.capsules.values()} == {0: "s17.0", 1: "s17.1"}
    assert saved.request() == (RewindScene().job.request, 0)


def test_a_saved_snapshot_says_what_its_hosts_need(signatures: Signatures) -> None:
    scene, need = RewindScene(), GpuNeed(frozenset({"GPU-a"}), (GpuSeat("GPU-a", "H100", True),))
    generation = dataclasses.replace(scene.generation, gpus={"gpt/1": need}, carried=["gpt/0"])
    digests = dict.fromkeys(scene.job.capsules, "digest")
    told = saved_snapshot.describe(CLUSTER, scene.job, generation, digests)
    data = saved_snapshot.encode(told, signatures)
    saved, _ = saved_snapshot.decode(data, signatures, "/kept")
    assert (saved.gpus, saved.carried) == ({"gpt/1": need}, ["gpt/0"])
    assert (described().gpus, described().carried) == ({}, [])


def test_every_byte_counts(signatures: Signatures) -> None:
    data = saved_snapshot.encode(described(), signatures)
    body, _, line = data.partition(b"\n")
    for at in range(0, len(body), 7):
        changed = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        with pytest.raises(Refused, match=r"changed since|no signature"):
            saved_snapshot.decode(changed + b"\n" + line, signatures, "/kept")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"key":1,"signature":""}',
        b'{"key":"","signature":"?"}',
        b"x" * 99,
    ],
)
def test_without_a_signature_it_is_refused(signatures: Signatures, line: bytes) -> None:
    body = saved_snapshot.encode(described(), signatures).partition(b"\n")[0]
    with pytest.raises(Refused, match="the snapshot in /kept has no signature that can be read"):
        saved_snapshot.decode(body + b"\n" + line, signatures, "/kept")
    with pytest.raises(Refused, match="has no signature"):
        saved_snapshot.decode(line, signatures, "/kept")


def signed(body: bytes, signatures: Signatures) -> bytes:
    line = {
        "key": signatures.key,
        "signature": base64.b64encode(signatures.sign(body)).decode(),
    }
    return body + b"\n" + json.dumps(line).encode()


def test_one_of_a_later_version_is_refused_as_that(signatures: Signatures) -> None:
    """Also if this version cannot read the rest."""
    with pytest.raises(
        Refused, match=r"by another version .* its format is 2, and this one reads 1"
    ):
        saved_snapshot.decode(signed(b'{"version":2}', signatures), signatures, "/kept")
    for body in (b"[]", b"{}", b'{"version":1}', b"\xff"):
        with pytest.raises(LiveshiftError, match="cannot be read"):
            saved_snapshot.decode(signed(body, signatures), signatures, "/kept")


@pytest.mark.parametrize("spec", ["", "?", base64.b64encode(b"\x80").decode(), "AAAA"])
def test_a_command_that_cannot_be_read_is_an_error(spec: str) -> None:
    with pytest.raises(LiveshiftError, match="the command of gpt cannot be read"):
        msgspec.structs.replace(described(), spec=spec).request()


def test_a_job_needs_the_addresses_that_its_processes_know() -> None:
    assert saved_snapshot.overlay_of(described(), CLUSTER).vni == 1
    last = msgspec.structs.replace(described(), subnet="10.99.255.0/24")
    assert saved_snapshot.overlay_of(last, CLUSTER).vni == 256
    for subnet in ("10.100.0.0/24", "10.99.0.0/23", "0.0.0.0/0", "10.99.0.9/24", "x"):
        with pytest.raises(Refused, match="cannot go on here"):
            saved_snapshot.overlay_of(msgspec.structs.replace(described(), subnet=subnet), CLUSTER)


# ---- who reads it ------------------------------------------------------------------------------


class Hosts:
    """``answers``: what each host says of the directory."""

    def __init__(self, signatures: Signatures, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.images = DirectoryImages(CLUSTER, self)
        self.images._signatures = signatures

    async def __call__(self, host: str, message: Message, timeout: float) -> Message | None:
        assert timeout > 0
        self.asked.append(host)
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return messages.SavedManifest(answer)

    def find(self, job: str = "gpt", snapshot: str = "") -> Any:
        return asyncio.run(self.images.find(self.answers, "/kept", job, snapshot))


def test_a_host_that_does_not_see_the_directory_is_passed_over(signatures: Signatures) -> None:
    data = saved_snapshot.encode(described(), signatures)
    answers = {
        "h0": NotFound("/kept: not there"),
        "h1": Unreachable("silent"),
        "h2": data,
        "h3": b"",
    }
    hosts = Hosts(signatures, answers)
    found = hosts.find()
    assert (found.host, found.saved, found.signer) == ("h2", described(), "")
    assert hosts.asked == ["h0", "h1", "h2"]
    assert hosts.images.busy == {}


@pytest.mark.parametrize("hosts", [("h0", "h1"), ("h1", "h0")])
def test_a_host_that_has_looked_knows_more_than_one_that_is_silent(
    signatures: Signatures, hosts: tuple[str, str]
) -> None:
    every = {"h0": NotFound("/kept has no snapshot s3 of gpt: it has s17"), "h1": Unreachable("x")}
    with pytest.raises(NotFound, match="it has s17"):
        Hosts(signatures, {host: every[host] for host in hosts}).find(snapshot="s3")
    with pytest.raises(Unreachable, match="no host is up that could read it"):
        Hosts(signatures, {}).find()


def test_a_forged_one_is_not_passed_over(signatures: Signatures) -> None:
    """Another host reads the same file."""
    hosts = Hosts(signatures, {"h0": b"forged", "h1": b"too"})
    with pytest.raises(Refused, match="has no signature"):
        hosts.find()
    assert hosts.asked == ["h0"]
