#!/usr/bin/env bash
# Rehearse failures on real clusters and servers that are started here, and say what held.
#   scripts/drill.sh [NAME...]           all drills, or those whose name begins like that
# Ends with status 1 if one failed.  What is not installed is skipped, with the reason; Amazon's
# training toolkit is fetched into build/, for it needs old versions of what weft has.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

# name | what is done | pytest's name of the test
DRILLS="
rank-killed        | a rank is killed: all start again, same losses     | tests/cluster/test_restart.py::test_restart_rank_killed_beside_a_suspended_one_ends_with_the_same_bits
rank-hangs         | a rank skips a collective: it is named             | tests/cluster/test_hang.py::test_debug_hang_after_the_watchdog_names_a_skipped_collective
time-limit         | saved in time, with status 75                      | tests/cluster/test_signals.py::test_time_limit_stops_and_resumes_bit_for_bit
nodes-elastic      | nodes are lost and come: the run shrinks and grows | tests/cluster/test_rendezvous.py::test_train_lost_and_new_nodes_continue_the_run
nodes-meeting      | the meeting place is lost: saved, status 75        | tests/cluster/test_rendezvous.py::test_train_lost_rendezvous_ends_and_resumes
s3-killed          | killed while it saves into S3, and goes on         | tests/checkpoint/test_remote.py::test_remote_killed_run_resumes
s3-damaged         | damage in the store is noticed                     | tests/checkpoint/test_remote.py::test_remote_damage_is_noticed
doctor-sick        | the other node trains without a sick one           | tests/cluster/test_doctor.py::test_preflight_other_nodes_train_without_a_sick_one
doctor-fell-sick   | a node that fell sick does not start again         | tests/cluster/test_doctor.py::test_preflight_node_that_became_sick_does_not_restart
slurm-two-nodes    | a job on two nodes, followed to its end            | tests/cluster/test_slurm.py::test_slurm_two_nodes_train
slurm-ranks        | a task for each rank, started by srun              | tests/cluster/test_slurm.py::test_slurm_ranks_started_by_srun_train
slurm-stop         | a stop saves, and the job does not come back       | tests/cluster/test_slurm.py::test_slurm_stop_saves_and_is_not_requeued
slurm-requeue      | saved with status 75, queued again, same losses    | tests/cluster/test_slurm.py::test_slurm_preempted_job_is_requeued_and_resumes
slurm-limit        | Slurm's own signal before the time limit           | tests/cluster/test_slurm.py::test_slurm_time_limit_requeues_and_resumes
slurm-mistake      | a mistake is not queued again                      | tests/cluster/test_slurm.py::test_slurm_mistake_is_not_requeued
slurm-sick-node    | a sick node is left out when the job comes back    | tests/cluster/test_slurm.py::test_slurm_sick_node_is_excluded
slurm-lost-node    | a node of an elastic job is killed, it goes on     | tests/cluster/test_slurm.py::test_slurm_killed_node_of_an_elastic_job_leaves_the_others_training
sagemaker-toolkit  | two hosts by Amazon's toolkit, model exported      | tests/cluster/test_sagemaker_entry.py::test_entry_two_hosts_by_the_toolkit_train
sagemaker-crash    | a crash: its first cause in the failure file       | tests/cluster/test_sagemaker_entry.py::test_entry_crash_by_the_toolkit_is_reported
sagemaker-again    | started again, it goes on                          | tests/cluster/test_sagemaker_entry.py::test_entry_restarted_job_resumes
sagemaker-own      | two hosts by weft's own entrypoint                 | tests/cluster/test_sagemaker_entry.py::test_entry_two_containers_train
sagemaker-stop     | stopped as a container, saved, started again       | tests/cluster/test_sagemaker_entry.py::test_entry_stopped_container_resumes
kubernetes-valid   | manifests by Kubeflow's and Kubernetes' models     | tests/cluster/test_kubernetes.py::test_manifest_is_valid_for_the_kubernetes_models
skypilot-valid     | tasks by SkyPilot's schemas                        | tests/cluster/test_skypilot.py::test_task_is_valid_for_the_schemas
"

wanted() { # whether a drill of that name is asked for
    local name=$1
    shift
    [ $# -eq 0 ] && return 0
    for begin in "$@"; do [[ $name == "$begin"* ]] && return 0; done
    return 1
}

log=$(mktemp -d)
failed=0 some=0
toolkit=$PWD/build/sagemaker-toolkit
if [ -z "${WEFT_SAGEMAKER_TOOLKIT:-}" ] && wanted sagemaker "${@%%-*}"; then
    if [ ! -d "$toolkit" ]; then
        "$PYTHON" -m pip install --quiet --no-deps --target "$toolkit.part" \
            -r tests/cluster/sagemaker-toolkit.txt >"$log/toolkit" 2>&1 && mv "$toolkit.part" "$toolkit"
    fi
    [ ! -d "$toolkit" ] || export WEFT_SAGEMAKER_TOOLKIT=$toolkit
fi
printf '%-18s %-8s %6s  %s\n' drill result seconds what
while IFS='|' read -r name what tests; do
    name=${name// /} what=$(sed 's/^ *//; s/ *$//' <<<"$what") tests=${tests// /}
    [ -n "$name" ] && wanted "$name" "$@" || continue
    some=1 began=$SECONDS
    "$PYTHON" -m pytest -q -rs -p no:cacheprovider "$tests" >"$log/$name" 2>&1 </dev/null
    status=$? result=held
    if [ $status -ne 0 ]; then
        result=FAILED failed=1 what="$what: see $log/$name"
    elif grep -q '^SKIPPED' "$log/$name"; then
        result=skipped what="$what: $(sed -n '/^SKIPPED/{s/^SKIPPED [^ ]* [^ ]* //p;q}' "$log/$name")"
    fi
    printf '%-18s %-8s %6d  %s\n' "$name" "$result" $((SECONDS - began)) "$what"
done <<<"$DRILLS"
[ $some -eq 1 ] || { echo "no drill is called that" >&2; exit 2; }
exit $failed
