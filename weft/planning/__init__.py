"""Derive the Plan of a run from Job and machine, or return every error.

Read `weft.planning.resolve` first.  A plan is a pure function of its arguments.
"""
