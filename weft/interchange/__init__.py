"""Models in from others, and out to them."""
