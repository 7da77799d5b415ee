"""Memory and step time of a run before it starts, from the code that runs."""
