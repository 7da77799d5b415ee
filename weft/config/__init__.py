"""The configuration of a run: its schema, its files, and every error at once."""
