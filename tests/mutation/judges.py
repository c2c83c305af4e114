# SPDX-License-Identifier: Apache-2.0
"""The files on which the protocol stands, and the fast tests that judge each, quickest first."""

from __future__ import annotations

JUDGES: dict[str, tuple[str, ...]] = {
    "runtime/model/ownership.py": (
        "runtime/model/test_ownership.py",
        "runtime/model/test_ownership_model.py",
        "runtime/model/test_rewind_model.py",
        "runtime/model/test_neighbours_model.py",
    ),
    "runtime/journal/journal.py": (
        "runtime/journal/test_journal.py",
        "runtime/orchestrator/test_journal_problems.py",
    ),
    "runtime/journal/snapshot_tables.py": ("runtime/journal/test_snapshot_tables.py",),
    "runtime/journal/journal_file.py": (
        "runtime/journal/test_journal_file.py",
        "runtime/journal/test_journal.py",
        "runtime/orchestrator/test_journal_problems.py",
    ),
    "runtime/quiesce/gates.py": (
        "runtime/quiesce/test_gates.py",
        "runtime/quiesce/test_gates_opened.py",
    ),
    "runtime/wire/announced.py": (
        "runtime/wire/test_announced.py",
        "runtime/wire/test_wire_admission.py",
        "runtime/wire/test_wire_wants.py",
        "runtime/wire/test_page_port.py",
        "runtime/wire/test_wire.py",
    ),
    "criu_glue/network/network_lock.py": (
        "criu_glue/network/test_network_lock.py",
        "criu_glue/network/test_network.py::test_a_locked_capsule_is_silent_but_for_itself_and_its_connections_outlast_it",
        "criu_glue/network/test_network.py::test_a_namespace_that_was_never_locked_is_open_and_one_that_has_gone_is_told_of",
        "criu_glue/network/test_ingress_lock.py",
    ),
    **{
        f"runtime/agent/departure/{name}.py": (
            "runtime/agent/departure/test_outgoing_edges.py",
            "runtime/agent/departure/test_outgoing_order.py",
            "runtime/agent/departure/test_outgoing_ends.py",
            "runtime/agent/departure/test_outgoing_parts.py",
        )
        for name in (
            "outgoing_migration",
            "wire_dump",
            "outgoing_files",
            "frozen_capsule",
            "freeze_obstacles",
        )
    },
    "runtime/agent/departure/outgoing_note.py": (
        "runtime/agent/departure/test_outgoing_edges.py",
        "runtime/agent/departure/test_outgoing_ends.py",
        "runtime/agent/test_rulings.py",
    ),
    "runtime/agent/departure/outgoing_memory.py": (
        "runtime/agent/departure/test_choose_phase.py",
        "runtime/agent/departure/test_outgoing_edges.py",
        "runtime/agent/departure/test_outgoing_ends.py",
        "runtime/agent/departure/test_snapshot_memory.py",
    ),
    **{
        f"runtime/agent/arrival/{name}.py": (
            "runtime/agent/arrival/test_incoming_edges.py",
            "runtime/agent/arrival/test_incoming_ends.py",
            "runtime/agent/arrival/test_incoming_early.py",
            "runtime/agent/arrival/test_incoming_taken_up.py",
        )
        for name in (
            "incoming_migration",
            "incoming_note",
            "forwarding",
            "restored_capsule",
            "restore_attempt",
            "memory_ahead",
        )
    },
    "runtime/agent/rulings.py": (
        "runtime/agent/test_rulings.py",
        "runtime/agent/test_stale_incoming.py",
    ),
    **dict.fromkeys(
        (
            "runtime/fleet/address_book.py",
            "runtime/fleet/agents.py",
            "runtime/fleet/claims.py",
            "runtime/moves/context.py",
            "runtime/migration/migration_records.py",
            "runtime/moves/migration_service.py",
            "runtime/moves/planning.py",
        ),
        (
            "runtime/fleet/test_claim_rulings.py",
            "runtime/moves/test_migration_context.py",
            "runtime/moves/test_migration_parts.py",
            "runtime/moves/test_migrations_begun.py",
            "runtime/orchestrator/test_journal_problems.py",
            "runtime/fleet/test_address_books.py",
            "runtime/protection/rewinds/test_rewinds_beside_moves.py",
        ),
    ),
    "interposer/gate/gate.c": (
        "interposer/test_c_suite.py::test_program[plain-gate_rules]",
        "interposer/test_c_suite.py::test_program[plain-gate_waits]",
        "interposer/test_c_suite.py::test_program[plain-pending_owner]",
        "interposer/test_c_suite.py::test_program[plain-order_changes]",
        "interposer/test_c_suite.py::test_program[plain-gate_contention]",
        "interposer/test_c_suite.py::test_program[plain-new_thread]",
        # The others there break the gate by a passage's exact words, which a change may have taken.
        "interposer/gate/test_gate_simulation.py::test_programs_are_stopped_at_the_least_cut_and_end",
    ),
}

