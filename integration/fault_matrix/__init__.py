# SPDX-License-Identifier: Apache-2.0
"""The fault matrix: every phase boundary of a migration, and of a snapshot, a rewind and a
suspension × everything that may die there. Three tables, one harness.

table           moves: which pairs there are, and what each must come to
forced_ways     some of them where memory goes in a way that is forced, or against a deadline
cell            one pair of both, from a healthy job to a verdict
scene           the lab of three hosts on which moves are harmed
snapshot_table  the same of snapshots, rewinds, suspensions, and jobs that rest suspended
snapshot_cell   one pair of it
snapshot_scene  the lab of four hosts on which they are harmed
snapshot_harms  harm that only they meet
faults          how harm is done, and healed, in both
held            daemons held at a named point, by the files of runtime/daemon/faultpoints.py
stage           what both scenes are: a lab and a training job, made anew where needed
watcher         what really runs where in a move, sampled from this machine's /proc
successors      the same where earlier copies may outlive a rewind
verdict         what became of a cell
tables          all tables, as the program plays and shows them
report          the tables on a terminal, build/fault-matrix.json
"""
