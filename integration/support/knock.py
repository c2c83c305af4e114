# SPDX-License-Identifier: Apache-2.0
"""Knock at a CURVE door and say whether it opens: the first outcome of the handshake.

    knock.py ENDPOINT SERVER_PUBLIC [OWN_PUBLIC OWN_SECRET]

Without a key of its own it makes one up. Prints "open", "turned away" or "silence".
"""

import sys

import zmq
from zmq.utils.monitor import recv_monitor_message

OPEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
AWAY = {int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)}
AWAY |= {int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.EVENT_DISCONNECTED)}

endpoint, server, *own = sys.argv[1:]
public, secret = (key.encode() for key in own) if own else zmq.curve_keypair()
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.linger = 0
socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
    server.encode(),
    public,
    secret,
)
monitor = socket.get_monitor_socket()
socket.connect(endpoint)
outcome = "silence"
while outcome == "silence" and monitor.poll(5000):
    event = int(recv_monitor_message(monitor)["event"])
    if event == OPEN:
        outcome = "open"
    elif event in AWAY:
        outcome = "turned away"
print(outcome)
context.destroy(linger=0)
