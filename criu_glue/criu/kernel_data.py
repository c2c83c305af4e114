# SPDX-License-Identifier: Apache-2.0
"""Keeps what CRIU found out about the kernel for the next run, also where CRIU would not keep it.

CRIU probes the kernel at every start (20 to 40 ms, while the job is frozen), unless /run/criu.kdat
holds the results. CRIU writes that file on a tmpfs only, so that it does not survive a reboot into
another kernel (criu: kerndat.c). If /run is no tmpfs (mostly in containers), we make the file in a
mount namespace that has a tmpfs there, and mount it on its place. It is read-only, only root can
read it, and a reboot removes it. Sandboxes that are built after that have it, too.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ...errors import LiveshiftError
from ..capsule.mounts import mount_table
from ..files import statx
from ..network.iproute import run
from .tool import KERNEL_DATA, Criu

log = logging.getLogger("liveshift.criu")

# The output file is opened first, since the mount may cover its path.
_MAKE = """
exec 3> "$3" && mount -t tmpfs -o mode=0700 liveshift "$1" && file=$1/$2 && shift 3 &&
"$@" >&2 3>&- && cat "$file" >&3
"""


def keep(criu: Criu, directory: Path) -> bool:
    """Make sure that CRIU finds its kernel data from now on; ``directory`` is for them alone.

    Returns False if CRIU will not find them. May be called again; raises no LiveshiftError or
    OSError.
    """
    made = directory / KERNEL_DATA.name
    where = [str(KERNEL_DATA.parent), KERNEL_DATA.name, str(made)]
    try:
        if mount_table("self")[statx.stat(KERNEL_DATA.parent).mount].kind == "tmpfs":
            criu.warm()
            return KERNEL_DATA.exists()
        directory.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(directory):
            run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=1m", "liveshift", str(directory)])
        if os.path.ismount(KERNEL_DATA):  # it may be the data of a CRIU that was here before
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
