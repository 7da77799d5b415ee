"""Everything that can be known before a run starts."""
