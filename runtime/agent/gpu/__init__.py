# SPDX-License-Identifier: Apache-2.0
"""The GPUs of one host: what capsules use of them, and how device state leaves and arrives."""
