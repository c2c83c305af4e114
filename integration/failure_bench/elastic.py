# SPDX-License-Identifier: Apache-2.0
"""torchrun's own way: checkpoints, and an elastic agent on each host that restarts its worker.

As its documentation has it: ``--nnodes 2 --max-restarts``, rendezvous by c10d, and one agent more
than nodes. That one waits, and comes in when the keep-alive of another has failed. The store of the
rendezvous is on a machine that is never killed, and the checkpoint on storage that all hosts share.
The agents do not share their stores with the workers (SHARE): with torch 2.13 an agent that stays
would send its new worker to the store of the earlier round, and the job would hang.

In this way's favour: the spare host is there and has its agent running, the checkpoint is read from
this machine's page cache, and the data set is generated again instead of read.

Where processes are killed too, no agent stands by: with torch 2.13 three agents for two places then
join one round after the other, since each of two that train sees the third one wait and restarts
its worker. So the spare's agent is started in the moment in which a host is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from host_programs import inside

from liveshift.launcher import lab as labs
from liveshift.launcher.lab import Lab

from .cases import Case, Effort, training
from .history import History
from .hosts import CONTROL, Programs

PORT = 29400
SHARE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
MISSED = 3
"""Keep-alives in a row, as torchrun has it by default."""
_STORE = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", {port}, is_master=True, wait_for_workers=False, multi_tenant=True)
print("listening", flush=True)
time.sleep(1e9)
"""


class Elastic:
    """The job under torchrun on hosts of a lab without liveshift. ``saving``: it makes
    checkpoints. ``standing_by``: agents run on all hosts."""

    def __init__(
        self,
        lab: Lab,
        case: Case,
        effort: Effort,
        steps: int,
        pace: float,
        out: Path,
        cleanup: ExitStack,
        *,
        saving: bool,
        standing_by: bool,
    ) -> None:
        self.lab = lab
        self._standing_by = standing_by
        self.history = History(out, case.ranks, case.ranks)
        self._out, self._ranks = out, case.ranks
        self._programs = Programs(lab, out, cleanup)
        self._checkpoint = out / "checkpoint.pt"
        words = training(case, steps, pace)
        if saving:
            words += ["--checkpoint", str(self._checkpoint), "--every", str(effort.steps_every)]
        self._words = inside(out, words[1:])  # torchrun starts Python itself
        self._keep_alive = max(1, round(case.suspicion / MISSED)) if case.suspicion else 5
        self._saving = saving
        self._programs.start(CONTROL, ["python", "-c", _STORE.format(port=PORT)])
        for host in list(lab.hosts)[: case.ranks]:
            self._agent(host)
        self._spares = list(lab.hosts)[case.ranks :]

    def stand_by(self) -> None:
        """Start agents on the hosts that do not train, once the job has begun."""
        for host in self._spares if self._standing_by else ():
            self._agent(host)

    def lost(self, host: str) -> None:
        if not self._standing_by:
            self._agent(self._spares.pop(0))

    def _agent(self, host: str) -> None:
        machine = self.lab.machine(host)
        self._programs.start(host, self._torchrun(machine.address), **{SHARE: "1"})

    def _torchrun(self, address: str) -> Sequence[str]:
        store = self.lab.machine(CONTROL).address
        keep = f"keep_alive_interval={self._keep_alive},keep_alive_max_attempt={MISSED}"
        return [
            *("torchrun", "--nnodes", str(self._ranks), "--nproc-per-node", "1"),
            *("--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-id", "failures"),
            *("--rdzv-endpoint", f"{store}:{PORT}", "--local-addr", address),
            *("--rdzv-conf", f"is_host=0,join_timeout=3600,{keep}", *self._words),
        ]

    def alive(self) -> None:
        """torchrun says nothing; the waits have their deadlines."""

    def ready(self) -> bool:
        return self._checkpoint.exists()

    def trained(self) -> bool:
        return self.ready()

    def host_of(self, rank: int) -> str:
        return self.history.host_of(rank)

    def process_of(self, rank: int) -> int:
        return self._programs.trains(self.host_of(rank), self._words[0])

    def noticed(self, cut: float) -> tuple[float | None, str]:
        return None, ""  # when the first new worker began

    def replace(self, host: str) -> None:
        labs.boot_host(self.lab, host)
        self._spares.append(host)
        if self._standing_by:
            self._agent(host)

    def restart(self, host: str) -> None:
        """The host's agent has started the process again."""

    def said(self) -> str:
        return self._programs.said()

    def ended(self) -> bool:
        return all((self._out / f"final{rank}.json").exists() for rank in range(self._ranks))
