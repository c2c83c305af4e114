# SPDX-License-Identifier: Apache-2.0
"""GPUs of one host: what capsules hold, and how device state goes and comes."""
