# SPDX-License-Identifier: Apache-2.0
"""What the loss of a host costs a job, with liveshift and with two other ways to survive it.

story     all of it in order                cases     ways, sizes, when which host dies
ours      snapshots and rewinds             elastic   torchrun and checkpoints; the untouched run
replicas  torchft                           hosts     lab hosts without liveshift
kills     what is lost, the same for all    history   what the ranks' records tell
failures  when what fails in a longer job   alarms    hosts that are only silent
goals     what is wanted of the figures     record    build/bench-failure.json
page      the same with bars
"""
