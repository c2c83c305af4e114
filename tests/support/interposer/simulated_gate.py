# SPDX-License-Identifier: Apache-2.0
"""The interposer's gate as a library for simulations, built from the sources as they are.

Or with one passage changed, for the tests that such a change is found out.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from cffi import FFI
from checkout import INTERPOSER
from doubles.gpu.build import compiler, kept
from sanitizers import BUILT

GATE_H = """
struct gate_want { uint32_t clock; uint32_t kind; uint64_t count; bool announced; bool counted; };
struct gate_waiter { uint64_t progress; uint32_t stalled_ms, heartbeat, silent_ms, pending_ms; };
struct gate *sim_process(const char *draft, const char *path, int pid, int rank);
void sim_process_end(struct gate *gate);
struct liveshift_communicator *sim_communicator(struct gate *gate, int library, uint64_t id,
                                                int size, int rank, const char *name);
uint32_t sim_clock(struct gate *gate, struct liveshift_communicator *of, int from, int to);
void sim_communicator_end(struct gate *gate, struct liveshift_communicator *row);
void sim_announce(struct gate *gate, uint32_t clock, uint32_t kind, int32_t tid);
bool sim_is_open(struct gate *gate);
int sim_try(struct gate *gate, struct gate_want *wants, unsigned n, int32_t tid,
            struct gate_waiter *visit);
void sim_end(struct gate *gate, uint32_t clock);
bool sim_group_begin(struct gate *gate);
void sim_group_end(struct gate *gate);
void sim_untracked_begin(struct gate *gate);
void sim_untracked_end(struct gate *gate);
"""

GO, ARMED, PARK, PENDING, CLOSED = range(5)

ffi = FFI()
ffi.cdef(GATE_H)


def build(change: tuple[str, str, str] | None = None) -> Any:
    """Compile (once, for this run and later ones) and load; ``change``: file, passage that occurs
    once in it, what takes its place.

    The file may be one of the interposer's gate or gate_simulation.c.
    """
    sources = {name: INTERPOSER / "gate" / name for name in ("gate.c", "clocks.c")}
    sources["gate_simulation.c"] = Path(__file__).with_name("gate_simulation.c")
    if change is not None:
        name, before, after = change
        path = sources.get(name, INTERPOSER / "gate" / name)
        text = path.read_text()
        if text.count(before) != 1:
            raise ValueError(f"{name} has {text.count(before)} times: {before}")
    flags = ["-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-D_GNU_SOURCE"]
    flags += ['-DLIVESHIFT_VERSION="simulated"', "-Wno-unused-function"]

    def make(part: Path) -> None:
        if change is not None:
            changed = part / name
            changed.write_text(text.replace(before, after))
            if name in sources:
                sources[name] = changed
        includes = [f"-I{part}", f"-I{INTERPOSER / 'gate'}", f"-I{INTERPOSER}"]
        library = part / "gate.so"
        subprocess.run(
            [*compiler(), *flags, *includes, "-o", library, *map(str, sources.values())],
            check=True,
        )

    files = [sources["gate_simulation.c"], *INTERPOSER.rglob("*.[ch]")]
    return ffi.dlopen(str(kept(BUILT, "gate", files, (flags, change), make) / "gate.so"))
