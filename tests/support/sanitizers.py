# SPDX-License-Identifier: Apache-2.0
"""C code built as it is and under the compiler's sanitizers, once for all tests that use it."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkout import INTERPOSER, ROOT
from doubles.gpu.build import compiler, kept

MEMORY = ROOT / "criu_glue" / "memory"
BUILT = ROOT / "build" / "doubles"
"""Where libraries and programs are kept, by what they were made of, for this run and the next."""

SANITIZERS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
RUNTIMES = {
    "address": ("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan.so"),
    "thread": ("libtsan.so", "libclang_rt.tsan-x86_64.so", "libclang_rt.tsan.so"),
}
"""As gcc and clang name them."""
FOUND = 66
"""The exit status of a process in which a sanitizer has found something."""

GUESSES_NO_TLS = "intercept_tls_get_addr=0"
"""Where a thread's block of thread-local memory begins 16 bytes behind a page's start, the runtimes
of gcc 12 take what is before it for a header of glibc 2.19. glibc has none since 2.25: then libtsan
marks from one arbitrary pointer on as many bytes as another one's value, and ends with "failed to
allocate"; and the leak checker of libasan reads as many, and ends with "Tracer caught signal 11".
CPython's cffi has such memory in each thread."""

OPTIONS = {
    "ASAN_OPTIONS": f"detect_leaks=1:abort_on_error=0:exitcode={FOUND}",
    # Some programs fork while they have threads; their children start none. At its end a process
    # would wait a second for what its threads may still do wrong.
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0:atexit_sleep_ms=20"
    f":exitcode={FOUND}:{GUESSES_NO_TLS}",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def flags(name: str) -> tuple[str, ...]:
    """That sanitizer's. Skips the test where this machine has no runtime library for it."""
    why = _lack(name)
    if why:
        pytest.skip(f"no {name} sanitizer here: {why}")
    return SANITIZERS[name]


def chosen() -> tuple[str, ...]:
    """Of the sanitizer that `make sanitize` runs all tests of the NCCL adapter with."""
    return flags(os.environ.get("LIVESHIFT_SANITIZER", "plain"))


@functools.cache
def _lack(name: str) -> str:
    if not SANITIZERS[name]:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty")
        command = [*compiler(), *SANITIZERS[name], "-x", "c", "-", "-o", str(empty)]
        source = "int main(void) { return 0; }\n"
        made = subprocess.run(command, input=source, capture_output=True, text=True)
        if made.returncode != 0:
            return made.stderr[:200]
        ran = subprocess.run([empty], capture_output=True, text=True)
        return ran.stderr[:200] if ran.returncode != 0 else ""


def runtime(name: str) -> Path:
    """The sanitizer's own library. A program that was built without the sanitizer must preload it
    before it loads a library that was built with it. Skips the test where there is none."""
    for each in RUNTIMES[name]:
        words = [*compiler(), f"-print-file-name={each}"]
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        if Path(found).is_absolute() and Path(found).exists():
            return Path(found).resolve()
    pytest.skip(f"no shared library of the {name} sanitizer here")


def memory_library(name: str, sources: Path = MEMORY) -> Path:
    """memory.so under a sanitizer: all C files in ``sources`` but the shim's, which CRIU preloads
    by itself. Files that are the same in another folder are compiled once for both."""
    shared = ["-shared-libsan"] if runtime(name).name.startswith("libclang_rt") else []
    own = ["-fPIC", *flags(name), *shared]
    headers = sorted(sources.rglob("*.h"))

    def compiled(source: Path) -> Path:
        def make(part: Path) -> None:
            compile_c(part / "memory.o", f"-I{sources}", *own, "-c", source)

        found = kept(BUILT, f"memory-{source.stem}", [*headers, source], tuple(own), make)
        return found / "memory.o"

    def make(part: Path) -> None:
        files = sorted(path for path in sources.rglob("*.c") if path.name != "prefill_shim.c")
        compile_c(part / "memory.so", *own, "-shared", *map(compiled, files))

    return kept(BUILT, "memory", sources.rglob("*.[ch]"), tuple(own), make) / "memory.so"


def compile_c(output: Path, *arguments: str | Path) -> None:
    """With all warnings as errors; what the compiler says is the assertion's words."""
    common = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread"]
    common += ["-fno-omit-frame-pointer", '-DLIVESHIFT_VERSION="test"', f"-I{INTERPOSER}"]
    made = subprocess.run(
        [*compiler(), *common, *arguments, "-o", output], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


def interposer(flags: Sequence[str] = ()) -> Path:
    """The interposer, to be linked with instead of preloaded: a sanitizer's own library has to come
    first. What its parts ask of each other is exported too."""
    own, linking = ["-fPIC", "-fexceptions", *flags], ["-shared", "-Wl,--hash-style=gnu"]

    def make(part: Path) -> None:
        def compiled(source: Path) -> Path:
            compile_c(part / f"{source.stem}.o", *own, "-c", source)
            return part / f"{source.stem}.o"

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sorted(INTERPOSER.rglob("*.c"))))
        compile_c(part / "liveshift_interposer.so", *own, *linking, *objects)

    files = INTERPOSER.rglob("*.[ch]")
    return kept(BUILT, "interposer", files, (*own, *linking), make) / "liveshift_interposer.so"


def first(library: Path) -> list[str]:
    """Flags that link with a library before all others, used or not."""
    return ["-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{library.parent}"]
