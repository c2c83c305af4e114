# SPDX-License-Identifier: Apache-2.0
"""A store with the memory of a generation that a holder on the same host lends for a restore.

Both stores have the same file of pages. So nothing is copied, and no memory is taken. The holder
does not write to the pages of a generation that it keeps, and does not free those that are lent.
The restore only reads them. The file has a second name while it is lent. A restarted agent sees
that name, and drops no generation before the name is gone.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from ....errors import StepFailed
from ..engine import PAGE
from .held_store import GENERATIONS, HeldStore
from .store import PAGES_FILE, MemoryStore, write_index


class LentStore(MemoryStore):
    """Use :meth:`borrow`. Until it is closed, the holder keeps the generation's pages."""

    _until_closed: ExitStack | None = None

    @classmethod
    def borrow(cls, holder: HeldStore, number: int, directory: Path) -> Self:
        """The memory of generation ``number`` as a complete store in ``directory``, which must lie
        in the same file system. Raises StepFailed."""
        with ExitStack() as undo:
            view = undo.enter_context(holder.view(number))
            try:
                os.link(holder.directory / PAGES_FILE, directory / PAGES_FILE)
                # A store without generations has fewer slots for the same limit (store_open), and
                # opening it must not cut the file.
                limit = -(-holder.limit // PAGE) * PAGE * (1 + GENERATIONS)
                write_index(directory, limit, view)
            except OSError as error:
                what = f"the memory in {holder.directory} cannot be lent to {directory}: {error}"
                raise StepFailed("restore", what) from error
            store = cls.load(directory)
            store._until_closed = undo.pop_all()
        return store

    def _let_go(self) -> None:
        super()._let_go()
        if not self._store and self._until_closed is not None:
            self._until_closed.close()
            self._until_closed = None
