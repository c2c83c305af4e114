# SPDX-License-Identifier: Apache-2.0
"""Messages by which the orchestrator takes snapshots of a job, and takes a job back to one.

``image`` names a capsule's image in a snapshot, such as s17.0 (model/snapshots.py), also on the
wire. A source keeps a *session* for it, from StartSnapshot until it has thawed. It thaws by itself
after an error, after ``deadline`` seconds behind the lock, and when the orchestrator is silent. A
session that is over refuses all orders for it. That can only fail the snapshot: the capsule's owner
stays the same.
"""

from __future__ import annotations

from ...criu_glue.survey.found import Survey
from .base import Answer, Message
from .records import Book, CapsuleSpec, HostFacts

# ---- a snapshot, to a holder -------------------------------------------------------------------


class Hold(Message, frozen=True):
    """Preflight at a holder, then an inbox for an image; answers Holding.

    The holder keeps the capsule's newest complete image beside it. ``epoch`` and ``rewinds`` of the
    copy go into the claims for the image. ``limit_bytes``: the holder takes at most so many bytes.
    """

    image: str
    spec: CapsuleSpec
    survey: Survey
    facts: HostFacts
    source: str
    epoch: int
    rewinds: int
    limit_bytes: int


class Holding(Answer, frozen=True):
    """``base``: the number of the newest snapshot of which the capsule's image is complete here; 0
    if there is none. Only pages written since then need to come."""

    endpoint: str
    base: int


class CheckHeld(Message, frozen=True):
    """Compare the pages of an image that has come with the digest in its manifest; answers Held.

    Raises StepFailed if the image is incomplete or a page differs.
    """

    image: str
    capsule: str


class Held(Answer, frozen=True):
    """The image is whole, and the holder keeps it until a ruling ends it. ``bytes``: the memory
    that it takes, without what it shares with the image before."""

    bytes: int


# ---- a snapshot, to a source -------------------------------------------------------------------


class StartSnapshot(Message, frozen=True):
    """Open the wire, and send directories, output and memory while the job runs; answers Moved.

    ``base``: as in Holding. The source leaves out pages only if the last session for this holder
    was of that snapshot: after any other one, the holder has dropped what came.
    """

    image: str
    capsule: str
    holder: str
    endpoint: str
    base: int
    deadline: float


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
    """Let the capsule run again, and end its session, however far it is; answers None. Repeatable,
    and without effect where there is no session."""

    image: str
    capsule: str


# ---- a rewind ----------------------------------------------------------------------------------


class GetHeld(Message, frozen=True):
    """What a holder knows of an image; answers HeldFacts. Raises NotFound if it has no complete
    one: then the job cannot be taken back to it."""

    image: str
    capsule: str


class HeldFacts(Answer, frozen=True):
    """What a Reserve for this image needs. ``image_bytes``: all that ForwardHeld will send."""

    survey: Survey
    facts: HostFacts
    image_bytes: int


class ForwardHeld(Message, frozen=True):
    """Send a held image to a host that has reserved a sandbox, perhaps to the holder itself;
    answers Frozen without phases.

    ``migration``: the name under which it is reserved, such as r4.0. The held image stays as it is.
    """

    image: str
    migration: str
    capsule: str
    destination: str
    endpoint: str


class EndEarlier(Message, frozen=True):
    """End all that this host has of a job from before a rewind, then enter the book; answers None.

    That is: what runs, arrives, leaves or has a session and was made under fewer rewinds than
    ``book.rewinds``. The host answers once its sandboxes are removed: they are removed by the
    capsule's name, and a new one will have that name. Repeatable; copies of this count stay.
    """

    book: Book
