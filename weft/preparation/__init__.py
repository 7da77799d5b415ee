"""Prepare a run: environment, plan, checks of files and data, run directory.

Read `prepare_job` in `weft.preparation.job_checks` first.
"""
