"""Everything that can be known before a run starts.

``weft.plan(...)`` calls `weft.api.plan`.
"""

from weft import make_callable

make_callable(__name__)
