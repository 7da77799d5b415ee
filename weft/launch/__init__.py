"""Starting the ranks of a run."""

# Exit statuses: 0 done; 1 the run failed; 2 the user's mistake; 130 interrupted, as shells say it.
FAILED, MISTAKE, INTERRUPTED = 1, 2, 130
