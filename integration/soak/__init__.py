# SPDX-License-Identifier: Apache-2.0
"""A training job whose ranks are moved round three hosts without pause, for as long as asked.

story      what is done          rounds    the moves          compare   bit for bit, step by step
lossy      the same, while hosts lose their power             losses    those hosts
watch      samples of daemons and hosts, while that goes on   growth    what they say
report     for a person, and build/soak.json
"""
