"""Compare variants of a recipe by trials, and the records of two runs.

Read `weft.comparison.experiment` first.
"""
