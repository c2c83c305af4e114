# SPDX-License-Identifier: Apache-2.0
"""What a person touches: the command line, ``run``, the lab, the reports. Nobody imports this.

One file per verb; ``cli`` puts them together and is the only place where errors become exit
codes. A verb imports what it needs when it runs, so that ``liveshift status`` starts quickly.
"""
