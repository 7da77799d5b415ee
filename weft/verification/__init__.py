"""Compare the gradients of a layout with those of one process.

Read `weft.verification.verify` first.
"""
