"""Memory and time of a run before it starts, from the code that will really run."""
