"""The training loop and the parts of a run.

Read `weft.training.loop` first, then `weft.training.step`.
"""
