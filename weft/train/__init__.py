"""The training loop and what it is made of.

``weft.train(...)`` calls `weft.api.train`.
"""

from weft import make_callable

make_callable(__name__)
