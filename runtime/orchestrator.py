# SPDX-License-Identifier: Apache-2.0
"""The orchestrator: the one brain of a cluster, put together from its parts.

fleet       what is known            moves       migrations
desk        what people ask          evacuation  what taints set in motion
endings     how jobs end             link        agents, over the switchboard
"""

from __future__ import annotations

import asyncio
import logging
import time

from ..errors import LiveshiftError, NotPermitted, Unreachable
from . import local_socket, messages, notify
from .config import Cluster
from .desk import Desk
from .endings import Endings
from .evacuation import Evacuation
from .fleet import Fleet
from .link import Switchboard
from .messages import Message
from .moves import Moves
from .ownership import is_stray
from .steps import Step
from .story import Story

log = logging.getLogger("liveshift.orchestrator")

KILLED = 137


class Orchestrator:
    """One cluster's brain; :meth:`run` serves until cancelled."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fleet = Fleet(cluster)
        address, keys = str(cluster.orchestrator), cluster.paths.keys
        self.switchboard = Switchboard(address, keys, self._from_agent)
        self.endings = Endings(self.fleet, self.switchboard)
        self.moves = Moves(self.fleet, self.switchboard, self._move_over)
        self.evacuation = Evacuation(self.fleet, self.moves)
        self.desk = Desk(self.fleet, self.moves, self.endings, self.evacuation)
        self.switchboard.operators = self.desk.serve_operator

    async def run(self) -> None:
        path = self.cluster.paths.run / "orchestrator.sock"
        await local_socket.serve(path, self.desk.serve)
        self.moves.take_up()
        self.endings.take_up()
        notify.ready()
        await asyncio.gather(self.switchboard.serve(), self.evacuation.run())

    async def _move_over(self, move: Story) -> None:
        if move.step is Step.LOST:
            self.endings.capsule_ended(move.job, move.capsule, KILLED)
        self.evacuation.wake()

    async def _from_agent(self, host: str, ask: Message) -> Message | None:
        state = self.fleet.hosts.get(host)
        if state is None:
            raise NotPermitted(f"{host} is not in this cluster's file")
        state.heard = time.monotonic()
        if isinstance(ask, messages.Beat):
            self._beat(host, ask)
            if not state.told:  # one that was cut off for a moment does not know that it was
                raise Unreachable(f"{host} may have missed address books: it is to say hello")
            return None
        if isinstance(ask, messages.Hello):
            if ask.digest != self.cluster.digest:
                log.warning("%s runs with another cluster file than the orchestrator", host)
            if ask.life != state.life:
                state.life = ask.life
                self._look_for_lost(host, ask)  # one that lived on would have told
            self.evacuation.wake()
            state.told = True
            running = [j.book() for j in self.fleet.jobs.values() if j.state != "ended"]
            return messages.Books(running)
        if isinstance(ask, messages.Claim):
            return self.moves.rule(host, ask)
        if isinstance(ask, messages.Progressed):
            self.moves.progressed(host, ask)
            return None
        if isinstance(ask, messages.Ended):
            found = self.fleet.find(ask.capsule)
            if found and (found[1].host, found[1].epoch) == (host, ask.epoch):
                self.endings.capsule_ended(*found, ask.code)
                self.evacuation.wake()
            return None
        if isinstance(ask, messages.Relay):
            request = messages.decode(ask.request).body
            if request is None:
                raise LiveshiftError("an agent relayed something that is no ask")
            return await self.desk.serve_relayed(host, ask.uid, request)
        raise LiveshiftError(f"the orchestrator does not serve {type(ask).__name__} to agents")

    def _look_for_lost(self, host: str, hello: messages.Hello) -> None:
        """What a host owns and no longer has went down with it: it was switched off, say."""
        for job in self.fleet.jobs.values():
            for capsule in job.capsules.values():
                mine = capsule.host == host and capsule.code is None and capsule.started
                if capsule.migration or capsule.name in hello.epochs:
                    continue
                if mine and capsule.granted:
                    self.fleet.journal.tell(capsule.name, "lost", f"{host} came back without it")
                    self.endings.capsule_ended(job, capsule, KILLED)

    def _beat(self, host: str, beat: messages.Beat) -> None:
        state = self.fleet.hosts[host]
        state.memory_free, state.gpus = beat.memory_free, tuple(beat.gpus)
        state.link = beat.link
        for seen in beat.capsules:
            found = self.fleet.find(seen.name)
            if found is None:
                continue
            capsule = found[1]
            if (capsule.host, capsule.epoch) == (host, seen.epoch):
                capsule.seen = seen
            elif is_stray(host, seen.epoch, capsule.owner, bool(capsule.migration)):
                log.error("%s still runs on %s under epoch %d", seen.name, host, seen.epoch)
                self.endings.end_stray(host, seen.name, seen.epoch)


async def serve(cluster: Cluster) -> None:
    """Run the orchestrator until cancelled; raises LiveshiftError when it cannot start."""
    await Orchestrator(cluster).run()
