# SPDX-License-Identifier: Apache-2.0
"""nftables without nft(8): the library it is made of, held open by a daemon for its lifetime.

A move changes the fence on every host of its job while the job stands still. nft(8) takes 3 ms to
start, and where elements were taken out it waits at its end for a grace period of the kernel
(closing the socket flushes what is to be freed: 10 ms and more). The library, its socket kept open,
takes 0.05 ms for the same.

One thread does all of it. For most commands the library reads the host's whole ruleset, half a
megabyte for each job, and malloc keeps what it takes for that apart for each thread that asks: with
100 jobs and the agent's 64 threads that was 490 MB, with one thread 69 MB.

Only for the network namespace in which :func:`hold_open` was called; threads that are in another
one, and programs that never call it, use nft(8).
"""

from __future__ import annotations

import ctypes
import logging
import os
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger("liveshift.nftables")

NAME = "libnftables.so.1"
JSON = 1 << 4  # nftables/libnftables.h: NFT_CTX_OUTPUT_JSON

_held: _Context | None = None


class _Context:
    def __init__(self) -> None:
        """Raises OSError where there is no such library."""
        self.space = _space()
        self._thread = ThreadPoolExecutor(1, "nftables")
        self._lib = lib = ctypes.CDLL(NAME)
        for name, result, *arguments in (
            ("nft_ctx_new", ctypes.c_void_p, ctypes.c_uint32),
            ("nft_ctx_buffer_output", ctypes.c_int, ctypes.c_void_p),
            ("nft_ctx_buffer_error", ctypes.c_int, ctypes.c_void_p),
            ("nft_ctx_get_output_buffer", ctypes.c_char_p, ctypes.c_void_p),
            ("nft_ctx_get_error_buffer", ctypes.c_char_p, ctypes.c_void_p),
            ("nft_ctx_output_set_flags", None, ctypes.c_void_p, ctypes.c_uint),
            ("nft_run_cmd_from_buffer", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p),
        ):
            function = getattr(lib, str(name))
            function.restype, function.argtypes = result, arguments
        self._context = lib.nft_ctx_new(0)
        if not self._context:
            raise OSError(f"{NAME} cannot be opened")
        lib.nft_ctx_buffer_output(self._context)
        lib.nft_ctx_buffer_error(self._context)

    def run(self, rules: str, flags: int) -> tuple[bool, str]:
        return self._thread.submit(self._run, rules, flags).result()

    def _run(self, rules: str, flags: int) -> tuple[bool, str]:
        lib, context = self._lib, self._context
        lib.nft_ctx_output_set_flags(context, flags)
        failed = lib.nft_run_cmd_from_buffer(context, rules.encode())
        said = lib.nft_ctx_get_error_buffer if failed else lib.nft_ctx_get_output_buffer
        return not failed, bytes(said(context) or b"").decode(errors="replace")


def hold_open() -> None:
    """From now on rules of this thread's network namespace go through the library, if there is
    one on this host."""
    global _held
    try:
        _held = _Context()
    except (OSError, AttributeError) as error:
        log.info("nft is started for every change of the network's rules: %s", error)


def run(rules: str, flags: int = 0) -> tuple[bool, str] | None:
    """Whether all of the rules are in force (else none is), and what was printed or complained of;
    None where that is nft's to do."""
    if _held is None or _held.space != _space():
        return None
    return _held.run(rules, flags)


def _space() -> int:
    return os.stat("/proc/thread-self/ns/net").st_ino