WORDS = "what people read, in all its forms, is not the protocol"
PACE = "how long it waits, or how often it tries; not what it does"
EQUAL = "asyncio.gather gives as many as it got"
ONE_ROW = "a job has one row there, it is the key"
UNCHANGED = "no code tries to change one"
TIDY = "what is kept only until it is overwritten or its task ends"

UNREAD_YET = "no code reads the text before an attempt fails, and the failing attempt sets it"

FAULT = "a point at which the fault matrix stops a daemon; nothing happens there otherwise"
ANY_SIZE = "more than any answer has"
AS_FALSE = "who asks looks only whether it is true"
UNREAD = "the kernel does not look at it: the family of a batch's frame, version, sequence, port"

HEAD = 'return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body'
SHOWN = 'shown = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")'
RANKS = "ranks = [m.world_rank if m.world_rank >= 0 else m.rank for m in members]"

TWICE = "2 * timeouts.suspicion"
UNTIL = f"until = time.monotonic() + {TWICE}"
SAME_NUMBER = "where the two are equal, both ways give the same number"
TRIES = "for (int tries = 0; tries < 1000; tries++) {"
USED = "return used < LIVESHIFT_PAGE_CLOCKS ? used : LIVESHIFT_PAGE_CLOCKS;"
PASSED = "return announced > gate->waiting[row] ? announced - gate->waiting[row] : 0;"
ELAPSED = "return ms > most ? most : ms < 0 ? 0 : (uint32_t)ms;"
LIMITS = "UNLOCKED_S, UNLOCKED_FROZEN_S = 3.0, 0.2"
DIGITS = "if not number.isdecimal() or len(number) >= 18: # SQLite's integers have 64 bits"
INTERRUPTED = 'lap.detail = "interrupted" if interrupted else "none was under way"'
FUTEX = "syscall(SYS_futex, &page->order.check, FUTEX_WAIT, check, &look, NULL, 0);"

