# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator knows of hosts and jobs, what it asks of hosts, and whom it lets do what.
How jobs end is here too, since whatever happens to a job may end it."""
