# SPDX-License-Identifier: Apache-2.0
"""What CRIU found out about the kernel, kept for the next run also where CRIU would not.

CRIU probes the kernel at every start (20 to 40 ms, while the job stands) unless /run/criu.kdat says
what it would find. It writes that file on a tmpfs only, so that no later kernel meets it (criu:
kerndat.c). Where /run is none (containers, mostly) the file is made in a mount namespace that has
one, and mounted on its place: read only, root's alone, and gone with the kernel. Rooms that are
built after that have it, too.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

from ...errors import LiveshiftError
from ..network.iproute import run
from .tool import KERNEL_DATA, Criu

log = logging.getLogger("liveshift.criu")

# Where the result goes is opened first: it may lie below what the mount covers.
_MAKE = """
exec 3> "$3" && mount -t tmpfs -o mode=0700 liveshift "$1" && file=$1/$2 && shift 3 &&
"$@" >&2 3>&- && cat "$file" >&3
"""


def keep(criu: Criu, directory: Path) -> bool:
    """See to it that CRIU finds its kernel data from now on; ``directory`` is for them alone.

    Returns whether they are there. May be called again; never raises.
    """
    if _is_tmpfs(KERNEL_DATA.parent):
        criu.warm()
        return KERNEL_DATA.exists()
    made = directory / KERNEL_DATA.name
    where = [str(KERNEL_DATA.parent), KERNEL_DATA.name, str(made)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(directory):
            run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=1m", "liveshift", str(directory)])
        if os.path.ismount(KERNEL_DATA):  # perhaps of a CRIU that was here before
            run(["umount", "--lazy", str(KERNEL_DATA)])
        made.touch(mode=0o600)
        run(["unshare", "--mount", "sh", "-c", _MAKE, "sh", *where, *criu.command("check")])
        KERNEL_DATA.touch(mode=0o600)
        run(["mount", "--bind", str(made), str(KERNEL_DATA)])
        run(["mount", "-o", "remount,bind,ro", str(KERNEL_DATA)])
    except (LiveshiftError, OSError) as error:
        log.warning("CRIU will probe the kernel at every start: %s", error)
        made.unlink(missing_ok=True)
        return False
    return True


def _is_tmpfs(directory: Path) -> bool:
    stat = shutil.which("stat") or "stat"
    done = subprocess.run(
        [stat, "-f", "-c", "%T", str(directory)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() == "tmpfs"