EXPLAINED: dict[tuple[str, str, str], str] = {
    ("runtime/quiesce/gates.py", "BACK_OFF_S = 0.5", "BACK_OFF_S = 1.5"): PACE,
    ("runtime/quiesce/gates.py", "LOOK_S = 1.0", "LOOK_S = 2.0"): PACE,
    ("runtime/quiesce/gates.py", "await asyncio.sleep(BACK_OFF_S)", "pass"): PACE,
    (
        "runtime/quiesce/gates.py",
        "while time.monotonic() < until and host in hosts_of(job):",
        "while ((time.monotonic() < until) or (host in hosts_of(job))):",
    ): "the agent opens by itself by then; asked longer it says the same",
    (
        "runtime/quiesce/gates.py",
        "while time.monotonic() < until and host in hosts_of(job):",
        "while (time.monotonic() <= until) and host in hosts_of(job):",
    ): PACE,
    (
        "runtime/quiesce/gates.py",
        "raise AssertionError",
        "pass",
    ): "never reached: the last attempt raises",
    (
        "runtime/quiesce/gates.py",
        "self._attempt += 1",
        "self._attempt += 2",
    ): "any number that was not used is as good",
    (
        "runtime/quiesce/gates.py",
        "if before is not None and before is not asyncio.current_task():",
        "if before is not None and (before is asyncio.current_task()):",
    ): "two tasks that ask the same host to open do no harm",
    ("runtime/quiesce/gates.py", "before.cancel()", "pass"): "the same",
    (
        "runtime/quiesce/gates.py",
        "task.add_done_callback( lambda done: self._late.pop(key, None)"
        " if self._late.get(key) is done else None )",
        "pass",
    ): TIDY,
    (
        "runtime/quiesce/gates.py",
        "lambda done: self._late.pop(key, None) if self._late.get(key) is done else None",
        "lambda done: self._late.pop(key, None) if (self._late.get(key) is not done) else None",
    ): TIDY,
    (
        "runtime/quiesce/gates.py",
        "task.cancel()",
        "pass",
    ): "the asking ends by its own deadline; its answer is lost",
    (
        "runtime/quiesce/gates.py",
        "clock.add_report(host, ClockReport(0, answer.numbers, False, answer.pairs))",
        "clock.add_report(host, ClockReport(0, answer.numbers, True, answer.pairs))",
    ): "no aim has version 0, so the clock takes no host for arrived by it",
    (
        "runtime/quiesce/gates.py",
        "still = still and answer.reached",
        "still = ((still) or (answer.reached))",
    ): "the clock gets the same and reports it too; kept, as the rule is read here",
    (
        "runtime/quiesce/gates.py",
        "ranked = sorted(ids, key=lambda c: (order.get(c, 0), c))",
        "ranked = sorted(ids, key=lambda c: (order.get(c, 1), c))",
    ): "every id has an ordinal: both come with the same answer",
    (
        "runtime/quiesce/gates.py",
        "return list(zip(self._hosts, answers, strict=True))",
        "return list(zip(self._hosts, answers, strict=False))",
    ): EQUAL,
    (
        "runtime/quiesce/gates.py",
        "return dict(zip(hosts, await asyncio.gather(*asked), strict=True))",
        "return dict(zip(hosts, await asyncio.gather(*asked), strict=False))",
    ): EQUAL,
    **{
        ("runtime/quiesce/gates.py", SHOWN, SHOWN.replace(*change)): WORDS
        for change in (("[:4]", "[:5]"), ("len(lines) > 4", "(len(lines) >= 4)"), ("> 4", "> 5"))
    },
    (
        "runtime/quiesce/gates.py",
        "used = {c: n for c in by_id if (n := clock.targets.get(c, 0))}",
        "used = {c: n for c in by_id if (n := clock.targets.get(c, 1))}",
    ): WORDS,
    **{
        ("runtime/quiesce/gates.py", RANKS, RANKS.replace(*change)): WORDS
        for change in (("m.world_rank >= 0", "(m.world_rank > 0)"), (">= 0", ">= 1"))
    },
    (
        "runtime/quiesce/gates.py",
        "for communicator in [c for c in ids if members[c] < sizes.get(c, 0)]:",
        "for communicator in [c for c in ids if members[c] < sizes.get(c, 1)]:",
    ): "every id comes with its size",
    (
        "interposer/gate/gate.c",
        "for (int tries = 0; tries < 1000; tries++) {",
        "for (int tries = 1; tries < 1000; tries++) {",
    ): PACE,
    **{
        ("interposer/gate/gate.c", TRIES, TRIES.replace(*change)): PACE
        for change in (("< 1000", "<= 1000"), ("< 1000", "< 1001"))
    },
    ("interposer/gate/gate.c", "sched_yield();", ";"): PACE,
    ("interposer/gate/gate.c", USED, USED.replace("used <", "used <=")): SAME_NUMBER,
    (
        "interposer/gate/gate.c",
        PASSED,
        PASSED.replace("announced >", "announced >="),
    ): SAME_NUMBER,
    **{
        ("interposer/gate/gate.c", ELAPSED, ELAPSED.replace(*change)): SAME_NUMBER
        for change in (("ms >", "ms >="), ("ms < 0", "ms <= 0"), ("ms < 0", "ms < 1"))
    },
    **{
        ("interposer/gate/gate.c", "used = true;", change): "whoever used it is not this thread,"
        " which is then not alone either: that alone makes the operation another thread's"
        for change in ("used = false;", ";")
    },
    (
        "interposer/gate/gate.c",
        "pthread_mutex_init(&gate->lock, NULL);",
        ";",
    ): "a mutex of zeros is one that is ready; kept, as POSIX does not say so",
    (
        "interposer/gate/gate.c",
        FUTEX,
        FUTEX.replace("NULL, 0", "NULL, 1"),
    ): "the kernel does not look at it: FUTEX_WAIT has no such argument",
    **{
        ("runtime/agent/departure/outgoing_migration.py", f'reach("source.{point}")', "pass"): FAULT
        for point in ("promised", "locked", "finishing", "devices_saved")
    },
    ("runtime/agent/departure/wire_dump.py", "reach(point)", "pass"): FAULT,
    **{
        (
            "runtime/journal/journal.py",
            DIGITS,
            DIGITS.replace("len(number) >= 18", change),
        ): "a number of 18 digits fits as well, and no migration has it"
        for change in ("len(number) >= 19", "(len(number) > 18)")
    },
    (
        "runtime/moves/planning.py",
        "for link, to in zip(links, (destination, source), strict=True)",
        "for link, to in zip(links, (destination, source), strict=False)",
    ): "there are two of each",
    (
        "runtime/agent/departure/wire_dump.py",
        'lap.detail = "the rest of the image, on its way"',
        "pass",
    ): WORDS,
    (
        "runtime/agent/departure/wire_dump.py",
        "if left <= 0:",
        "if (left < 0):",
    ): "equal to the nanosecond",
    **{
        ("runtime/agent/departure/outgoing_memory.py", INTERRUPTED, change): WORDS
        for change in ("pass", INTERRUPTED.replace("interrupted", "not (interrupted)", 1))
    },
    **{
        (f"runtime/agent/{file}", line, line.replace("True", "False")): UNCHANGED
        for file, line in (
            ("departure/outgoing_note.py", "class OutgoingNote(msgspec.Struct, frozen=True):"),
            ("arrival/incoming_note.py", "class IncomingNote(msgspec.Struct, frozen=True):"),
        )
    },
    **{
        ("runtime/agent/departure/freeze_obstacles.py", LIMITS, LIMITS.replace(*change)): PACE
        for change in (("3", "4"), ("0.2", "1.2"))
    },
    (
        "runtime/agent/departure/freeze_obstacles.py",
        "time.sleep(UNLOCKED_POLL_S)",
        "pass",
    ): PACE,
    ("runtime/agent/departure/freeze_obstacles.py", "return []", "return None"): AS_FALSE,
    (
        "runtime/agent/departure/freeze_obstacles.py",
        "if time.monotonic() > until:",
        "if (time.monotonic() >= until):",
    ): "equal to the nanosecond",
    **{
        (
            "runtime/agent/arrival/incoming_migration.py",
            f'reach("destination.{point}")',
            "pass",
        ): FAULT
        for point in ("restoring", "devices_back", "granted")
    },
    ("runtime/agent/arrival/incoming_migration.py", "return False", "return None"): AS_FALSE,
    (
        "runtime/agent/arrival/incoming_migration.py",
        'self._failed = "" # why that attempt failed',
        "pass # why that attempt failed",
    ): UNREAD_YET,
    (
        "runtime/agent/arrival/restore_attempt.py",
        'await reached("destination.claiming")',
        "pass",
    ): FAULT,
    ("runtime/agent/arrival/restore_attempt.py", "RETRY_S = 0.05", "RETRY_S = 1.05"): PACE,
    **{
        ("runtime/agent/arrival/restore_attempt.py", f"await asyncio.sleep({pause})", "pass"): PACE
        for pause in ("RETRY_S", "table.cluster.timeouts.heartbeat")
    },
    (
        "criu_glue/network/network_lock.py",
        "elif table.flags & _DORMANT:",
        "elif (table.flags | _DORMANT):",
    ): "to wake what is awake changes nothing",
    ("criu_glue/network/network_lock.py", "_ANSWER_S = 10.0", "_ANSWER_S = 11.0"): PACE,
    (
        "criu_glue/network/network_lock.py",
        "while at + 4 <= end:",
        "while (at + 4 < end):",
    ): "an attribute of four bytes has no value, and the flags have one",
    ("criu_glue/network/network_lock.py", "self._line.settimeout(_ANSWER_S)", "pass"): PACE,
    (
        "criu_glue/network/network_lock.py",
        "_REQUEST, _ACK = 1, 4 # NLM_F_REQUEST, NLM_F_ACK",
        "_REQUEST, _ACK = 1, 5 # NLM_F_REQUEST, NLM_F_ACK",
    ): "the other bit is set anyway: every message is a request",
    (
        "criu_glue/network/network_lock.py",
        "while at + 4 <= end:",
        "while at + 5 <= end:",
    ): "an attribute of four bytes has no value, and the flags have one",
    (
        "criu_glue/network/network_lock.py",
        "reply = self._line.recv(65536)",
        "reply = self._line.recv(65537)",
    ): ANY_SIZE,
    (
        "criu_glue/network/network_lock.py",
        "if code := _error(self._line.recv(65536)):",
        "if code := _error(self._line.recv(65537)):",
    ): ANY_SIZE,
    (
        "criu_glue/network/network_lock.py",
        "family = 0 if resource else _INET",
        "family = 1 if resource else _INET",
    ): UNREAD,
    (
        "criu_glue/network/network_lock.py",
        'body = struct.pack("=BB", family, 0) + struct.pack(">H", resource) + attributes',
        'body = struct.pack("=BB", family, 1) + struct.pack(">H", resource) + attributes',
    ): UNREAD,
    **{
        ("criu_glue/network/network_lock.py", HEAD, HEAD.replace("1, 0", change)): UNREAD
        for change in ("2, 0", "1, 1")
    },
    (
        "runtime/model/ownership.py",
        "REWIND_EPOCHS = 2",
        "REWIND_EPOCHS = 3",
    ): "any number above 1 will do",
    (
        "runtime/model/ownership.py",
        "copy_rewinds: int = 0,",
        "copy_rewinds: int = 1,",
    ): "whoever names one of the two counts names both",
    (
        "runtime/journal/journal.py",
        "MOVES_OF_A_HOST = 1000",
        "MOVES_OF_A_HOST = 1001",
    ): "a bound on the effort",
    **{
        ("runtime/journal/journal.py", line, changed): "a bound on the effort"
        for line, changed in (
            ("MOST_EVENTS = 10_000", "MOST_EVENTS = 10001"),
            ("MOST_BYTES = 32_000_000", "MOST_BYTES = 32000001"),
            ("MOST_LOOKED = 100_000", "MOST_LOOKED = 100001"),
        )
    },
    (
        "runtime/journal/journal.py",
        'query = "SELECT COALESCE(MAX(epoch), 0) FROM last_epochs WHERE job = ?"',
        'query = "SELECT COALESCE(MIN(epoch), 0) FROM last_epochs WHERE job = ?"',
    ): ONE_ROW,
    (
        "runtime/journal/journal_file.py",
        "MARK = 0x6C73626B",
        "MARK = 1819501164",
    ): "any number will do",
    (
        "runtime/journal/journal_file.py",
        'self._db.execute("PRAGMA synchronous=FULL")',
        "pass",
    ): "SQLite's own default; said, as it may be built with another",
    (
        "runtime/wire/announced.py",
        "if not isinstance(error, LiveshiftError):",
        "if (isinstance(error, LiveshiftError)):",
    ): WORDS,
    **{
        ("runtime/wire/announced.py", line, line.replace("1 +", "2 +")): "one more than there are"
        for line in (
            "self.expected = [0] * (1 + LANES) # number of the next chunk, by lane",
            "self._answers = [_first_answer()] * (1 + LANES)",
        )
    },
    **{
        (f"runtime/{file}", line, line.replace(*change)): PACE
        for file, line, change in (
            ("fleet/agents.py", "LIVENESS_CHECK_S = 0.5", ("0.5", "1.5")),
            ("fleet/address_book.py", "HOSTS_AT_ONCE, BOOKS_AT_ONCE = 50, 4", ("50", "51")),
            ("fleet/address_book.py", "HOSTS_AT_ONCE, BOOKS_AT_ONCE = 50, 4", ("4", "5")),
            ("migration/migration_records.py", "SOON_S = 0.004", ("0.004", "1.004")),
            ("migration/migration_records.py", "SAVE_AGAIN_S = 1.0", ("1.0", "2.0")),
            ("moves/migration_service.py", UNTIL, (TWICE, TWICE.replace("2", "3"))),
            ("moves/migration_service.py", UNTIL, (TWICE, f"({TWICE.replace('*', '+')})")),
            (
                "moves/migration_service.py",
                "await asyncio.sleep(timeouts.heartbeat / 10)",
                ("10", "11"),
            ),
        )
    },
    (
        "runtime/moves/migration_service.py",
        "KEPT_MIGRATIONS = 200",
        "KEPT_MIGRATIONS = 201",
    ): "a bound on what is kept",
    ("runtime/moves/planning.py", "LESSONS = 50", "LESSONS = 51"): "a bound on the effort",
    (
        "runtime/fleet/address_book.py",
        "for host, result in zip(hosts, done, strict=True):",
        "for host, result in zip(hosts, done, strict=False):",
    ): EQUAL,
    (
        "runtime/moves/migration_service.py",
        "if time.monotonic() > until:",
        "if (time.monotonic() >= until):",
    ): "equal to the nanosecond",
}
"""Changes unnoticed, and why no test can or need see them: (file, its lines as they are, its
lines as they become)."""
