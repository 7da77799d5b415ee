"""What a layout does to a model, from outside of it."""
