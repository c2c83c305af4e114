# SPDX-License-Identifier: Apache-2.0
"""The orchestrator decides about jobs, migrations, spares and evacuations, and keeps a journal."""
