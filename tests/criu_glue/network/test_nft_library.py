# SPDX-License-Identifier: Apache-2.0
"""The fence's rules by the library, in a process of its own in a network namespace of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.root

SETS = "add table inet t; add set inet t s { type ether_addr; }"


def run(program: str) -> str:
    imports = "from liveshift.criu_glue.network import iproute, nft_library\n"
    program = imports + textwrap.dedent(program)
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_library_does_nft_sees_and_the_other_way_round() -> None:
    said = run(f"""
        import subprocess
        nft_library.hold_open()
        assert nft_library.run("list tables") == (True, "")
        iproute.nft("{SETS}")
        iproute.nft("add element inet t s {{ 02:00:00:00:00:01, 02:00:00:00:00:02 }}")
        subprocess.run(["nft", "delete element inet t s {{ 02:00:00:00:00:01 }}"], check=True)
        print(iproute.nft_elements("set", "inet", "t", "s"), flush=True)
        iproute.nft("delete element inet t s {{ 02:00:00:00:00:02 }}")
        subprocess.run(["nft", "list", "ruleset"], check=True)
        print(iproute.nft_elements("set", "inet", "t", "none"))
    """)
    assert said.startswith("['02:00:00:00:00:02']\ntable inet t {\n\tset s {\n")
    assert "elements" not in said
    assert said.endswith("None\n")


def test_rules_are_in_force_all_or_none_and_a_refusal_is_in_words() -> None:
    said = run(f"""
        from liveshift.errors import LiveshiftError
        nft_library.hold_open()
        iproute.nft("{SETS}")
        try:
            iproute.nft("add chain inet t c\\ndelete element inet t s {{ 02:00:00:00:00:01 }}")
        except LiveshiftError as error:
            print(error)
        print(nft_library.run("list chains"))
    """)
    assert "network: nftables refused: " in said
    assert "No such file or directory" in said
    assert "chain c" not in said.splitlines()[-1]


def test_a_thread_elsewhere_and_a_host_without_the_library_use_nft() -> None:
    said = run(f"""
        import ctypes
        nft_library.NAME = "libnone.so.9"
        nft_library.hold_open()
        assert nft_library.run("list tables") is None
        iproute.nft("{SETS}")
        assert iproute.nft_elements("set", "inet", "t", "s") == []
        nft_library.NAME = "libnftables.so.1"
        nft_library.hold_open()
        assert nft_library.run("list tables") is not None
        assert ctypes.CDLL(None).unshare(0x40000000) == 0
        assert nft_library.run("list tables") is None
        assert iproute.nft_elements("set", "inet", "t", "s") is None
        print("well")
    """)
    assert said == "well\n"


def test_many_jobs_and_many_threads_take_little_memory() -> None:
    """Each thread once kept what a look at the whole ruleset takes: 160 MB with 40 jobs."""
    said = run("""
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from threading import Barrier

        from liveshift.criu_glue.network import fence
        from liveshift.criu_glue.network.overlay import Overlay

        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

        def job(vni):
            subnet, hosts = f"10.99.{vni}", ["10.88.0.10", "10.88.0.11"]
            overlay = Overlay(vni, f"{subnet}.0/24")
            orchestrator, agents = ("10.88.0.2", 7400), [(host, 7401) for host in hosts]
            around = fence.Surroundings(hosts, "10.99.0.0/16", [orchestrator], agents)
            iproute.nft(fence.laying(overlay, hosts[0], around))
            fence.accept(overlay, {f"{subnet}.1": None, f"{subnet}.2": hosts[1]})
            return fence.stands(overlay)

        nft_library.hold_open()
        with ThreadPoolExecutor(32) as threads:
            all_there = Barrier(32)
            list(threads.map(lambda _: all_there.wait(), range(32)))
            before = resident()
            print(sum(threads.map(job, range(1, 41))))
            print(resident() - before)
    """)
    stand, grown = map(float, said.split())
    assert stand == 40
    assert grown < 50, "megabytes"
