# SPDX-License-Identifier: Apache-2.0
"""``liveshift logs``: prints what a capsule or a whole job has printed, and what it prints next."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import LiveshiftError
from ..show import render
from .options import OpenClient, TextOrJson, capsules_of, job_and_capsule_names, with_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...criu_glue.capsule.output import OutputRecord
    from ..client.client import Client
    from ..show.output_lines import Writer
    from ..show.output_reader import Reader

EXAMPLES = """\
[bold]Examples[/]

liveshift logs gpt/1 -f   [dim]# one capsule, wherever it runs[/]

liveshift logs gpt --timestamps   [dim]# all capsules of the job, in order of time[/]

liveshift logs gpt/0 --with-repeated   [dim]# both runs of what a rewind has repeated[/]
"""


@with_client
def logs(
    open_client: OpenClient,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="CAPSULE|JOB",
            help="One capsule, or all of a job's, each line then with its name.",
            autocompletion=job_and_capsule_names,
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what it prints next, to its end.")
    ] = False,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="When each line began, in UTC.")
    ] = False,
    with_repeated: Annotated[
        bool,
        typer.Option(
            "--with-repeated",
            help="Also what was printed after a snapshot and before the job went back to it, each"
            " line marked. The job prints it again.",
        ),
    ] = False,
    output: Annotated[
        TextOrJson,
        typer.Option("--output", "-o", help="json is for scripts: one object for each line."),
    ] = TextOrJson.TEXT,
) -> None:
    """Show the output of a capsule or a job, wherever it runs.

    What it wrote to stdout comes on stdout, the rest on stderr. A move loses and doubles nothing.
    """
    from ..show.output_lines import Streams, writers
    from ..show.output_reader import Reader

    with open_client() as client:
        capsules = capsules_of(client, subject)
        streams = Streams(sys.stdout.buffer, sys.stderr.buffer)
        to = writers(
            streams,
            capsules,
            timestamps=timestamps,
            with_repeated=with_repeated,
            as_json=output is TextOrJson.JSON,
        )
        readers = [Reader(capsule, with_repeated=with_repeated) for capsule in capsules]
        _so_far(client, readers, to)
        if follow:
            _from_now(client, readers, to)
        for writer in to.values():
            writer.end()


def _so_far(client: Client, readers: list[Reader], to: dict[str, Writer]) -> None:
    """Write everything up to now; that of several capsules in order of time."""
    import heapq

    def named(reader: Reader) -> Iterator[tuple[str, OutputRecord]]:
        return ((reader.capsule, record) for record in reader.history(client))

    histories = map(named, readers)
    for capsule, record in heapq.merge(*histories, key=lambda item: item[1].realtime_ns):
        to[capsule].put(record)


def _from_now(client: Client, readers: list[Reader], to: dict[str, Writer]) -> None:
    """Write what comes next, until every capsule has ended."""
    import queue

    from ..show.output_reader import Follower, OutputEnded, OutputStopped, ReadProblem, Report

    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    for reader in readers:
        Follower(client.place, reader, to[reader.capsule].put, reports.put).start()
    left = {reader.capsule for reader in readers}
    silent = set[str]()  # capsules that cannot be read for the moment: said once
    while left:
        match reports.get():
            case OutputEnded(capsule, _):
                to[capsule].end()
                left.discard(capsule)
            case OutputStopped(capsule, error):
                if isinstance(error, LiveshiftError) and len(readers) > 1:
                    render.failure(f"{capsule}: {error}", error.hint)
                    left.discard(capsule)
                else:
                    raise error
            case ReadProblem(capsule, None):
                silent.discard(capsule)
                render.note(f"{capsule}: its output can be read again", style="yellow")
            case ReadProblem(capsule, error):
                if capsule not in silent:
                    render.note(f"{capsule}: {error}; trying again", style="yellow")
                silent.add(capsule)
