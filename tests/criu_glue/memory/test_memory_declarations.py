# SPDX-License-Identifier: Apache-2.0
"""What Python declares of memory.so is what the headers say: the compiler compares them.

A function is declared once more, as Python has it, behind its header: C refuses another type. The
size, the fields, their types and offsets of a structure are asserted as cffi has computed them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from cffi import FFI
from doubles.gpu.build import compiler

from liveshift.criu_glue.memory.source import source_engine, userfault
from liveshift.criu_glue.memory.store import store_library

MEMORY = Path(__file__).resolve().parents[3] / "criu_glue" / "memory"
STRUCTURE = re.compile(r"struct (\w+) \{.*?\};", re.DOTALL)
FUNCTION = re.compile(r"(\w+)\([^()]*\);")
HEADERS = (
    *("fill/fill.h", "fill/pagemap_flags.h", "prefill/cold.h", "source/pull.h", "source/regions.h"),
    *("source/remote.h", "source/scan.h", "source/sent.h", "store/store.h"),
)
DECLARATIONS = {
    "store_library": store_library.DECLARATIONS,
    "source_engine": source_engine.DECLARATIONS,
    "userfault": userfault.DECLARATIONS,
}


def program(declarations: str) -> str:
    """A C file that compiles where the declarations and the headers agree."""
    # Python gives the bytes of a buffer, which have no type.
    declarations = declarations.replace("const void *plan", "const struct plan *plan")
    ffi = FFI()
    ffi.cdef(f"struct plan;\n{declarations}")
    lines = ["#include <stdbool.h>", "#include <stddef.h>", "#include <stdlib.h>"]
    lines += [f'#include "{header}"' for header in HEADERS]
    for name in STRUCTURE.findall(declarations):
        kind = ffi.typeof(f"struct {name}")
        lines.append(f'_Static_assert(sizeof(struct {name}) == {ffi.sizeof(kind)}, "{name}");')
        for field, about in kind.fields:
            where, type_ = f"struct {name}, {field}", ffi.getctype(about.type)
            of = f"((struct {name} *)0)->{field}"
            same = f"__builtin_types_compatible_p(__typeof__({of}), {type_})"
            lines.append(f'_Static_assert(offsetof({where}) == {about.offset}, "{where}");')
            lines.append(f'_Static_assert({same}, "the type of {where}");')
    functions = STRUCTURE.sub("", declarations)
    # By its name alone: one that no header has is an error.
    lines += [f"__typeof__(&{name}) at_{name} = {name};" for name in FUNCTION.findall(functions)]
    return "\n".join([*lines, functions, ""])


def compile_(text: str, place: Path) -> str:
    """What the compiler says; nothing if all is well."""
    (place / "declared.c").write_text(text)
    words = [*compiler(), "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Werror", f"-I{MEMORY}"]
    done = subprocess.run(
        [*words, "-fsyntax-only", place / "declared.c"], capture_output=True, text=True, check=False
    )
    return done.stderr


@pytest.mark.parametrize("name", DECLARATIONS)
def test_they_agree_with_the_headers(name: str, tmp_path: Path) -> None:
    text = program(DECLARATIONS[name])
    assert text.count("__typeof__(&") == len(re.findall(r"\);", DECLARATIONS[name]))
    assert compile_(text, tmp_path) == ""


def test_no_declaration_is_elsewhere() -> None:
    """``load`` gets its declarations from a constant that is compared here."""
    for file in MEMORY.rglob("*.py"):
        for argument in re.findall(
            r"(?<!cls\.)\bload\((?!self|cls|\)|declarations:)([^)]*)", file.read_text()
        ):
            assert argument == "DECLARATIONS", f"{file.name}: load({argument})"
            assert file.stem in DECLARATIONS


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ("uint32_t pages; uint32_t slot;", "uint32_t slot; uint32_t pages;", "extent, slot"),
        ("uint64_t preplaced;\n    char", "char", "fill_report"),
        ("uint64_t limit, bool keeps", "uint32_t limit, bool keeps", "conflicting types"),
        ("void store_close(", "void store_close_all(", "store_close_all"),
        (
            "struct prefill_discard { uint64_t address",
            "struct prefill_discard { int64_t address",
            "type",
        ),
    ],
)
def test_a_difference_is_found(good: str, bad: str, words: str, tmp_path: Path) -> None:
    declarations = store_library.DECLARATIONS
    assert good in declarations
    said = compile_(program(declarations.replace(good, bad)), tmp_path)
    assert words in said
