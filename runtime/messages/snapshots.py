# SPDX-License-Identifier: Apache-2.0
"""Messages by which the orchestrator takes snapshots of a job, and takes a job back to one.

``image`` names a capsule's image in a snapshot, such as s17.0 (model/snapshots.py), also on the
wire. A source keeps a *session* for it, from StartSnapshot until CloseSnapshot. It thaws by itself
after an error, after ``deadline`` seconds behind the lock, and when the orchestrator is silent. A
session that is over refuses to lock and to dump. That can only fail the snapshot: the capsule's
owner stays the same.
"""

from __future__ import annotations

import msgspec

from ...criu_glue.files.identity import Identity
from ...criu_glue.survey.found import Survey
from .base import Answer, Message
from .gpus import GpuSurvey
from .records import Book, CapsuleSpec, HostFacts

# ---- a snapshot, to a holder -------------------------------------------------------------------


class Hold(Message, frozen=True):
    """Preflight at a holder, then an inbox for an image; answers Holding.

    The holder keeps the capsule's newest complete image beside it. ``epoch`` and ``rewinds`` of the
    copy go into the claims for the image. ``limit_bytes``: the holder takes at most so many bytes.
    ``newest``: the number of the job's newest complete snapshot, 0 if it has none. If the holder
    has that one, it may remove the others at once, without a ruling.
    ``together``: the bytes of all images that the snapshot brings to this holder, by capsule. It
    takes none of them unless it has room for all.
    ``gpu``: what the capsule uses of GPUs at its source. The holder needs no GPU itself: the host
    that restores the image does.
    ``own``: this is the capsule's own host, which keeps a copy for a rewind in place. Nothing comes
    over the wire. The copy goes when a holder's image or the host's processes need the memory.
    ``stays``: it does not, as a further holder's image does not. The hosts of the job hold each
    other's images then, and this copy may be the one that is left.
    ``anew``: the host ``source`` holds the complete image and will send a copy of it. The new host
    first removes the part that an earlier attempt has brought. If it has kept the image already, it
    refuses: the order may have come late.
    """

    image: str
    spec: CapsuleSpec
    survey: Survey
    facts: HostFacts
    source: str
    epoch: int
    rewinds: int
    limit_bytes: int
    newest: int = 0
    together: dict[str, int] = msgspec.field(default_factory=dict)
    gpu: GpuSurvey | None = None
    own: bool = False
    stays: bool = False
    anew: bool = False


class Holding(Answer, frozen=True):
    """``base``: the number of the snapshot at which the holder's store of the capsule's memory
    stands; 0 if it has none. Only pages written since then need to come. ``least``: the highest
    incarnation in the store, which drops pages that come under lower ones."""

    endpoint: str
    base: int
    least: int


class CheckHeld(Message, frozen=True):
    """Compare the pages of an image that has come with the source's, and keep it; answers Held.

    ``digest``: as in SnapshotClosed, not empty. Raises NotFound if the image is not here, and
    StepFailed if it is incomplete or a page differs; the holder then drops an image that differs.
    """

    image: str
    capsule: str
    digest: bytes


class Held(Answer, frozen=True):
    """The image is whole, and the holder keeps it until a ruling ends it. ``bytes``: the memory
    that the holder's images of the capsule take together, since they share pages."""

    bytes: int


# ---- a snapshot, to a source -------------------------------------------------------------------


class StartSnapshot(Message, frozen=True):
    """Open the wire, and send directories, output and memory while the job runs; answers Moved.

    ``base``, ``least``: as in Holding. The source leaves out pages only if the last session for
    this holder was of that snapshot: after any other one, the holder has dropped what came. An
    earlier session of the capsule is ended first. ``deadline``: seconds for all this. ``gpus``: the
    UUIDs of the GPUs that the capsule uses. Their device state goes into the image, and is back on
    the same GPUs after the thaw. ``newest``: as in Hold. If there is one, and device state does not
    come back within timeouts.restore, the source ends the capsule: then the job is taken back.
    ``own``: the number of the snapshot at which this host's own store stands, which was told to
    take a copy; None if there is to be none. The source writes what it sends into it, unless it
    leaves out pages that the store does not have. If that fails, only the copy is lost.
    ``ordered``: a person has ordered this snapshot, and there may be no other one after it. So it
    does not fail because its holder is silent for a moment while the job is paused.
    """

    image: str
    capsule: str
    holder: str
    endpoint: str
    base: int
    least: int
    deadline: float
    gpus: list[str] = msgspec.field(default_factory=list)
    newest: int = 0
    own: int | None = None
    ordered: bool = False


class LockCapsule(Message, frozen=True):
    """Lock the capsule's network, and keep it locked until the capsule is thawed; answers None."""

    image: str
    capsule: str
    deadline: float


class DumpCapsule(Message, frozen=True):
    """Freeze a locked capsule, and dump it into the wire; answers Frozen.

    The orchestrator sends it only after all capsules of the job have answered LockCapsule: so no
    image has an effect of what another capsule did after its own. The source promises nothing.
    """

    image: str
    capsule: str
    deadline: float


class ThawCapsule(Message, frozen=True):
    """Let the capsule run again, however far its session is; answers None once its tasks run and
    its network is open. Repeatable, and without effect where there is no session."""

    image: str
    capsule: str


class SealSnapshot(Message, frozen=True):
    """Compute the digest of a capsule that is dumped, and keep it frozen, for at most ``deadline``
    seconds of DumpCapsule; answers SnapshotClosed. After that the job is suspended, and EndEarlier
    ends the capsule without another step of it, or the orchestrator lets it go on."""

    image: str
    capsule: str


