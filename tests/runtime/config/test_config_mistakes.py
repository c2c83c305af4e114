# SPDX-License-Identifier: Apache-2.0
"""Where a cluster file is wrong: every mistake, with its line, what was found and expected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cluster_files import SMALL, mistakes

from liveshift.errors import ConfigError
from liveshift.runtime.config.cluster import HostSettings, load, parse
from liveshift.runtime.config.errors import WrongCluster

WRONG = [  # what to replace in SMALL, by what, and the answer
    (
        'address = "10.88.0.11"',
        'address = "10.88.0.11"\nslots = "two"',
        '11: hosts.h1.slots: found "two", expected a whole number from 1 to 64',
    ),
    (
        'address = "10.88.0.11"',
        'address = "10.88.0.11"\nslots = true',
        "11: hosts.h1.slots: found true, expected a whole number from 1 to 64",
    ),
    (
        'address = "10.88.0.11"',
        'address = "10.88.0.11"\ndata_port = 65536',
        "11: hosts.h1.data_port: found 65536, expected a whole number from 1 to 65535",
    ),
    (
        'address = "10.88.0.11"',
        'address = "10.88.0.11"\nslot = 2',
        "11: hosts.h1.slot: found an unknown key, expected one of address, data_port, pages_port,"
        ' slots, spare, memory, domain (did you mean "slots"?)',
    ),
    (
        'address = "10.88.0.11"',
        'address = "10.88.0.11"\nspare = "maybe"',
        '11: hosts.h1.spare: found "maybe", expected "floating", "dedicated" or "none"',
    ),
    (
        '"10.88.0.11"',
        '"10.88.0.10"',
        '10: hosts.h1.address: found "10.88.0.10", expected an address of its own'
        " (hosts.h0.address, line 7, has the same one)",
    ),
    (
        '"10.88.0.11"',
        '"10.88.0.256"',
        '10: hosts.h1.address: found "10.88.0.256", expected an IPv4 address of this host such as'
        ' "10.88.0.10"',
    ),
    (
        'address = "10.88.0.11"',
        "",
        "9: hosts.h1.address: found nothing, expected an IPv4 address of this host such as"
        ' "10.88.0.10"',
    ),
    (
        "hosts.h1",
        "hosts.Node_1",
        '9: hosts.Node_1: found "Node_1", expected a DNS label of at most 63 characters (a-z, '
        "0-9 and,"
        ' inside, -) other than "orchestrator"',
    ),
    (
        "hosts.h1",
        "hosts.orchestrator",
        '9: hosts.orchestrator: found "orchestrator", expected a DNS label of at most 63 characters'
        ' (a-z, 0-9 and, inside, -) other than "orchestrator"',
    ),
    (
        '[hosts.h1]\naddress = "10.88.0.11"',
        "[host.h1]\n",
        "9: host: found an unknown table, expected one of cluster, hosts, network, files, "
        "env, paths,"
        " gpu, wire, precopy, snapshots, within, jobs, logs, timeouts, access (did you mean"
        ' "hosts"?)',
    ),
    (
        'name = "prod"',
        'name = "prod"\nheartbeat = 2',
        "3: cluster.heartbeat: found an unknown key, expected one of name, orchestrator,"
        ' overlay ("heartbeat" belongs in [timeouts])',
    ),
    (
        '"prod"',
        '"prod"\nnetwork = "overlay"',
        "3: cluster.network: found an unknown key, expected one of name, orchestrator, overlay",
    ),
    (
        '"prod"',
        '"Prod"',
        '2: cluster.name: found "Prod", expected 1 to 20 of the characters a-z, 0-9 and -',
    ),
    (
        '"10.88.0.2:7400"',
        '"10.88.0.2"',
        '3: cluster.orchestrator: found "10.88.0.2", expected an IPv4 address and a port such as'
        ' "10.88.0.2:7400"',
    ),
    (
        '"10.88.0.2:7400"',
        '"10.88.0.2:70000"',
        '3: cluster.orchestrator: found "10.88.0.2:70000", expected an IPv4 address and a '
        "port such as"
        ' "10.88.0.2:7400" (port 1 to 65535)',
    ),
    (
        '"10.99.0.0/16"',
        '"10.99.0.1/16"',
        '4: cluster.overlay: found "10.99.0.1/16", expected the network\'s own address:'
        ' "10.99.0.0/16"',
    ),
    (
        '"10.99.0.0/16"',
        '"10.99.0.0/25"',
        '4: cluster.overlay: found "10.99.0.0/25", expected an IPv4 network of /8 to /24 such as'
        ' "10.99.0.0/16"',
    ),
    (
        '"10.99.0.0/16"',
        '"10.88.0.0/24"',
        '4: cluster.overlay: found "10.88.0.0/24", expected a network without any machine\'s own'
        " address (10.88.0.10 is hosts.h0.address, line 7; 10.88.0.11 is hosts.h1.address, line 10;"
        " 10.88.0.2 is cluster.orchestrator, line 3)",
    ),
    (
        '"10.99.0.0/16"',
        '"10.99.0.0/16"\n[network]\noutside = "world"',
        '6: network.outside: found "world", expected "host" or "relay"',
    ),
    (
        '"10.99.0.0/16"',
        '"10.99.0.0/16"\n[network]\noutside = "relay"\nrelay = "h9"',
        '7: network.relay: found "h9", expected one of the hosts: h0, h1',
    ),
    (
        '"10.99.0.0/16"',
        '"10.99.0.0/16"\n[network]\noutside = "relay"',
        '5: network.relay: found "", expected the name of a host, since none has the '
        "orchestrator's"
        " address",
    ),
    (
        '"10.99.0.0/16"',
        '"10.99.0.0/16"\n[network]\nrelay = "H 9"',
        '6: network.relay: found "H 9", expected the name of a host, or ""',
    ),
    (
        '"10.88.0.2:7400"',
        '"10.88.0.10:7401"',
        "6: hosts.h0.data_port: found 7401, expected a port other than the orchestrator's"
        " (cluster.orchestrator, line 3)",
    ),
    (
        '"10.88.0.2:7400"',
        '"10.88.0.10:7402"',
        "6: hosts.h0.pages_port: found 7402, expected a port other than the orchestrator's"
        " (cluster.orchestrator, line 3)",
    ),
    (
        'address = "10.88.0.11"',
        'address = "10.88.0.11"\ndata_port = 7402',
        "9: hosts.h1.pages_port: found 7402, expected a port of its own (hosts.h1.data_port, "
        "line 11,"
        " has the same one)",
    ),
    (
        "[cluster]",
        "[timeouts]\nheartbeat = 2\n[cluster]",
        "2: timeouts.heartbeat: found 2.0, expected at most 1.66 (or timeouts.collective at least"
        " 720): 3 × heartbeat 2 (timeouts.heartbeat, line 2) = 6 must fit into suspicion 5 "
        "(collective"
        " / 120, from 1 to 10), since a host whose heartbeat is late once or twice is not lost",
    ),
    (
        "[cluster]",
        "[timeouts]\ngrace = nan\n[cluster]",
        "2: timeouts.grace: found nan, expected a number of seconds from 0.01 to 86400",
    ),
    (
        "[cluster]",
        '[files]\nshared = [\n  "/home",\n  "data",\n]\n[cluster]',
        '4: files.shared[1]: found "data", expected an absolute path such as "/var/lib/liveshift"',
    ),
    (
        "[cluster]",
        '[files]\nshared = ["/a/../b"]\n[cluster]',
        '2: files.shared[0]: found "/a/../b", expected an absolute path without ".." (perhaps '
        '"/b")',
    ),
    (
        "[cluster]",
        '[files]\nshared = ["/a"]\ncarried = ["/a/"]\n[cluster]',
        '3: files.carried: found ["/a"], expected no path of files.shared ("/a" stands in both)',
    ),
    (
        "[cluster]",
        '[files]\ncarried = ["/a", "/a"]\n[cluster]',
        '2: files.carried[1]: found "/a", expected every element to be listed once',
    ),
    (
        "[cluster]",
        "[env]\nset = { A = 1 }\n[cluster]",
        '2: env.set.A: found 1, expected a string such as "1"',
    ),
    (
        "[cluster]",
        '[env.set]\n"A B" = "1"\n[cluster]',
        '2: env.set."A B": found "A B", expected the name of a variable (A-Z, a-z, 0-9 and _)',
    ),
    (
        "[cluster]",
        '[paths]\nrun = "run"\n[cluster]',
        '2: paths.run: found "run", expected an absolute path such as "/var/lib/liveshift"',
    ),
    (
        "[cluster]",
        '[gpu]\nlibraries = "lib64"\n[cluster]',
        '2: gpu.libraries: found "lib64", expected an absolute path such as '
        '"/var/lib/liveshift", or'
        ' "" to search for it',
    ),
    (
        "[cluster]",
        "[gpu]\nfast_path = true\n[cluster]",
        '2: gpu.fast_path: found true, expected "auto" or "off"',
    ),
    (
        "[cluster]",
        '[gpu]\nverify = "some"\n[cluster]',
        '2: gpu.verify: found "some", expected "sampled", "full" or "off"',
    ),
    (
        "[cluster]",
        "[wire]\nstreams = 0\n[cluster]",
        "2: wire.streams: found 0, expected a whole number from 1 to 32",
    ),
    (
        "[cluster]",
        '[wire]\nseal = "off"\n[cluster]',
        '2: wire.seal: found "off", expected "on", or beside it trusted = true, which says that no '
        "stranger can read or change what goes between the hosts",
    ),
    (
        "[cluster]",
        "[wire]\ncompress = true\n[cluster]",
        '2: wire.compress: found true, expected "auto", "never" or "always"',
    ),
    (
        "[cluster]",
        "[precopy]\nenabled = 1\n[cluster]",
        "2: precopy.enabled: found 1, expected true or false",
    ),
    (
        "[cluster]",
        "[precopy]\nslow_down = 20\n[cluster]",
        "2: precopy.slow_down: found 20, expected a share from 0.01 to 0.9, such as 0.2 for a "
        "fifth",
    ),
    (
        "[cluster]",
        '[precopy]\nslow_down = "20%"\n[cluster]',
        '2: precopy.slow_down: found "20%", expected a share from 0.01 to 0.9, such as 0.2 for a'
        " fifth",
    ),
    (
        "[cluster]",
        "[precopy]\nslowdown = 0.2\n[cluster]",
        "2: precopy.slowdown: found an unknown key, expected one of enabled, way, slow_down,"
        ' max_pause, rounds (did you mean "slow_down"?)',
    ),
    (
        "[cluster]",
        "[snapshots]\nevery = 0.5\n[cluster]",
        '2: snapshots.every: found 0.5, expected a time of 1 to 86400 seconds such as 90, "90s",'
        ' "5m" or "1h", or "auto" or "off"',
    ),
    (
        "[cluster]",
        '[snapshots]\nevery = "often"\n[cluster]',
        '2: snapshots.every: found "often", expected a time of 1 to 86400 seconds such as 90,'
        ' "90s", "5m" or "1h", or "auto" or "off"',
    ),
    (
        "[cluster]",
        '[snapshots]\nevery = "25h"\n[cluster]',
        '2: snapshots.every: found "25h", expected a time of 1 to 86400 seconds such as 90, "90s",'
        ' "5m" or "1h", or "auto" or "off"',
    ),
    (
        "[cluster]",
        '[snapshots]\nmttf = "42"\n[cluster]',
        '2: snapshots.mttf: found "42", expected a time such as "1000h" or "42d", or a number of'
        " seconds, of 1 minute to 100 years",
    ),
    (
        "[cluster]",
        "[snapshots]\ncost = 0\n[cluster]",
        "2: snapshots.cost: found 0, expected a share from 0.0001 to 0.5, such as 0.005",
    ),
    *(
        (
            "[cluster]",
            f"[snapshots]\non_rewind = {text}\n[cluster]",
            f"2: snapshots.on_rewind: found {found or text}, expected a list of strings such as"
            ' ["/usr/local/bin/notify", "--all"], the first of which is an absolute path, or []'
            " for none",
        )
        for text, found in (
            ('"/bin/true"', ""),
            ('["true"]', ""),
            ('["/bin/true", 7]', ""),
            ("[[]]", ""),
            ('["/bin/true", "a\\u0000b"]', ""),
            ("false", ""),
        )
    ),
    ("[cluster]", "files = 3\n[cluster]", "1: files: found 3, expected a table [files]"),
    (
        '"prod"',
        '"prod"\nname = "twice"',
        '3: found name = "twice", expected correct TOML: Cannot overwrite a value at column 15',
    ),
    ('"prod"', "prod", "2: found name = prod, expected correct TOML: Invalid value at column 8"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_mistake_is_answered_with_line_found_and_expected(old: str, new: str, message: str) -> None:
    assert old in SMALL
    assert mistakes(SMALL.replace(old, new, 1))[0] == f"cluster.toml:{message}"


def test_no_hosts_and_no_cluster() -> None:
    assert mistakes("") == [
        "cluster.toml:1: cluster: found nothing, expected a table [cluster]",
        "cluster.toml:1: hosts: found nothing, expected at least one table [hosts.NAME]",
    ]
    assert mistakes("hosts = []\n" + SMALL.split("\n\n")[0]) == [
        "cluster.toml:1: hosts: found [], expected at least one table [hosts.NAME]"
    ]


def test_only_dedicated_spares_can_start_no_job() -> None:
    text = SMALL.replace("]\naddress", ']\nspare = "dedicated"\naddress')
    (mistake,) = mistakes(text)
    assert mistake.startswith('cluster.toml:7: hosts.h0.spare: found "dedicated", expected one')


def test_all_mistakes_come_at_once_in_the_order_of_lines() -> None:
    text = SMALL.replace('"prod"', '"PROD"').replace("10.88.0.11", "10.88.0.10")
    text += 'slots = 0\ncolour = "red"\n[timeouts]\nheartbeat = 6\nfreeze = "long"\n'
    found = mistakes(text)
    assert [int(line.split(":")[1]) for line in found] == [2, 10, 11, 12, 14, 15]
    with pytest.raises(WrongCluster) as caught:
        parse(text)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("6 mistakes; ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot read .*: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# one\n# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.toml:2: found the byte 0xe9, expected UTF-8"):
        load(tmp_path / "latin.toml")


def test_cluster_made_in_code_is_held_to_the_same_rules() -> None:
    h0 = HostSettings(name="h0", address="10.88.0.10")
    cluster = parse(SMALL).cluster
    with pytest.raises(ConfigError, match=r"^hosts\.h0: found the name twice, expected every host"):
        replace(cluster, hosts=(h0, h0))
    with pytest.raises(ConfigError, match=r"^hosts\.h0\.slots: found 65, expected a whole"):
        replace(cluster, hosts=(replace(h0, slots=65),))
    with pytest.raises(ConfigError, match=r"^hosts: found \{\}, expected at least one table"):
        replace(cluster, hosts=())
