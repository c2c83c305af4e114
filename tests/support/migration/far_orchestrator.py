# SPDX-License-Identifier: Apache-2.0
"""An orchestrator's control port in this process, which clients with an operator's key reach over
real ZeroMQ with CURVE."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from link_harness import free_address, nothing

from liveshift.launcher.client.client import Client
from liveshift.launcher.client.context import Remote
from liveshift.runtime import messages
from liveshift.runtime.control import link
from liveshift.runtime.control.keyring import Holder
from liveshift.runtime.control.link import Switchboard
from liveshift.runtime.messages import Message


class Far:
    """An orchestrator's control port in a thread; ``answer`` serves its operators."""

    def __init__(self, key_directory: Path, answer: Callable[[Message], Message | None]) -> None:
        self.keys = key_directory
        self.address = free_address()
        self.heard: list[tuple[Holder, Message]] = []
        self.answer = answer
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self) -> None:
        async def begin() -> None:
            board = Switchboard(self.address, self.keys, {})
            await board.listen()
            self._task = asyncio.create_task(board.serve(nothing, self._serve))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(10)

    def stop(self) -> None:
        async def end() -> None:
            assert self._task is not None
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self, holder: Holder, ask: Message) -> Message | None:
        self.heard.append((holder, ask))
        return await asyncio.to_thread(self.answer, ask)


@pytest.fixture
def far(key_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """Yield a running orchestrator that answers each request with ``Named("far")``."""
    monkeypatch.setattr(link, "WATCH_S", 0.05)
    made = Far(key_directory, lambda _ask: messages.Named("far"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def remote(far: Far) -> Remote:
    return Remote(far.address, far.keys / "operators" / "ops.key")


def asked_with(remote: Remote) -> None:
    with Client(remote) as client:
        client.request(messages.GetStatus(), 20)
