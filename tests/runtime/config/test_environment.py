# SPDX-License-Identifier: Apache-2.0
"""What a capsule's command finds in its environment, and whose word counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import ROOT
from cluster_files import SMALL, mistakes

from liveshift.runtime.config.cluster import Env, dump, parse
from liveshift.runtime.config.environment import (
    MOVABLE,
    CapsuleIdentity,
    environment,
    in_effect,
    remarks,
)

REFERENCE = ROOT / "docs" / "commands.md"
PLACE = CapsuleIdentity("gpt", 1, 3, "10.99.0.2", "10.99.0.1")


def made(env: Env | None = None, **caller: str) -> dict[str, str]:
    return environment(PLACE, env or Env(), caller, Path("/opt/ours.so"), "/pages")


def test_every_movable_variable_is_set_and_has_a_reason() -> None:
    env = made()
    assert env["NCCL_HOSTID"] == env["HOSTNAME"] == "gpt-1"
    assert (env["NCCL_RAS_ENABLE"], env["NCCL_NVLS_ENABLE"], env["NCCL_IB_DISABLE"]) == (
        "0",
        "0",
        "1",
    )
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    for variable in MOVABLE:
        assert env[variable.name] == variable.of(PLACE)
        assert variable.accepts(variable.of(PLACE)) or variable.name == "NCCL_HOSTID"
        assert len(variable.reason) > 20
        assert variable.source


def test_the_callers_own_value_wins_where_it_can_be_true() -> None:
    env = made(NCCL_NVLS_ENABLE="1", NCCL_HOSTID="mine", GLOO_SOCKET_IFNAME="bond0")
    assert (env["NCCL_NVLS_ENABLE"], env["NCCL_HOSTID"]) == ("1", "mine")
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert made(LD_PRELOAD="/opt/tcmalloc.so")["LD_PRELOAD"] == "/opt/ours.so:/opt/tcmalloc.so"


def test_the_cluster_file_gives_other_values_or_none() -> None:
    text = (
        '[env]\nset = { NCCL_RAS_ENABLE = "1" }\n'
        'defaults = { NCCL_NVLS_ENABLE = false, NCCL_IB_DISABLE = "0", '
        'TP_SOCKET_IFNAME = false, GLOO_SOCKET_IFNAME = "eth1" }\n'
    )
    cluster = parse(SMALL + text).cluster
    assert parse(dump(cluster)).cluster == cluster
    env = made(cluster.env)
    assert "NCCL_NVLS_ENABLE" not in env
    assert "TP_SOCKET_IFNAME" not in env
    assert (env["NCCL_IB_DISABLE"], env["GLOO_SOCKET_IFNAME"]) == ("0", "eth1")
    assert env["NCCL_RAS_ENABLE"] == "1"  # what the file sets counts as the caller's
    assert made(cluster.env, NCCL_IB_DISABLE="1")["NCCL_IB_DISABLE"] == "1"
    assert made(cluster.env, TP_SOCKET_IFNAME="bond0")["TP_SOCKET_IFNAME"] == "bond0"
    shown = {name: value for name, value, _ in in_effect(cluster.env.defaults)}
    assert shown["NCCL_NVLS_ENABLE"] is None
    assert (shown["NCCL_IB_DISABLE"], shown["NCCL_HOSTID"]) == ("0", "JOB-N")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("NCCL_NVSL_ENABLE = false", "expected a variable that liveshift gives a default, one of"),
        ('RANK = "1"', "one of GLOO_SOCKET_IFNAME, "),
        ("NCCL_NVLS_ENABLE = 0", 'found 0, expected a string such as "1", or false'),
        ("NCCL_NVLS_ENABLE = true", 'found true, expected a string such as "1", or false'),
    ],
)
def test_a_mistake_in_the_defaults_is_named(line: str, words: str) -> None:
    (mistake,) = mistakes(SMALL + f"[env.defaults]\n{line}\n")
    assert words in mistake


def test_values_in_the_way_of_moving_are_said_once_each() -> None:
    assert not list(remarks({"NCCL_RAS_ENABLE": "0", "NCCL_DEBUG": "INFO", "PATH": "/bin"}))
    assert not list(remarks({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1200"}))
    said = list(
        remarks(
            {
                "NCCL_RAS_ENABLE": "1",
                "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60",
                "GLOO_SOCKET_IFNAME": "bond0",
                "NCCL_HOSTID": "mine",
            }
        )
    )
    assert len(said) == 4
    assert "GLOO_SOCKET_IFNAME=bond0 of your environment is not used: a capsule has" in said[0]
    assert "NCCL_HOSTID=mine of your environment is kept, and in the way of moving" in said[1]
    assert "NCCL_RAS_ENABLE=1 of your environment is kept" in said[2]


def test_a_callers_own_rank_reaches_a_single_capsule_and_is_named() -> None:
    """Whoever exports RANK may mean it; who does not is told."""
    alone = CapsuleIdentity("gpt", 0, 1, "10.99.0.1", "10.99.0.1", ranks=False)
    caller = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}
    env = environment(alone, Env(), caller, Path("/opt/ours.so"), "/pages")
    assert {name: env[name] for name in caller} == caller
    assert not env.keys() & {"LOCAL_RANK", "MASTER_PORT", "PET_NNODES"}, "none of ours"
    (said,) = remarks(caller, ranks=False)
    assert said.startswith("RANK=3 and WORLD_SIZE=8 of your environment are passed on: the")
    assert not list(remarks({"MASTER_ADDR": "localhost"}, ranks=False))
    assert not list(remarks(caller)), "a job of several capsules has its own"
    assert made(None, **caller)["RANK"] == "1"


def test_the_reference_has_the_table() -> None:
    text = REFERENCE.read_text()
    for variable in MOVABLE:
        value = variable.value.format(host_name="JOB-N")
        over = "" if variable.callers else ", also over the caller's own"
        assert f"| `{variable.name}` | `{value}`{over} | {variable.reason} |" in text
