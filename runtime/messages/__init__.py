# SPDX-License-Identifier: Apache-2.0
"""Every message that crosses a socket, and the one encode and decode for all of them.

The flow of a planned migration (only data goes from source agent to destination agent):

A. orchestrator → source       ``Inspect``         what it consists of, what prevents the move
B. orchestrator → destination  ``Reserve``         preflight; an empty, locked sandbox; an inbox
C. orchestrator → source       ``StartPrecopy``    directories, output, memory, while the job trains
   source → orchestrator       ``Progressed``      the progress of that; the source needs no answer
D. orchestrator → all ranks    ``Arm`` …           quiesce: gates closed at a boundary
E. orchestrator → source       ``Freeze``          network locked, dumped into the wire, held frozen
F. orchestrator: the journal   commit              the destination owns epoch + 1 from here on
G. orchestrator → all agents   ``Locate``          the address book with the new epoch
H. orchestrator → destination  ``RestoreCapsule``  CRIU restores; before the tree runs:
I. destination → orchestrator  ``Claim``           may it run? The journal grants, the network opens
J. orchestrator → all ranks    ``OpenGate``        communicators are rebuilt; the ranks go on
K. orchestrator → source       ``Settle``          it asks about its frozen copy (``Claim``): end it
   In addition ``StartMeasure`` goes to the source at the request, and ``EndMeasure`` to both sides
   at the end. From their answers the orchestrator computes what the move cost the job.
   When a step fails, both sides get ``Settle``: they ask, and run, wait or end as ownership.rule
   says. After a commit the orchestrator does F again for the source, under a further epoch.

To another GPU of the same host: ``LookAtGpus``, D, ``SwapGpu``, J. The owner stays the same, so
nothing is committed or claimed. If the answer is lost, ``SettleSwap`` asks for it.

A snapshot: ``Hold`` goes to the holders and ``StartSnapshot`` to the sources. At the boundary (D)
``LockCapsule`` goes to all sources, ``DumpCapsule`` once all have answered it, and ``ThawCapsule``.
After the pause ``CloseSnapshot`` asks the sources for digests, ``CheckHeld`` the holders to compare
them, and the journal makes the snapshot complete. A rewind: ``GetHeld``
asks the holders, the journal takes all capsules back, ``EndEarlier`` goes to all hosts of the job;
then B, ``ForwardHeld``, H, I and J for each capsule. A suspension is a snapshot without a thaw:
``SealSnapshot`` in place of ``CloseSnapshot``, and then ``EndEarlier``. Its images go on to second
hosts: ``GetHeld``, ``Hold``, ``ForwardHeld``, ``CheckHeld``. A resumption is a rewind.

A frame is MessagePack: ``{"v": VERSION, "id": n, "body": {"t": tag, …}}`` is a request. The same
with ``"ok"`` is an answer, with ``"error": [kind, message, hint]`` a refusal. Tags are the class
names. Increase VERSION when a field or a message is added or removed, or changes its meaning: a
peer refuses unknown fields. Peers of different versions refuse each other, and name both versions.
"""

# ruff: noqa: F403 (all that these modules define is for the users of the package)
from .agents import *
from .base import *
from .costs import *
from .frames import *
from .gates import *
from .gpus import *
from .people import *
from .predictions import *
from .records import *
from .snapshots import *
