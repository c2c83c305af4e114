# SPDX-License-Identifier: Apache-2.0
"""What Python declares of the CUDA driver is called as NVIDIA's cuda.h has it.

We name no type of NVIDIA's: a handle is a number as wide as a pointer, and a structure has fields
of our own. So what a call passes is compared: the size of each argument, and of a structure that it
points to the size and where its fields begin.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cffi import FFI
from doubles.gpu.build import compiler

from liveshift.cuda_snapshot import checkpoint, cuda

INCLUDE = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include"
GNU = ("__attribute__(x)=", "__inline__=", "__restrict=", "__extension__=")
"""What cffi's parser does not know, and what no type depends on."""
FUNCTION = re.compile(r"^CUresult\s+(\w+)\s*(\([^;]*\));", re.MULTILINE)
POINTERS = {
    name: kind.replace("(*)", f"{name}") + ";" for name, kind in checkpoint._FUNCTIONS.items()
}
DECLARATIONS = {
    "cuda": cuda._CDEF,
    "checkpoint": checkpoint._CDEF + "\n".join(POINTERS.values()),
}


def functions(declarations: str) -> tuple[FFI, dict[str, Any]]:
    """The type of each function, by its name."""
    ffi = FFI()
    ffi.cdef(FUNCTION.sub(r"typedef CUresult (*type_of_\1)\2;", declarations), override=True)
    names = [name for name, _ in FUNCTION.findall(declarations)]
    return ffi, {name: ffi.typeof(f"type_of_{name}") for name in names}


@pytest.fixture(scope="module")
def nvidia() -> tuple[FFI, dict[str, Any]]:
    words = [*compiler(), "-E", "-P", "-x", "c", *(f"-D{each}" for each in GNU), f"-I{INCLUDE}"]
    text = "#include <stddef.h>\n#include <stdint.h>\n#include <cuda.h>\n"
    done = subprocess.run([*words, "-"], input=text, capture_output=True, text=True, check=True)
    _, first, own = done.stdout.partition("typedef uint32_t cuuint32_t;")
    sized = {"sizeof(CUlaunchAttributeID)": "4", "sizeof(CUcheckpointGpuPair *)": "8"}
    for expression, number in sized.items():
        own = own.replace(expression, number)
    # Parsing all of its functions would take cffi's parser half a minute.
    wanted = {name for each in DECLARATIONS.values() for name, _ in FUNCTION.findall(each)}
    return functions(first + FUNCTION.sub(lambda f: f[0] if f[1] in wanted else "", own))


def starts(ffi: FFI, kind: Any, at: int = 0) -> Iterator[int]:
    """The offsets of all fields, also of those of structures in it."""
    for _, field in kind.fields:
        yield at + field.offset
        if field.type.kind in ("struct", "union"):
            yield from starts(ffi, field.type, at + field.offset)


def compare(nvidia: tuple[FFI, dict[str, Any]], declarations: str) -> None:
    there, theirs = nvidia
    here, ours = functions(declarations)
    assert len(ours) == len(re.findall(r"^CUresult ", declarations, re.MULTILINE)) > 0
    for name, own in ours.items():
        real = theirs[name]
        sizes = [[ffi.sizeof(a) for a in f.args] for ffi, f in ((here, own), (there, real))]
        assert sizes[0] == sizes[1], name
        assert here.sizeof(own.result) == there.sizeof(real.result)
        for mine, its in zip(own.args, real.args, strict=True):
            if mine.kind != "pointer":
                continue
            assert its.kind == "pointer", f"{name}: {its}"
            if mine.item.kind == "struct":
                assert here.sizeof(mine.item) == there.sizeof(its.item), f"{name}: {its}"
                fields = set(starts(here, mine.item)) - set(starts(there, its.item))
                assert not fields, f"{name}: {its} has no field at {fields}"
            elif mine.item.kind == "primitive" and its.item.kind in ("primitive", "enum"):
                assert here.sizeof(mine.item) == there.sizeof(its.item), f"{name}: {its}"


@pytest.mark.parametrize("module", DECLARATIONS)
def test_a_call_passes_what_cuda_takes(nvidia: tuple[FFI, dict[str, Any]], module: str) -> None:
    compare(nvidia, DECLARATIONS[module])


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("cuMemRelease(CUmemHandle handle)", "cuMemRelease(int handle)", "cuMemRelease"),
        ("cuMemGetInfo_v2(size_t *free", "cuMemGetInfo_v2(int *free", "cuMemGetInfo_v2"),
        ("int location_id;", "int location_id, one_more;", "cuMemGetAllocationGranularity"),
        ("void *win32;", "int win32; int more;", "has no field at"),
    ],
)
def test_a_difference_is_found(
    nvidia: tuple[FFI, dict[str, Any]], good: str, bad: str, words: str
) -> None:
    changed = DECLARATIONS["cuda"].replace(good, bad)
    assert changed != DECLARATIONS["cuda"]
    with pytest.raises(AssertionError, match=words):
        compare(nvidia, changed)
