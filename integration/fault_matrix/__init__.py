# SPDX-License-Identifier: Apache-2.0
"""The fault matrix: every phase boundary of a migration × everything that may die there.

table    which pairs there are, and what each must come to
faults   how harm is done, and healed
held     daemons held at a named point of a migration, by the files of runtime/daemon/faultpoints.py
scene    the lab and the training job on it, made anew where needed
watcher  what really runs where, sampled from this machine's /proc throughout a cell
cell     one pair, from a healthy job to a verdict
report   the table on a terminal, build/fault-matrix.json
"""
