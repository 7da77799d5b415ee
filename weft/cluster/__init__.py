"""Starting the ranks of a run."""

# Exit statuses: 0 done; 1 the run failed; 2 the user's mistake; 3 it hung, and was killed by the
# watchdog; 69 this node is not fit to train (sysexits.h: unavailable); 75 saved, the same command
# goes on (sysexits.h: a temporary failure, try again); 130 interrupted, as shells say it.
FAILED, MISTAKE, HUNG, SICK, REQUEUE, INTERRUPTED = 1, 2, 3, 69, 75, 130
