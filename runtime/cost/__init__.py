# SPDX-License-Identifier: Apache-2.0
"""What a move costs the job: the model, predictions, and what was lost."""
