"""Pages and texts about runs, comparisons and plans.

Read `weft.reporting.run_report` first; `weft.reporting.page` renders its templates.
"""
