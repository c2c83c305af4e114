# SPDX-License-Identifier: Apache-2.0
"""Runs inside a world, by its Python (3.6 or newer) and nothing else; prints one JSON object.

Its argument is the folder with the libraries. Everything asserted here is of this process; what the
pages say is for the caller to compare.
"""

import ctypes
import json
import os
import sys
import threading

folder = sys.argv[1]
INTERPOSER = folder + "/liveshift_interposer.so"
BARRIER = "_ZN4gloo7barrierERNS_14BarrierOptionsE"

if os.environ.get("LD_PRELOAD") != INTERPOSER:  # as the launcher starts a command: by exec
    os.environ["LD_PRELOAD"] = INTERPOSER
    os.environ["LIVESHIFT_PAGES"] = folder + "/pages"
    os.execv(sys.executable, [sys.executable, *sys.argv])

seen = {
    "python": ".".join(map(str, sys.version_info[:3])),
    "libc": os.confstr("CS_GNU_LIBC_VERSION"),
    "pid": os.getpid(),
}

torch = ctypes.CDLL(folder + "/libtorch_cpu.so", mode=os.RTLD_LOCAL | os.RTLD_NOW)
torch.double_calls.restype = ctypes.c_ulong
everything = ctypes.CDLL(None)  # the global scope, in which torch's own calls are bound
ours = ctypes.CDLL(INTERPOSER)
ours.liveshift_interposer_version.restype = ctypes.c_char_p
seen["version"] = ours.liveshift_interposer_version().decode()


def address(function: object) -> "int | None":
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]  # its type has no name


assert address(everything[BARRIER]) == address(ours[BARRIER]), "the preloaded hook does not win"
assert address(everything[BARRIER]) != address(torch[BARRIER])

table, names = ctypes.addressof(ctypes.c_char.in_dll(ours, "liveshift_interposer_symbols")), []
while True:
    entry = ctypes.string_at(table).decode()
    if not entry:
        break
    names.append(entry.split(" ", 1)[1])
    table += len(entry) + 1
hooked = [name for name in names if hasattr(torch, name)]
for name in hooked:
    everything[name](None)
assert torch.double_calls() == len(hooked), "a call did not reach the real function"
seen["hooks"] = len(hooked)


def many() -> None:
    for _ in range(1000):
        everything[BARRIER](None)


threads = [threading.Thread(target=many) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert torch.double_calls() == len(hooked) + 4000

child = os.fork()
if child == 0:
    everything[BARRIER](None)
    everything[BARRIER](None)
    os._exit(0 if torch.double_calls() == len(hooked) + 4002 else 1)
assert os.waitpid(child, 0)[1] == 0
seen["child"] = child

script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); ctypes.CDLL(None)[sys.argv[2]](None)"
execed = os.fork()
if execed == 0:
    os.execv(sys.executable, [sys.executable, "-c", script, folder + "/libtorch_cpu.so", BARRIER])
assert os.waitpid(execed, 0)[1] == 0, "a program that was exec'ed did not run"
seen["execed"] = execed

lookups = ctypes.CDLL(folder + "/lookups.so")
lookups.lookup.restype = ctypes.c_void_p
lookups.lookup_reason.restype = ctypes.c_char_p


def places(*asked: "tuple[str, str]") -> "list[int]":
    return [lookups.lookup(library.encode(), name.encode()) for library, name in asked]


# getpid: a plain function; memcpy: chosen by the processor; pthread_create: of which library?
plain, chosen = places(("libc.so.6", "getpid"), ("libc.so.6", "memcpy"))
assert ctypes.CFUNCTYPE(ctypes.c_int)(plain)() == os.getpid()
to, of = ctypes.create_string_buffer(6), ctypes.create_string_buffer(b"bytes")
ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(chosen)(
    ctypes.addressof(to), ctypes.addressof(of), 6
)
assert to.value == b"bytes"
assert lookups.lookup_reason(b"libabsent.so", b"getpid") == b"it is not loaded in this process"
assert lookups.lookup_reason(b"libc.so.6", b"absent") == b"it does not export that name"
homes = [
    library
    for library in ("libc.so.6", "libpthread.so.0")
    if lookups.lookup(library.encode(), b"pthread_create")
]
assert homes, "no pthread_create"
seen["pthread_create"] = homes[0]

reading, writing = os.pipe()
descriptor = ctypes.c_int(writing)
assert lookups.start_thread(ctypes.byref(descriptor)) == 0
assert os.read(reading, 6) == b"thread"

json.dump(seen, sys.stdout)
