"""Starting the ranks of a run."""

# Exit statuses: 0 done; 1 the run failed; 2 the user's mistake; 3 it hung, and was killed by the
# watchdog; 75 saved, the same command goes on (sysexits.h: a temporary failure, try again); 130
# interrupted, as shells say it.
FAILED, MISTAKE, HUNG, REQUEUE, INTERRUPTED = 1, 2, 3, 75, 130
