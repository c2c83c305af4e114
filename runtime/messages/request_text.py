# SPDX-License-Identifier: Apache-2.0
"""Names of requests in a person's words. Errors use these, not the names of messages."""

from __future__ import annotations

from .base import Message

TEXTS = {
    # people
    "RunJob": "start a job",
    "GetStatus": "show the status",
    "GetEvents": "show events",
    "GetMigration": "show a move",
    "GetInspection": "inspect a capsule",
    "ReadOutput": "read output",
    "ReadRepeated": "read repeated output",
    "Migrate": "move a capsule",
    "Cancel": "cancel a move",
    "SignalJob": "signal a job",
    "RewindJob": "rewind a job",
    "SnapshotJob": "save a snapshot of a job",
    "SuspendJob": "suspend a job",
    "WithdrawOrder": "take an order back",
    "ResumeJob": "resume a job",
    "EndUnknown": "end an unknown job",
    "SetTaint": "taint a host",
    "PlanEvacuation": "plan how a host becomes empty",
    "Untaint": "untaint a host",
    "Cordon": "cordon a host",
    "Uncordon": "uncordon a host",
    "WhoAmI": "say who asks",
    # agents
    "Start": "start a capsule",
    "Signal": "signal a capsule",
    "End": "end a capsule",
    "Forget": "forget a job",
    "Locate": "enter a job's addresses",
    "TryHosts": "try other hosts",
    "Inspect": "look at a capsule",
    "Reserve": "make room for a capsule",
    "StartPrecopy": "copy a running capsule",
    "EndSooner": "end a pre-copy sooner",
    "Freeze": "freeze a capsule",
    "RestoreCapsule": "restore a capsule",
    "Forward": "pass an image on",
    "Resume": "wait until a capsule goes on",
    "Settle": "settle a move",
    "Progress": "say how far a move is",
    "StartMeasure": "note how far a capsule is",
    "EndMeasure": "say what a capsule has made",
    "LookAtGpus": "look at GPUs",
    "SwapGpu": "change a capsule's GPU",
    "SettleSwap": "settle a change of GPU",
    # agents, for snapshots and rewinds
    "Hold": "make room for an image",
    "StartSnapshot": "copy a capsule for a snapshot",
    "LockCapsule": "lock a capsule for a snapshot",
    "DumpCapsule": "dump a capsule for a snapshot",
    "ThawCapsule": "let a capsule go on",
    "SealSnapshot": "complete the copy for a suspension",
    "CloseSnapshot": "end the copy for a snapshot",
    "CheckHeld": "check an image",
    "GetHeld": "look at an image",
    "ForwardHeld": "send an image to a host",
    "CutBack": "cut files back",
    "SaveHeld": "save an image",
    "DropSaved": "remove a part of a saved snapshot",
    "WriteManifest": "complete a saved snapshot",
    "ReadManifest": "look for a saved snapshot",
    "LoadHeld": "load an image",
    "EndEarlier": "end what a rewind has left",
    # a job's collectives
    "Arm": "hold a job's collectives",
    "SetTargets": "bring a job to a boundary",
    "Shut": "hold a job at a boundary",
    "ListBehind": "name the ranks that are late",
    "TearDown": "take communicators down",
    "FreshIds": "make ids for communicators",
    "Rebuild": "build communicators again",
    "OpenGate": "let a job's collectives go on",
    # the orchestrator, asked by agents
    "Register": "register a host",
    "Heartbeat": "take a host's heartbeat",
    "Claim": "say who owns a capsule",
    "CapsuleEnded": "take note that a capsule has ended",
    "Progressed": "take note of a move's progress",
    "Relay": "serve a command of a host",
    "Here": "open a session",
}


def request_to(message: Message) -> str:
    """The words for a request, such as ``the request to freeze a capsule``."""
    name = type(message).__name__
    return f"the request to {TEXTS[name]}" if name in TEXTS else name  # no daemon serves it
