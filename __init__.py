# SPDX-License-Identifier: Apache-2.0
"""liveshift moves ranks of a running, unmodified PyTorch job to another host while it trains."""

__version__ = "0.2.0"
