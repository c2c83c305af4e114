# SPDX-License-Identifier: Apache-2.0
"""A server outside of the cluster, as a program."""

from __future__ import annotations

OUTSIDE = """
import socket, sys
server = socket.create_server((sys.argv[1], 7777)); print("ready", flush=True)
held, _ = server.accept()
print("met", flush=True); sys.stdin.read()
"""
