# SPDX-License-Identifier: Apache-2.0
"""Bulk bytes from a source agent to a destination agent: chunks over ZeroMQ with CURVE.

A. sender → receiver   [header, bytes]     header.Header: migration, lane, number, stream, digest
B. receiver → sender   ("ack", number)     the chunk is where it belongs: one credit comes back
                       ("again", number)   a chunk is missing or damaged: send from there on
                       ("refused", text)   the destination cannot take more; the move ends

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
"""

from .header import CHUNK, HEADER, OVERHEAD, Header, read_answer, read_header
from .lane import Destination
from .lanes import Lanes
from .page_streams import PageStreams
from .receiver import Inlet, Pages, Receiver
from .sender import WINDOW, Sender

__all__ = [
    "CHUNK",
    "HEADER",
    "OVERHEAD",
    "WINDOW",
    "Destination",
    "Header",
    "Inlet",
    "Lanes",
    "PageStreams",
    "Pages",
    "Receiver",
    "Sender",
    "read_answer",
    "read_header",
]
