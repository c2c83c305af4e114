# SPDX-License-Identifier: Apache-2.0
"""Every message that crosses a socket, and the one encode and decode for all of them.

How a planned migration flows (data goes source agent → destination agent, nothing else does):

A. orchestrator → source       ``Inspect``   what the capsule consists of, what stands in the way
B. orchestrator → destination  ``Reserve``   preflight; an empty, locked room; an inbox
C. orchestrator → source       ``Precopy``   directories, output, memory, while training runs
   source → orchestrator       ``Progressed``  how far that is; nobody waits for it
D. orchestrator → all ranks    ``Arm`` …     quiesce: gates closed at a collective boundary
E. orchestrator → source       ``Freeze``    network locked, dumped into the wire, held frozen
F. orchestrator: the journal   commit        the destination owns epoch + 1 from here on
G. orchestrator → everyone     ``Locate``    the address book with the new epoch
H. orchestrator → destination  ``Restore``   CRIU restores; before the tree runs:
I. destination → orchestrator  ``Claim``     may it run? The journal grants, the network opens
J. orchestrator → all ranks    ``OpenGate``  communicators rebuilt where they were down; go on
K. orchestrator → source       ``Settle``    ask what becomes of the frozen copy; ``Claim``: it ends
   Beside all that: ``StartMeasure`` to the source at the request, ``EndMeasure`` to both sides
   once it is over, from which the orchestrator reckons what the move cost the job.
   When something fails, both sides are told to ``Settle``: they ask, and run, wait or end as
   ownership.rule says. After a commit F is done again for the source, under a further epoch.

Another GPU of the same host: ``LookAtGpus``, D, ``SwapGpu``, J. Nobody else may come to own the
capsule, so nothing is committed or claimed; if the answer is lost, ``SettleSwap`` asks for it.

A frame is MessagePack: ``{"v": VERSION, "id": n, "body": {"t": tag, …}}`` asks, the same with
``"ok"`` answers, with ``"error": [kind, message, hint]`` refuses. Tags are the class names.
Bump VERSION when a field or a message is added, removed or changes its meaning: unknown fields are
refused, and peers of different versions turn each other away, saying both.
"""

from .agents import (
    OFFER_LIMIT,
    Arrived,
    Beat,
    Books,
    Claim,
    End,
    Ended,
    Forget,
    Forward,
    Freeze,
    Frozen,
    Hello,
    Inspect,
    Inspected,
    JobEnded,
    Locate,
    LookAtGpus,
    Moved,
    Precopy,
    Progress,
    Progressed,
    Relay,
    Reserve,
    Reserved,
    Restore,
    Resume,
    Ruled,
    Settle,
    Settled,
    SettleSwap,
    Signal,
    Start,
    SwapGpu,
    SwapPlan,
    SwapSettled,
)
from .base import Message
from .costs import Cost, EndMeasure, StartMeasure, Worked
from .frames import VERSION, Frame, decode, encode_answer, encode_ask, encode_error
from .gates import (
    Aim,
    Aimed,
    Arm,
    Armed,
    Fresh,
    FreshIds,
    Member,
    OpenGate,
    Owing,
    Rebuild,
    Shut,
    TearDown,
    TornDown,
    WhoOwes,
)
from .gpus import GpuHost, GpuProcess, GpuSeat, GpuSurvey
from .people import (
    Cancel,
    Cordon,
    EndUnknown,
    Events,
    GetEvents,
    GetInspection,
    GetMigration,
    GetStatus,
    Here,
    Inspection,
    Me,
    Migrate,
    Migration,
    Named,
    Output,
    Planned,
    ReadOutput,
    Run,
    SetTaint,
    SignalJob,
    Status,
    There,
    Uncordon,
    Untaint,
    WhoAmI,
)
from .predictions import Part, Prediction, Writing
from .records import (
    Book,
    CapsuleRow,
    CapsuleSpec,
    CapsuleState,
    DataLink,
    Event,
    HostFacts,
    HostRow,
    JobRow,
    MigrationRow,
    Phase,
    Rounds,
    UnknownRow,
)

__all__ = [
    "OFFER_LIMIT",
    "VERSION",
    "Aim",
    "Aimed",
    "Arm",
    "Armed",
    "Arrived",
    "Beat",
    "Book",
    "Books",
    "Cancel",
    "CapsuleRow",
    "CapsuleSpec",
    "CapsuleState",
    "Claim",
    "Cordon",
    "Cost",
    "DataLink",
    "End",
    "EndMeasure",
    "EndUnknown",
    "Ended",
    "Event",
    "Events",
    "Forget",
    "Forward",
    "Frame",
    "Freeze",
    "Fresh",
    "FreshIds",
    "Frozen",
    "GetEvents",
    "GetInspection",
    "GetMigration",
    "GetStatus",
    "GpuHost",
    "GpuProcess",
    "GpuSeat",
    "GpuSurvey",
    "Hello",
    "Here",
    "HostFacts",
    "HostRow",
    "Inspect",
    "Inspected",
    "Inspection",
    "JobEnded",
    "JobRow",
    "Locate",
    "LookAtGpus",
    "Me",
    "Member",
    "Message",
    "Migrate",
    "Migration",
    "MigrationRow",
    "Moved",
    "Named",
    "OpenGate",
    "Output",
    "Owing",
    "Part",
    "Phase",
    "Planned",
    "Precopy",
    "Prediction",
    "Progress",
    "Progressed",
    "ReadOutput",
    "Rebuild",
    "Relay",
    "Reserve",
    "Reserved",
    "Restore",
    "Resume",
    "Rounds",
    "Ruled",
    "Run",
    "SetTaint",
    "Settle",
    "SettleSwap",
    "Settled",
    "Shut",
    "Signal",
    "SignalJob",
    "Start",
    "StartMeasure",
    "Status",
    "SwapGpu",
    "SwapPlan",
    "SwapSettled",
    "TearDown",
    "There",
    "TornDown",
    "Uncordon",
    "UnknownRow",
    "Untaint",
    "WhoAmI",
    "WhoOwes",
    "Worked",
    "Writing",
    "decode",
    "encode_answer",
    "encode_ask",
    "encode_error",
]
