# SPDX-License-Identifier: Apache-2.0
"""The checks of ``liveshift doctor``, one file per part of the host. Each check tries its part."""
