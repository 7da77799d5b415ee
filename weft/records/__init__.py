"""Read what runs have written: metrics, events, spans, costs.

Read `weft.records.run_reader` first.  `weft.monitor` writes the records.
"""
