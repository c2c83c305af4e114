# SPDX-License-Identifier: Apache-2.0
"""``python -m liveshift.launcher``: the same as the ``liveshift`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
