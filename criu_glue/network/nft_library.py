# SPDX-License-Identifier: Apache-2.0
"""Changes nftables without nft(8): a daemon keeps nft's library open for its lifetime.

A move changes the fence on every host of its job while the job is paused. nft(8) takes 3 ms to
start. If it removed elements, it waits at its end for a grace period of the kernel (closing the
socket frees them: 10 ms and more). The library takes 0.05 ms for the same, since its socket stays
open.

One thread makes all calls. For most commands the library reads the host's whole ruleset, half a
megabyte for each job, and malloc keeps that memory separately for each calling thread. With 100
jobs and the agent's 64 threads that was 490 MB, with one thread 69 MB.

The library serves only the network namespace in which :func:`hold_open` was called. Threads in
another namespace, and programs that never call it, use nft(8).
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
        """Raises OSError if this host has no such library, AttributeError if it is too old."""
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
    """Use the library from now on for this thread's network namespace, if this host has it."""
    global _held
    try:
        _held = _Context()
    except (OSError, AttributeError) as error:
        log.info("nft is started for every change of the network's rules: %s", error)


def run(rules: str, flags: int = 0) -> tuple[bool, str] | None:
    """(True if all rules are in force, False if none is; nft's output or error message).

    Returns None if the library does not serve this namespace; then the caller must run nft(8)."""
    if _held is None or _held.space != _space():
        return None
    return _held.run(rules, flags)


def _space() -> int:
    return os.stat("/proc/thread-self/ns/net").st_ino
