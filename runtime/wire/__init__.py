# SPDX-License-Identifier: Apache-2.0
"""Bulk bytes from a source agent to a destination agent: chunks over ZeroMQ.

A. sender → receiver   [header, bytes]     header.Header: migration, number, stream, digest
B. receiver → sender   ("ack", number)     the chunk is where it belongs: one credit comes back
                       ("again", number)   a chunk is missing or damaged: send from there on
                       ("refused", text)   the destination cannot take more; the move ends
                       ("wants", bytes)    what a question asked for: wants.py
                       ("seal", number)    the key of that question is taken

A migration has several *lanes*, each a connection of its own. On each the numbers grow by one and
the receiver takes them in order only, so a chunk that is lost with a broken connection, repeated or
flipped is sent again and never written twice. The source keeps what is not acknowledged; at most
the lane's window, which is the credit.

Lane 0 (Sender) is the ordered one: whatever has to come after something else. libzmq's CURVE
encrypts it and tells who speaks. Lanes 1 to n (Lanes) carry pages of memory, in any order between
two barriers (Lanes.finish), to a port of their own (PagePort); the manifest names what came on
lane k as the stream ``memory:k``. There CURVE would take most of the time: chunks and answers are
sealed with a key that the source has made and sent over lane 0 (seal.py).

A. lanes → page port   [header, sealed]    header.PageHeader: migration, lane, number, kind, raw
B. page port → lanes   [number, sealed]    ("ack" …), ("again" …) or ("refused" …), as above

An image is taken for a migration that was announced, from the host it was announced for, on the
lanes and up to the size that were announced; whatever else comes on lane 0 is answered with
"refused", so that its sender fails at once. What does not open on the others is not answered: their
source asks on lane 0 then. The last stream is the manifest.

A chunk of pages may only name some that the destination has said to have. Whether all were found
there is asked on lane 0, between two barriers, by a header of the stream ``wants``; the key goes
by one of the stream ``seal``. A question counts as no chunk: asked twice it is answered twice, and
whoever asks goes by its number.
"""

from .announced import Inlet, Pages
from .header import (
    CHUNK,
    HEADER,
    LANES,
    OVERHEAD,
    PAGE_TABLE,
    Header,
    PageHeader,
    read_answer,
    read_header,
    read_page_header,
)
from .lane import Destination
from .lanes import Lanes
from .ordered_lane import WINDOW
from .page_streams import PageStreams
from .receiver import Receiver
from .sender import Sender
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
    "PageHeader",
    "PageStreams",
    "Pages",
    "Receiver",
    "Sender",
    "Wants",
    "pack_wants",
    "read_answer",
    "read_header",
    "read_page_header",
    "read_wants",
]
