# SPDX-License-Identifier: Apache-2.0
"""Before a job goes on from a snapshot: cuts the files that it was writing on shared paths back to
the sizes that they had, so that it does not write the same twice.

It is done once for the whole job, when the earlier copies have ended and before a capsule runs
again. Several capsules may write to one file. Each was dumped at its own moment, and stayed frozen
until all were (snapshot.py). So the file is cut back to the largest of its sizes, which it had when
the last one was dumped that had it open: no such capsule's image has what came later, and each of
them writes that again.

The images say which files the capsules were writing. Without its image a capsule cannot go on in
any case. So the job waits here for hosts that have them, and for nothing else.
"""

from __future__ import annotations

import asyncio

from ...criu_glue.files.identity import Identity
from ...errors import LiveshiftError, Unreachable
from ...units import some
from .. import messages
from ..messages.answers import expected
from ..model.jobs import Capsule, Job
from ..model.snapshots import Generation, image_name
from .rewind_context import RewindContext

MOST_NAMED = 5


async def cut_back(context: RewindContext, job: Job, generation: Generation) -> str:
    """Return a text for the history: which files were cut, and which could not be; "" if none had
    changed.

    Raises Unreachable, and has cut nothing, if nobody who has one of the images answers: try again
    then. It raises no other LiveshiftError: a file that stays too long harms less than a job that
    does not go on.
    """
    if any(capsule.granted for capsule in job.capsules.values()):
        return ""  # some of it runs again, and may have written
    try:
        sizes, identities, appended = await _files(context, job, generation)
    except Unreachable:
        raise
    except LiveshiftError as error:
        return f"its files on shared paths are not cut back: {error}"
    if not sizes:
        return ""
    hosts = [capsule.host for capsule in job.capsules.values()]
    host = next(filter(context.is_up, hosts), hosts[0])
    run = job.request
    limit = context.cluster.timeouts.prepare
    # Half of it: a host that has got it late must have ended before the job goes on.
    order = messages.CutBack(
        job.name,
        job.uid,
        run.gid,
        list(run.groups),
        sizes,
        deadline=limit / 2,
        identities=identities,
        appended=sorted(appended),
    )
    try:
        answer = await context.request(host, order, limit)
        done = expected(messages.CutBackDone, host, order, answer)
    except LiveshiftError as error:
        return f"its files on shared paths are not cut back: {error}"
    texts = []
    if done.cut:
        texts.append(f"cut back to what they were: {some(done.cut, MOST_NAMED)}")
    if done.left:
        texts.append(f"left as they are, though they have changed: {some(done.left, MOST_NAMED)}")
    return "files on shared paths are " + "; ".join(texts) if texts else ""


async def cut_back_what_ran_on(context: RewindContext, job: Job, generation: Generation) -> str:
    """Cut back what capsules of a suspended job have written that had gone on before their hosts
    heard of the suspension, since the orchestrator was silent. It is not left to the resumption:
    until then other programs may write to these files. Return a text for the history. Raises as
    :func:`cut_back`.
    """
    ran = ", ".join(sorted(job.ran_on))
    said = await cut_back(context, job, generation)
    job.ran_on.clear()
    text = f"{ran} had gone on after {generation.name}, and a resumption repeats that"
    return f"{text}; {said}" if said else text


async def _files(
    context: RewindContext, job: Job, generation: Generation
) -> tuple[dict[bytes, int], dict[bytes, Identity], set[bytes]]:
    """Return two dicts by path: the largest size that a file had when a capsule was dumped that was
    writing it, and which file it was. If capsules were dumped with different files of one path, the
    second dict lacks it: the job renamed a file meanwhile. Return also the paths of those that all
    of these capsules had open only for appending."""
    looks = (_written(context, generation, capsule) for capsule in job.capsules.values())
    found = await asyncio.gather(*looks, return_exceptions=True)
    errors = [each for each in found if isinstance(each, BaseException)]
    # An error that may pass comes first. It is always the same one, so the history names it once.
    if errors:
        raise min(errors, key=lambda each: not isinstance(each, Unreachable))
    sizes: dict[bytes, int] = {}
    identities: dict[bytes, set[Identity | None]] = {}
    written = set[bytes]()
    for facts in found:
        assert not isinstance(facts, BaseException)
        for path, size in facts.written.items():
            sizes[path] = max(size, sizes.get(path, size))
            identities.setdefault(path, set()).add(facts.identities.get(path))
        written |= facts.written.keys() - set(facts.appended)
    known = {path: each.pop() for path, each in identities.items() if len(each) == 1}
    of_all = {path: which for path, which in known.items() if which is not None}
    return sizes, of_all, sizes.keys() - written


async def _written(
    context: RewindContext, generation: Generation, capsule: Capsule
) -> messages.HeldFacts:
    """Return what the image of a capsule says of the files that it was writing. This asks a holder,
    and the host on which the capsule was if that has kept a copy (RewoundCapsule takes the image
    from these).

    Raises Unreachable if one of them may yet say so, else why they cannot.
    """
    image = image_name(generation.number, capsule.index)
    look, limit = messages.GetHeld(image, capsule.name), context.cluster.timeouts.prepare
    hosts = list(generation.holders.get(capsule.name, ()))
    home = generation.home(capsule.name)
    if home and (home == capsule.host or context.is_up(home)):  # if not, it may never be
        hosts.append(home)
    away, failed = "", None
    for host in dict.fromkeys(hosts):
        if not context.is_up(host):
            away = away or f"{host} is not up"
            continue
        try:
            answer = await context.request(host, look, limit)
            return expected(messages.HeldFacts, host, look, answer)
        except Unreachable as error:
            away = str(error)
        except LiveshiftError as error:
            failed = error
    if failed is not None and not away:
        raise failed
    raise Unreachable(
        f"no host that holds {image}, the image of {capsule.name}, answers: {away or 'none does'}"
    )
