"""Version and directory of the package, for modules of every directory.

`weft` itself is the Python interface: it imports `weft.api`, which is above them all.
"""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE_DIR = Path(__file__).parent
