# SPDX-License-Identifier: Apache-2.0
"""The manifest of a snapshot in a directory. It has all that an orchestrator needs to let the job
go on, even one that has never had the job.

The first line describes the snapshot, with a digest of each image's list of files; these lists have
the digests of the files. The second line is a signature of the first one. So a job can be resumed
only if a cluster with a known key (control/signatures.py) has saved it, and if no byte was changed.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping

import msgspec

from ...criu_glue.network.overlay import Overlay
from ...errors import LiveshiftError, Refused
from ..config.cluster import Cluster
from ..control.signatures import Signatures
from ..messages import RunJob
from ..model import run_spec
from ..model.jobs import Job
from ..model.snapshots import Generation, image_name
from ..model.spares import NO_GPUS, GpuNeed

VERSION = 1


class SavedCapsule(msgspec.Struct, frozen=True):
    """``image``: the name of its image beside this file. ``digest``: as in messages.Saved.
    ``gpus``: as in Generation. ``carried``: whether it is in Generation.carried."""

    index: int
    image: str
    digest: str
    gpus: GpuNeed = NO_GPUS
    carried: bool = False


class SavedSnapshot(msgspec.Struct, frozen=True):
    """``snapshot``: its name where it was taken. ``time``: of the boundary, in seconds since 1970.
    ``subnet``: the job's addresses, which its processes know. ``spec``: the request and its user
    (model/run_spec.py), in base64. ``bytes``: memory that all images take."""

    version: int
    job: str
    snapshot: str
    boundary: str
    time: float
    cluster: str
    subnet: str
    bytes: int
    spec: str
    capsules: dict[str, SavedCapsule]

    @property
    def gpus(self) -> dict[str, GpuNeed]:
        """As in Generation."""
        return {name: each.gpus for name, each in self.capsules.items() if each.gpus.used}

    @property
    def carried(self) -> list[str]:
        """As in Generation."""
        return [name for name, each in self.capsules.items() if each.carried]

    def request(self) -> tuple[RunJob, int]:
        """Return the request and its user. Raises LiveshiftError if they cannot be read."""
        try:
            return run_spec.decode(base64.b64decode(self.spec))
        except (ValueError, msgspec.MsgspecError) as error:
            raise LiveshiftError(f"the command of {self.job} cannot be read: {error}") from error


class _Version(msgspec.Struct):
    version: int


class _Signature(msgspec.Struct):
    key: str
    signature: str


def describe(
    cluster: Cluster, job: Job, generation: Generation, digests: Mapping[str, str]
) -> SavedSnapshot:
    """``digests``: that of each capsule's image."""
    capsules = {
        capsule.name: SavedCapsule(
            capsule.index,
            image_name(generation.number, capsule.index),
            digests[capsule.name],
            generation.gpus.get(capsule.name, NO_GPUS),
            capsule.name in generation.carried,
        )
        for capsule in job.capsules.values()
    }
    return SavedSnapshot(
        VERSION,
        job.name,
        generation.name,
        generation.boundary,
        generation.time,
        cluster.name,
        job.overlay.subnet,
        generation.bytes,
        base64.b64encode(run_spec.encode(job.request, job.uid)).decode(),
        capsules,
    )


def encode(saved: SavedSnapshot, signatures: Signatures) -> bytes:
    """Both lines. Raises LiveshiftError if it cannot be signed."""
    body = msgspec.json.encode(saved)
    signature = base64.b64encode(signatures.sign(body)).decode()
    return body + b"\n" + msgspec.json.encode(_Signature(signatures.key, signature)) + b"\n"


def decode(data: bytes, signatures: Signatures, where: str) -> tuple[SavedSnapshot, str]:
    """Decode both lines. Return the snapshot and its signer: "" for this cluster, else the name
    under which a key is trusted. ``where``: the directory, for errors. Raises Refused if no known
    key has signed it, LiveshiftError if it cannot be read."""
    body, _, line = data.partition(b"\n")
    try:
        signed = msgspec.json.decode(line, type=_Signature)
        signature = base64.b64decode(signed.signature, validate=True)
    except (ValueError, msgspec.DecodeError):
        raise Refused(f"the snapshot in {where} has no signature that can be read") from None
    signer = signatures.check(body, signed.key, signature, f"the snapshot in {where}")
    try:
        if (found := msgspec.json.decode(body, type=_Version).version) != VERSION:
            raise Refused(
                f"the snapshot in {where} was written by another version of liveshift: its format"
                f" is {found}, and this one reads {VERSION}"
            )
        return msgspec.json.decode(body, type=SavedSnapshot), signer
    except (ValueError, msgspec.DecodeError) as error:  # ValueError: it is not UTF-8
        raise LiveshiftError(f"the snapshot in {where} cannot be read: {error}") from error


def overlay_of(saved: SavedSnapshot, cluster: Cluster) -> Overlay:
    """The overlay that the job must get again: its processes know their addresses. Raises Refused
    if this cluster has no such addresses."""
    own = None
    with contextlib.suppress(ValueError):  # it is no network at all
        own = Overlay.numbered(saved.subnet, str(cluster.overlay))
    if own is None:
        raise Refused(
            f"{saved.job} cannot go on here: its processes have addresses of {saved.subnet}, and"
            f" the jobs of this cluster get theirs from {cluster.overlay}",
            hint=f"cluster.overlay must be what it was in the cluster {saved.cluster}",
        )
    return own
