# SPDX-License-Identifier: Apache-2.0
"""Bulk bytes from a source agent to a destination agent: chunks over ZeroMQ with CURVE.

A. sender → receiver   [header, bytes]     header.Header: migration, lane, number, stream, digest
B. receiver → sender   ("ack", number)     the chunk is where it belongs: one credit comes back
                       ("again", number)   a chunk is missing or damaged: send from there on
                       ("refused", text)   the destination cannot take more; the move ends
                       ("wants", bytes)    what a question asked for: wants.py

A migration has several *lanes*, each a connection of its own. On each the numbers grow by one and
the receiver takes them in order only, so a chunk that is lost with a broken connection, repeated or
flipped is sent again and never written twice. The source keeps what is not acknowledged; at most
the lane's window, which is the credit.

Lane 0 (Sender) is the ordered one: whatever has to come after something else. Lanes 1 to n (Lanes)
carry pages of memory, in any order between two barriers (Lanes.finish); lane k has the one stream
``memory:k``.

An image is taken for a migration that was announced, from the host it was announced for, on the
lanes and up to the size that were announced; whatever else comes is answered with "refused", so
that its sender fails at once. The last stream is the manifest.

A chunk of pages may only name some that the destination has said to have. Whether all were found
there is asked on lane 0, between two barriers, by a header of the stream ``wants``. It counts as no
chunk: asked twice it is answered twice, and whoever asks goes by its number.
"""

from .header import CHUNK, HEADER, LANES, OVERHEAD, PAGE_TABLE, Header, read_answer, read_header
from .lane import Destination
from .lanes import Lanes
from .page_streams import PageStreams
from .receiver import Inlet, Pages, Receiver
from .sender import WINDOW, Sender
from .wants import Wants, pack_wants, read_wants

__all__ = [
    "CHUNK",
    "HEADER",
    "LANES",
    "OVERHEAD",
    "PAGE_TABLE",
    "WINDOW",
    "Destination",
    "Header",
    "Inlet",
    "Lanes",
    "PageStreams",
    "Pages",
    "Receiver",
    "Sender",
    "Wants",
    "pack_wants",
    "read_answer",
    "read_header",
    "read_wants",
]
