# SPDX-License-Identifier: Apache-2.0
"""What ``liveshift doctor`` looks at, one file per part of the host; each check really tries."""
