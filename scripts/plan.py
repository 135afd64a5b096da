#!/usr/bin/env python3
"""Makes a placement plan: `oallama plan` as a script (the generator script of the paper's operator placer).

Example: scripts/plan.py model.gguf --vram 8GiB --ctx 16384 -o plan.json
"""

from __future__ import annotations

import sys

from oallama.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:]])
