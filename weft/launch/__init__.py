"""Starting the ranks of a run."""

# Exit statuses: 0 done; 1 the run failed; 2 the user's mistake; 75 saved, the same command goes on
# (sysexits.h: a temporary failure, try again); 130 interrupted, as shells say it.
FAILED, MISTAKE, REQUEUE, INTERRUPTED = 1, 2, 75, 130
