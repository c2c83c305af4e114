# SPDX-License-Identifier: Apache-2.0
"""How one orchestrator bears many hosts: the real daemon, and agents that are doubles.

cluster     a cluster file and its keys        daemon    the orchestrator's process, and its costs
agent       one simulated agent                crowd     processes full of them
scenario    what is done and measured          figures   what came out     tables    for a person
"""
