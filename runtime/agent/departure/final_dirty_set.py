# SPDX-License-Identifier: Apache-2.0
"""The final dirty set: the pages that the destination lacks when the tree is frozen."""

from __future__ import annotations

import threading

import msgspec

from .... import units
from ....criu_glue.criu.page_filter import PageFilter
from ....criu_glue.memory.source.tracker import FrozenSet
from ...wire import PAGE_TABLE, Sender
from .precopy import PrecopyRounds


class FinalDirtySet:
    """Sends the final dirty set in a thread of its own while CRIU dumps the rest.

    ``table`` carries the table of pages; ``page_filter`` hides the tracked memory from CRIU.
    """

    def __init__(
        self, precopy: PrecopyRounds, table: Sender, page_filter: PageFilter, until: float
    ) -> None:
        self._precopy, self._table = precopy, table
        self.page_filter, self._until = page_filter, until
        self._found: FrozenSet | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        precopy.interrupt_on(self._stop.is_set)
        self._thread = threading.Thread(target=self._run, name="final-dirty-set", daemon=True)
        self._thread.start()

    def finish(self) -> FrozenSet:
        """Return when the destination has the whole set; raises the error that prevented it."""
        self._thread.join()
        self.check()
        assert self._found is not None
        self._table.send(PAGE_TABLE, msgspec.msgpack.encode(self._found.table))
        self._table.send(PAGE_TABLE, b"")
        return self._found

    def describe(self) -> str:
        """Return how much memory :meth:`finish` has sent, as the table of phases says it."""
        assert self._found is not None
        what = "rewritten" if self._precopy.began else "in all"
        size, scan_ms = units.size(self._found.dirty_bytes), self._found.scan_s * 1e3
        return f"{size} {what}, found within {scan_ms:.0f} ms"

    def check(self) -> None:
        """Raises the error that stopped the thread, if there is one by now."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Send nothing more. A second call does no harm."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        tracker = self._precopy.tracker
        try:
            tracker.wait_frozen(self._until, self.page_filter.asked)
            self._found = tracker.send_final_set(self._precopy.lanes.pages, self.page_filter.hide)
            self._precopy.complete()
        except BaseException as error:
            self._error = error
