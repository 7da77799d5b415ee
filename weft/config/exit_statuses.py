"""Exit statuses of weft's commands and of its ranks."""

# 0 success; 1 the run failed; 2 usage or configuration error; 3 the watchdog killed
# a hung run; 69 this node is unhealthy (EX_UNAVAILABLE of sysexits.h); 75 checkpoint saved, run the
# same command to resume (EX_TEMPFAIL of sysexits.h); 130 interrupted (128 + SIGINT).
FAILED, USAGE_ERROR, HUNG, UNHEALTHY, REQUEUE, INTERRUPTED = 1, 2, 3, 69, 75, 130
