"""``python -m weft``, the same as ``weft``; for ``torchrun -m weft train ...``."""

import sys

from weft.cli.main import main

sys.exit(main())
