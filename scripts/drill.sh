#!/usr/bin/env bash
# Rehearse failures on real clusters and servers that are started here, and say what held.
#   scripts/drill.sh [NAME...]           all drills, or those whose name begins like that
# Ends with status 1 if one failed.  What is not installed is skipped, with the reason.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

# name | what is done | pytest's name of the test
DRILLS="
slurm-two-nodes  | a job on two nodes, followed to its end          | tests/launch/test_slurm.py::test_two_nodes
slurm-ranks      | a task for each rank, started by srun            | tests/launch/test_slurm.py::test_ranks_that_srun_starts
slurm-stop       | a stop saves, and the job does not come back     | tests/launch/test_slurm.py::test_stop_saves_and_does_not_come_back
slurm-requeue    | saved with status 75, queued again, same losses  | tests/launch/test_slurm.py::test_comes_back_and_goes_on
slurm-limit      | Slurm's own signal before the time limit         | tests/launch/test_slurm.py::test_the_time_limit
slurm-mistake    | a mistake is not queued again                    | tests/launch/test_slurm.py::test_a_mistake_does_not_come_back
slurm-lost-node  | a node of an elastic job is killed, it goes on   | tests/launch/test_slurm.py::test_a_killed_node
"

log=$(mktemp -d)
failed=0
printf '%-18s %-8s %6s  %s\n' drill result seconds what
while IFS='|' read -r name what tests; do
    name=${name// /} what=$(sed 's/^ *//; s/ *$//' <<<"$what") tests=${tests// /}
    [ -n "$name" ] || continue
    wanted=$#
    for begin in "$@"; do [[ $name == "$begin"* ]] && wanted=0; done
    [ "$wanted" -eq 0 ] || continue
    began=$SECONDS
    "$PYTHON" -m pytest -q -rs -p no:cacheprovider "$tests" >"$log/$name" 2>&1 </dev/null
    status=$? result=held
    if [ $status -ne 0 ]; then
        result=FAILED failed=1 what="$what: see $log/$name"
    elif grep -q '^SKIPPED' "$log/$name"; then
        result=skipped what="$what: $(sed -n '/^SKIPPED/{s/.*: //p;q}' "$log/$name")"
    fi
    printf '%-18s %-8s %6d  %s\n' "$name" "$result" $((SECONDS - began)) "$what"
done <<<"$DRILLS"
exit $failed
