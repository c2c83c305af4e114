# SPDX-License-Identifier: Apache-2.0
"""The format of a daemon's log: one line for each message, whatever is in it.

Messages contain texts of people and of other hosts. A line feed in one of them could pretend to be
another message.
"""

from __future__ import annotations

import logging

from ...texts import one_line


class LogLines(logging.Formatter):
    """Tracebacks below a message stay as they are: this program writes them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))
