# SPDX-License-Identifier: Apache-2.0
"""What a move costs a job, against three other ways to get to the same place.

story    all of it in order                  cases    what is measured: jobs, sizes, links
moves    liveshift's own                     steps    what a job's step log tells
by_hand  CRIU and a copy over TCP            restart  checkpoints, a kill, a new start
limit    what no move can be faster than     streams  a bare copy over several TCP streams
machine  programs, sandboxes on lab hosts    goals    what is wanted of the figures
record   build/bench-move.json           page     the same with bars
"""
