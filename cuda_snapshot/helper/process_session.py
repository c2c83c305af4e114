# SPDX-License-Identifier: Apache-2.0
"""The helper's end of a device session: it asks a process's service thread one thing at a time.

The socket lies in the capsule's directory of pages, where the job's user may write. So the helper
trusts nothing that it finds there, and knows the peer only by the pid that the kernel reports. The
process may lie about its memory, but it harms only itself: it gets back only what it gave.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from pathlib import Path

from ...errors import StepFailed
from ...interposer import device_session as wire
from ...interposer import layout
from ...interposer.device_session import Op, SessionReply
from ..checkpoint import uuid_text
from ..driver import CUresult
from .blocks import Block
from .channel import peer_of

STEP = "device session"
ANSWER_S = 60.0
"""The helper waits at most this many seconds for one answer, without the time for reading memory.
The driver frees and maps in milliseconds, but the process's work (SYNC) may have to end first."""
SLOWEST = 100_000_000
"""The slowest process makes the checksum of this many bytes a second."""
MOST_BLOCKS = 2 * layout.ALLOCATIONS
_ROOM = wire.REPLY.size + 1  # one byte more shows that a packet is longer than a reply


class Imported(StepFailed):
    """Memory cannot be exported: the process has it from elsewhere."""


class ProcessSession:
    """A session that listens from the beginning. Call :meth:`wait` before the other methods. One
    thread at a time may use it.

    All methods raise StepFailed, which says what was asked of which process. After a missing or
    wrong answer the session is over. ``pid`` is the process's number on this host, ``inner_pid``
    its number in its capsule."""

    def __init__(self, pid: int, directory: Path, inner_pid: int) -> None:
        self._pid, self._inner = pid, inner_pid
        self._name = wire.socket_name(inner_pid)
        self._peer: socket.socket | None = None
        self.over = False
        """Whether the session has ended, so that nothing can be asked any more."""
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise self._failed(f"can't make a socket: {error.strerror}") from error
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._folder = os.open(directory, flags)
        except OSError as error:
            self._listener.close()
            raise self._failed(f"can't open {directory}: {error.strerror}") from error
        try:
            self._remove_name()
            # A socket's address has at most 108 bytes; the directory's path may be longer.
            self._listener.bind(f"/proc/self/fd/{self._folder}/{self._name}")
            self._let_anybody_connect()
            self._listener.listen(4)
        except OSError as error:
            self.close()
            raise self._failed(f"can't listen in {directory}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _let_anybody_connect(self) -> None:
        # The job's user must be able to connect. We use a descriptor, because chmod by name would
        # follow a link that the user has put in our socket's place.
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._name, flags, dir_fd=self._folder)
        try:
            seen = os.fstat(fd)
            if not stat.S_ISSOCK(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_nlink != 1:
                raise self._failed(f"another file was put in the place of {self._name}")
            os.chmod(f"/proc/self/fd/{fd}", 0o666)  # noqa: S103 (the job's user connects)
        finally:
            os.close(fd)

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has connected and sent HELLO; check its pid and protocol."""
        deadline = time.monotonic() + timeout_s
        while self._peer is None:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise self._failed(
                    f"its service thread did not connect within {timeout_s:g} s"
                ) from None
            except OSError as error:
                raise self._failed(f"can't accept its connection: {error.strerror}") from error
            if peer_of(connection)[0] == self._pid:
                self._peer = connection
            else:
                connection.close()
                if time.monotonic() >= deadline:
                    raise self._failed("only other processes connected to its session")
        self._remove_name()
        hello, _ = self._answer(Op.HELLO, max(1.0, deadline - time.monotonic()))
        if hello.result:
            self.over = True
            raise self._failed(f"it can't serve: {hello.failure}")
        if hello.kind != wire.PROTOCOL or hello.value != self._inner:
            self.over = True
            raise self._failed(
                f"it is process {hello.value} inside and speaks protocol {hello.kind}; "
                f"{self._inner} and {wire.PROTOCOL} were expected"
            )

    def blocks(self) -> list[tuple[Block, bool]]:
        """All device allocations, each with whether the process has its memory."""
        found: list[tuple[Block, bool]] = []
        for index in range(MOST_BLOCKS):
            reply, _ = self._exchange(Op.NEXT, argument=index)
            if reply.ended:
                return found
            self._check(reply, "list its device memory")
            block = Block(reply.address, reply.size, uuid_text(reply.uuid), reply.kind)
            found.append((block, bool(reply.value)))
        raise self._failed(f"it has more than {MOST_BLOCKS} device allocations")

    def checksum(self, block: Block, samples: int) -> int:
        """A 64-bit checksum of a block: of all bytes (``samples`` 0), or of so many samples."""
        reply, _ = self._exchange(
            Op.CHECKSUM,
            block.address,
            block.size,
            samples,
            patience_s=ANSWER_S + (0 if samples else block.size / SLOWEST),
        )
        self._check(reply, f"sum up device memory at {block.address:#x}")
        return reply.value

    def export(self, block: Block) -> int:
        """A descriptor of an arena block's memory; the caller must close it. Raises Imported for
        memory that came from a helper: driver 580 refuses to export what was imported."""
        reply, descriptor = self._exchange(Op.EXPORT, block.address)
        what = f"export device memory at {block.address:#x}"
        try:
            if reply.result == CUresult.INVALID_VALUE:
                raise Imported(
                    STEP,
                    f"process {self._pid} ({self._inner} inside): asked to {what}, which the driver"
                    " refuses for memory that came from another process",
                )
            self._check(reply, what)
            if reply.size != block.size:
                raise self._failed(
                    f"asked to {what}: it has {reply.size} bytes now, had {block.size}"
                )
            if descriptor is None:
                raise self._failed(f"asked to {what}: no descriptor came")
            taken, descriptor = descriptor, None
            return taken
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def release(self, block: Block) -> None:
        """Let the process unmap and release an arena block's memory; it keeps the addresses."""
        reply, _ = self._exchange(Op.RELEASE, block.address)
        self._check(reply, f"release device memory at {block.address:#x}")

    def map(self, block: Block, descriptor: int) -> None:
        """Let the process map memory at a block that it gave up. The caller keeps the descriptor
        open."""
        reply, _ = self._exchange(Op.MAP, block.address, block.size, descriptor=descriptor)
        self._check(reply, f"map device memory at {block.address:#x}")

    def own(self, block: Block) -> None:
        """Let the process replace an arena block's memory by memory that it made itself."""
        reply, _ = self._exchange(Op.OWN, block.address)
        if reply.result == -errno.ENOSYS:
            return  # an older interposer: if the driver can't take the memory, it reports that
        self._check(reply, f"copy device memory at {block.address:#x} that came from elsewhere")

    def sync(self) -> None:
        """Wait until all device work of the process has ended."""
        reply, _ = self._exchange(Op.SYNC)
        self._check(reply, "wait for its device work")

    def close(self) -> None:
        """Send END; the process then answers the agent's order. May be called again."""
        peer, self._peer = self._peer, None
        if peer is not None:
            with contextlib.suppress(OSError):
                if not self.over:
                    peer.settimeout(1.0)
                    peer.send(wire.request(Op.END))
            peer.close()
        self.over = True
        if self._folder >= 0:
            self._listener.close()
            self._remove_name()
            os.close(self._folder)
            self._folder = -1

    # ---- packets

    def _exchange(
        self,
        op: Op,
        address: int = 0,
        size: int = 0,
        argument: int = 0,
        *,
        descriptor: int | None = None,
        patience_s: float | None = None,
    ) -> tuple[SessionReply, int | None]:
        patience_s = ANSWER_S if patience_s is None else patience_s
        if self._peer is None or self.over:
            raise self._failed("its session is over, or has not begun")
        packet = wire.request(op, address, size, argument)
        try:
            self._peer.settimeout(patience_s)
            sent = [] if descriptor is None else [descriptor]
            socket.send_fds(self._peer, [packet], sent, socket.MSG_NOSIGNAL)
        except OSError as error:
            self.over = True
            raise self._failed(f"{op.name} can't be asked: {error}") from error
        return self._answer(op, patience_s)

    def _answer(self, op: Op, patience_s: float) -> tuple[SessionReply, int | None]:
        assert self._peer is not None
        descriptors: list[int] = []
        try:
            self._peer.settimeout(patience_s)
            packet, descriptors, _, _ = socket.recv_fds(
                self._peer, _ROOM, 4, socket.MSG_CMSG_CLOEXEC
            )
            if not packet:
                raise self._failed(f"it closed its session instead of answering {op.name}")
            reply = wire.reply(packet)
            if reply.op != op:
                raise self._failed(f"it answered {reply.op} to {op.name}")
            if descriptors and (op is not Op.EXPORT or len(descriptors) > 1):
                raise self._failed(f"it answered {op.name} with {len(descriptors)} descriptors")
        except BaseException as error:
            self.over = True
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, TimeoutError):
                raise self._failed(f"no answer to {op.name} within {patience_s:g} s") from None
            if isinstance(error, OSError | ValueError):
                raise self._failed(f"its answer to {op.name} can't be read: {error}") from error
            raise
        return reply, descriptors[0] if descriptors else None

    def _check(self, reply: SessionReply, what: str) -> None:
        if reply.result:
            raise self._failed(f"asked to {what}: {reply.failure}")

    def _failed(self, why: str) -> StepFailed:
        return StepFailed(STEP, f"process {self._pid} ({self._inner} inside): {why}")

    def _remove_name(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._name, dir_fd=self._folder)
