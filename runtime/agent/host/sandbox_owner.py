# SPDX-License-Identifier: Apache-2.0
"""Which sandbox the directory and the network of a capsule belong to on this host.

Both have the capsule's name. A later sandbox of the capsule gets new ones under the same name, so
a late removal of an earlier copy would take them from it. A file in the directory states whose they
are: it has the pid and the start time of process 1, because pids come again.
"""

from __future__ import annotations

from ....criu_glue.capsule import sandboxes
from ....criu_glue.capsule.sandboxes import Sandbox

OWNER = "process-1"


def mark(sandbox: Sandbox) -> None:
    """State that directory and network are this sandbox's. Raises OSError, and then the sandbox has
    been ended."""
    try:
        (sandbox.plan.directory / OWNER).write_text(_identity(sandbox))
    except OSError:
        sandboxes.end(sandbox)
        raise


def owns(sandbox: Sandbox) -> bool:
    """False if directory and network belong to a later sandbox. True also if no file says so: an
    earlier version of liveshift made the sandbox, or the directory is gone."""
    try:
        owner = (sandbox.plan.directory / OWNER).read_text()
    except FileNotFoundError:
        return True
    return owner in ("", _identity(sandbox))


def _identity(sandbox: Sandbox) -> str:
    return f"{sandbox.init} {sandbox.started}"
