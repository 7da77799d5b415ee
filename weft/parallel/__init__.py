"""Parallelism and memory techniques, applied to a model from outside."""
