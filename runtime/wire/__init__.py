# SPDX-License-Identifier: Apache-2.0
"""Bulk bytes from a source agent to a destination agent: chunks over ZeroMQ.

A. sender → receiver   [header, bytes]     header.Header: migration, number, stream, digest
B. receiver → sender   ("ack", number)     the chunk is stored: the sender gets one credit back
                       ("again", number)   a chunk is missing or damaged: send from there on
                       ("refused", text)   the destination cannot take more; the move ends
                       ("wants", bytes)    the answer to a question: wants.py
                       ("seal", number)    the receiver has taken the key of that question

A migration has several *lanes*. Each lane is a connection of its own. The numbers of a lane grow by
one, and the receiver takes its chunks only in that order. So a chunk that is lost with a broken
connection, repeated or damaged is sent again and never written twice. The source keeps each chunk
until it is acknowledged. It keeps at most the lane's window; the free part is the credit.

Lane 0 (Sender) carries everything that has an order. libzmq's CURVE encrypts it and proves who
speaks. Lanes 1 to n (Lanes) carry memory to a port of its own (PagePort): pages of host memory, and
device memory. Each chunk says where its bytes belong, so chunks may come in any order between two
barriers (Lanes.finish). The manifest calls the bytes of lane k the stream ``memory:k``. CURVE would
take most of the time on these lanes. There the chunks and answers are sealed instead, with a key
that the source makes and sends over lane 0 (seal.py).

A. lanes → page port   [header, sealed]    header.PageHeader: migration, lane, number, kind, raw,
                                           process, at
B. page port → lanes   [number, sealed]    ("ack" …), ("again" …) or ("refused" …), as above

The destination takes an image only for a migration that was announced, from the announced host, on
the announced lanes and up to the announced size. It answers "refused" to any other chunk on lane 0,
so that the sender fails at once. On the other lanes it does not answer a chunk that does not open:
the source then asks on lane 0. The last stream is the manifest.

A chunk of pages may name a page instead of carrying it, if the destination has said that it has
that page. Between two barriers the source asks on lane 0, by a header of the stream ``wants``,
whether the destination found all of them. A header of the stream ``seal`` brings the key. A
question is not a chunk. If the source asks it twice, it gets two answers, and the question's number
shows which answer belongs to it.
"""

from .header import CHUNK, LANES, PAGE_TABLE
from .lanes import Lanes
from .local_sender import LocalSender
from .page_streams import PageStreams
from .receiver import Receiver
from .sender import Sender
from .stream_sender import StreamSender
from .wants import Wants

__all__ = [
    "CHUNK",
    "LANES",
    "PAGE_TABLE",
    "Lanes",
    "LocalSender",
    "PageStreams",
    "Receiver",
    "Sender",
    "StreamSender",
    "Wants",
]
