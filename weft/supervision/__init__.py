"""Start, watch and restart the processes of a run on this node; explain hangs.

Read `weft.supervision.start` first, then `weft.supervision.launcher`.
"""
