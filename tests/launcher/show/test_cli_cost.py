# SPDX-License-Identifier: Apache-2.0
"""What a move cost its job, as the command line says it."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import msgspec
from cli_harness import Call
from predictions import predicted

from liveshift.runtime.cost.words import in_words
from liveshift.runtime.messages import Cost

WORDS = "cost 0.9 s of training: paused 0.6, slower 0.3; host empty after 1.2 s"


def test_the_last_line_of_a_move_on_stderr_is_its_cost(gpt: Any, call: Call) -> None:
    code, out, err = call("migrate", "gpt/1", "--to", "h2")
    assert (code, err) == (0, f"{WORDS}\n")
    assert "cost" not in out


def test_json_has_it_in_numbers(gpt: Any, call: Call) -> None:
    row = json.loads(call("migrate", "gpt/1", "--to", "h2", "-o", "json")[1])
    assert row["cost"] == msgspec.to_builtins(gpt.cost)
    assert json.loads(call("events", "m1", "-o", "json")[1])["cost"]["lost_s"] == 0.9


def test_events_show_it_below_the_phases(gpt: Any, call: Call) -> None:
    gpt.move("gpt/1", "h2")
    assert WORDS in call("events", "m1")[1]


def test_it_is_waited_for_and_a_move_is_not(gpt: Any, call: Call) -> None:
    """It comes a while after the end; whoever does not want to wait gets the move at once."""
    cost, gpt.cost = gpt.cost, None

    def comes() -> None:
        with gpt.changed:
            gpt.cost = cost  # on a busy machine the move may begin only after this
            for name, row in gpt.moves.items():
                gpt.moves[name] = msgspec.structs.replace(row, cost=cost)

    began = time.monotonic()
    assert call("migrate", "gpt/1", "--to", "h2", "--no-cost")[2] == ""
    at_once = time.monotonic() - began
    timer = threading.Timer(at_once + 1.0, comes)
    timer.start()
    assert call("migrate", "gpt/1", "--to", "h1")[2] == f"{WORDS}\n"
    assert time.monotonic() - began > at_once + 1.0
    timer.join()


def test_a_drain_says_what_its_moves_cost_at_its_end(gpt: Any, call: Call) -> None:
    code, out, err = call("drain", "h1")
    assert code == 0
    assert out.splitlines()[-1] == "h1 is empty and tainted"
    assert err == f"gpt/1: {WORDS}\n"
    moves = json.loads(call("drain", "h2", "-o", "json")[1])["moves"]
    assert [row["cost"]["lost_s"] for row in moves] == [0.9] * len(moves)


def test_it_says_what_was_predicted_beside_it() -> None:
    cost = Cost(0.9, 0.6, 0.3, 1.2, 0.5, None, 1, 2, "")
    assert in_words(cost, predicted(1.0)).startswith(f"{WORDS}; predicted: ")
    told = msgspec.structs.replace(predicted(1.0), lost_s=0.84, empty_s=2.2)
    said = f"{WORDS}; predicted: 0.8 s of training, empty after 2.2 s"
    assert in_words(cost, told) == said
    full_dump = msgspec.structs.replace(told, how="")
    assert in_words(cost, full_dump) == WORDS, "nothing is predicted of it but its pause"
    unknown = msgspec.structs.replace(cost, lost_s=None, why_not="the job ended")
    assert "predicted" not in in_words(unknown, told)


def test_what_was_not_measured_says_why() -> None:
    cost = Cost(None, None, None, 2.4, 0.5, None, 1, 2, "the job ended")
    assert in_words(cost) == "cost not measured: the job ended; host empty after 2.4 s"
    stays = msgspec.structs.replace(cost, empty_s=None)
    assert in_words(stays) == "cost not measured: the job ended"
