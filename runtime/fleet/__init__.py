# SPDX-License-Identifier: Apache-2.0
"""The orchestrator keeps here what it knows of hosts and jobs. It sends requests to hosts, checks
the rights of people, and ends jobs."""