class CloseSnapshot(Message, frozen=True):
    """End a session, and thaw the capsule if it is not yet; answers SnapshotClosed. It computes the
    digest, so it is sent outside of the pause. Repeatable."""

    image: str
    capsule: str


class SnapshotClosed(Answer, frozen=True):
    """``digest``: of the memory in the image, for CheckHeld. It is empty if the holder does not
    have the whole image, or if there is no such session (any more): the snapshot has failed."""

    digest: bytes


# ---- a rewind ----------------------------------------------------------------------------------


class GetHeld(Message, frozen=True):
    """What a holder knows of an image; answers HeldFacts. Raises NotFound if it has no complete
    one: then the job cannot be taken back to it. ``compare``: whether to compare the image with
    what was kept, which takes about 0.1 s per GB. A damaged one is removed, and raises NotFound."""

    image: str
    capsule: str
    compare: bool = False


class HeldFacts(Answer, frozen=True):
    """What a Reserve for this image needs. ``image_bytes``: all that ForwardHeld will send, on all
    lanes. Unlike the one of Frozen, it has the memory that went ahead, the directories and the
    output in it. ``written``: the files on shared paths that the capsule had open for writing, each
    with its size in bytes at that moment. ``identities``: which files these were, where the file
    system tells. ``appended``: those that were open only for appending. A path is bytes: a message
    has no text that is not UTF-8. ``gpu``: as in Hold. ``digest``: of the memory, for CheckHeld at
    another holder; empty if the image has no sums (kept_sums.py)."""

    survey: Survey
    facts: HostFacts
    image_bytes: int
    written: dict[bytes, int] = msgspec.field(default_factory=dict)
    gpu: GpuSurvey | None = None
    identities: dict[bytes, Identity] = msgspec.field(default_factory=dict)
    appended: list[bytes] = msgspec.field(default_factory=list)
    digest: bytes = b""


class CutBack(Message, frozen=True):
    """Cut files on shared paths back, with the rights of the job's user; answers CutBackDone.
    ``sizes``: path → bytes. ``identities``: path → which file had the path then. With it the host
    finds a file that was renamed since. ``appended``: those that were open only for appending.
    Sent once no copy of the job runs. Nothing is cut once
    ``deadline`` seconds are over: the job may write again then. Repeatable."""

    job: str
    uid: int
    gid: int
    groups: list[int]
    sizes: dict[bytes, int]
    deadline: float
    identities: dict[bytes, Identity] = msgspec.field(default_factory=dict)
    appended: list[bytes] = msgspec.field(default_factory=list)


class CutBackDone(Answer, frozen=True):
    """``cut``: the files that the host has cut or made again. ``left``: the files that have changed
    and stay as they are. Each text names a path, and says in brackets what was done, or why not."""

    cut: list[str]
    left: list[str]


class ForwardHeld(Message, frozen=True):
    """Send a held image to a host that has reserved a sandbox; answers Frozen without phases. The
    holder itself takes it without the wire.

    ``migration``: the name under which it is reserved, such as r4.0. The held image stays as it is.
    If it is the name of the image itself, ``destination`` becomes a further holder of it (Hold).
    """

    image: str
    migration: str
    capsule: str
    destination: str
    endpoint: str


# ---- a directory, which all hosts see ----------------------------------------------------------


class SaveHeld(Message, frozen=True):
    """Write an image of the newest snapshot into ``directory``; answers Saved once it is on the
    disk. The image stays here until a ruling ends it."""

    image: str
    capsule: str
    directory: str


class Saved(Answer, frozen=True):
    """``bytes``: taken on the disk. ``digest``: of the image, as in LoadHeld."""

    bytes: int
    digest: str


class DropSaved(Message, frozen=True):
    """Remove what an attempt to save an image has left in ``directory``; answers None. Refused if
    the snapshot is whole there. Repeatable."""

    image: str
    capsule: str
    directory: str


class WriteManifest(Message, frozen=True):
    """Write what the orchestrator says and signs of a ``snapshot`` (such as s17) whose images have
    all been saved: it is whole then. Answers None once that is on the disk."""

    job: str
    snapshot: str
    directory: str
    data: bytes


class ReadManifest(Message, frozen=True):
    """Read the manifest of a snapshot; "" for the newest one of the job. Answers SavedManifest.
    Raises NotFound if the directory has none."""

    job: str
    snapshot: str
    directory: str


class SavedManifest(Answer, frozen=True):
    """A host answers ReadManifest with it. ``data``: the signed manifest, as WriteManifest has
    written it. The orchestrator checks the signature; the host does not."""

    data: bytes


class LoadHeld(Message, frozen=True):
    """Take an image that SaveHeld has written under the name ``saved``; answers None once it is
    held here as ``image``. Repeatable.

    ``digest``: the SHA-256 of the list of its files, in hex; the list has those of the files. Any
    other image is refused. ``epoch`` and ``rewinds`` go into the claims for the image.
    """

    image: str
    capsule: str
    directory: str
    saved: str
    digest: str
    epoch: int
    rewinds: int


# ---- a rewind or a suspension, to any host -----------------------------------------------------


class EndEarlier(Message, frozen=True):
    """End all that this host has of a job from before a rewind, then enter the book; answers
    EarlierEnded.

    That is: what runs, arrives, leaves or has a session and was made under fewer rewinds than
    ``book.rewinds``. The host answers once its sandboxes are removed: they are removed by the
    capsule's name, and a new one will have that name. Repeatable; copies of this count stay.
    """

    book: Book


class EarlierEnded(Answer, frozen=True):
    """Answers EndEarlier. ``ran``: the capsules that were ended there and were not frozen. One that
    was dumped for a suspension is frozen, unless it went on before its host heard of that."""

    ran: list[str]
