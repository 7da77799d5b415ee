#!/usr/bin/env bash
# Rehearse failures on real clusters and servers, which this script starts on this machine.
#   scripts/drill.sh [NAME...]           all drills, or those whose names begin with NAME
# Exits with status 1 if a drill failed.  A drill without its programs is skipped, with the reason.
# Amazon's training toolkit and HyperPod's elastic agent are installed in build/, because they need older versions of
# packages; the agent with PyTorch, which takes 5 GB.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

# name | event and required outcome | test
DRILLS="
rank-killed        | a rank is killed: all ranks restart, same losses        | tests/supervision/test_restart.py::test_restart_rank_killed_beside_a_suspended_one_ends_with_the_same_bits
rank-hangs         | a rank skips a collective: weft names the rank          | tests/supervision/test_hang.py::test_hang_after_the_watchdog_names_a_skipped_collective
time-limit         | saved in time, with status 75                           | tests/supervision/test_signals.py::test_time_limit_stops_and_resumes_bit_for_bit
nodes-elastic      | nodes leave and join: the run shrinks and grows         | tests/supervision/test_rendezvous.py::test_train_lost_and_new_nodes_continue_the_run
nodes-rendezvous   | the rendezvous is lost: saved, status 75                | tests/supervision/test_rendezvous.py::test_train_lost_rendezvous_ends_and_resumes
s3-killed          | killed while it saves into S3, then resumed             | tests/checkpoint/test_remote.py::test_remote_killed_run_resumes
s3-damaged         | damage in the store is detected                         | tests/checkpoint/test_remote.py::test_remote_damage_is_noticed
doctor-unhealthy   | the other node trains without an unhealthy one          | tests/doctor/test_doctor.py::test_preflight_other_nodes_train_without_an_unhealthy_one
doctor-later       | a node that became unhealthy does not restart           | tests/doctor/test_doctor.py::test_preflight_node_that_became_unhealthy_does_not_restart
slurm-two-nodes    | a job on two nodes runs to its end                      | tests/submission/test_slurm.py::test_slurm_two_nodes_train
slurm-ranks        | srun starts one task per rank                           | tests/submission/test_slurm.py::test_slurm_ranks_started_by_srun_train
slurm-stop         | a cancel saves, and the job is not requeued             | tests/submission/test_slurm.py::test_slurm_stop_saves_and_is_not_requeued
slurm-requeue      | saved with status 75, requeued, same losses             | tests/submission/test_slurm.py::test_slurm_preempted_job_is_requeued_and_resumes
slurm-limit        | Slurm's own signal before the time limit                | tests/submission/test_slurm.py::test_slurm_time_limit_requeues_and_resumes
slurm-mistake      | a configuration error is not requeued                   | tests/submission/test_slurm.py::test_slurm_mistake_is_not_requeued
slurm-unhealthy    | the requeued job excludes an unhealthy node             | tests/submission/test_slurm.py::test_slurm_unhealthy_node_is_excluded
slurm-lost-node    | a node of an elastic job is killed, and the job resumes | tests/submission/test_slurm.py::test_slurm_killed_node_of_an_elastic_job_leaves_the_others_training
slurm-pyxis        | a container has the mounts, the recipe, the environment  | tests/submission/test_slurm_containers.py::test_slurm_container_trains[setup-pyxis]
slurm-apptainer    | the same, started by Apptainer                          | tests/submission/test_slurm_containers.py::test_slurm_container_trains[setup-apptainer]
slurm-no-mount     | a container without its data fails                      | tests/submission/test_slurm_containers.py::test_slurm_container_without_its_data_fails
slurm-no-pyxis     | a cluster without Pyxis refuses an image                | tests/submission/test_slurm_containers.py::test_slurm_without_pyxis_is_refused
slurm-requests     | sbatch accepts or refuses what the keys request         | tests/submission/test_slurm.py::test_slurm_requests_of_the_keys
slurm-exclude      | a file excludes a node for later jobs                   | tests/submission/test_slurm.py::test_slurm_file_excludes_an_unhealthy_node_for_later_jobs
slurm-array        | trials of a comparison, one requeued, end in the report  | tests/submission/test_comparison_jobs.py::test_launch_vary_on_slurm_ends_in_the_report
hyperpod-option    | srun accepts --auto-resume, sbatch does not             | tests/submission/test_auto_resume.py::test_plugin_is_an_option_of_srun_alone
hyperpod-fault     | a node is replaced: same job id, same losses            | tests/submission/test_auto_resume.py::test_hardware_fault_requeues_on_another_node_and_resumes
hyperpod-first     | the first node is replaced: the rendezvous moves        | tests/submission/test_auto_resume.py::test_hardware_fault_of_the_first_node_resumes
hyperpod-disk      | a node without its disk: an older checkpoint            | tests/submission/test_auto_resume.py::test_hardware_fault_retries_the_step_without_the_local_disk
hyperpod-launcher  | a launcher dies on healthy hardware: requeued           | tests/submission/test_auto_resume.py::test_lost_launcher_is_requeued_by_weft
hyperpod-crash     | restarts used up: requeued, same losses                 | tests/submission/test_auto_resume.py::test_crash_that_outlasts_the_restarts_is_requeued_by_weft
hyperpod-loop      | a crash loop without progress ends                      | tests/submission/test_auto_resume.py::test_crash_loop_without_progress_ends
hyperpod-final     | a bug or a mistake is not requeued                      | tests/submission/test_auto_resume.py::test_failure_that_recurs_ends_the_job
hyperpod-progress  | failures with progress are requeued                     | tests/submission/test_auto_resume.py::test_failures_with_progress_are_requeued
hyperpod-other     | another cluster: srun gets no option                    | tests/submission/test_auto_resume.py::test_other_cluster_gets_no_option
agent-fault        | two pods of HyperPod on EKS: restarted, same losses     | tests/submission/test_hyperpod_agent.py::test_fault_restarts_the_ranks_which_resume
agent-elastic      | 2, 1, 2 nodes: no fault, same losses                    | tests/submission/test_hyperpod_agent.py::test_elastic_job_shrinks_and_grows_without_a_fault
agent-deleted      | a pod is deleted: saved, and the other restarts         | tests/submission/test_hyperpod_agent.py::test_deleted_pod_saves_and_the_others_report_a_fault
agent-hang         | a rank hangs: the watchdog names it to the operator     | tests/submission/test_hyperpod_agent.py::test_hung_rank_is_named_by_the_watchdog_and_restarted
agent-log          | a rank hangs without a watchdog: a log rule notices it  | tests/submission/test_hyperpod_agent.py::test_hang_rule_restarts_ranks_without_a_watchdog
agent-command      | the command of a HyperPodPyTorchJob trains to its end   | tests/submission/test_hyperpod_agent.py::test_command_of_the_manifest_trains_under_the_agent
agent-rules        | log rules are broken by their events only               | tests/submission/test_hyperpod_agent.py::test_rule_is_broken_only_by_its_event
sagemaker-toolkit  | two hosts under Amazon's toolkit, model exported        | tests/submission/test_sagemaker_entry.py::test_entry_two_hosts_by_the_toolkit_train
sagemaker-crash    | a crash: the failure file has its first cause           | tests/submission/test_sagemaker_entry.py::test_entry_crash_by_the_toolkit_is_reported
sagemaker-again    | restarted, and it resumes                               | tests/submission/test_sagemaker_entry.py::test_entry_restarted_job_resumes
sagemaker-own      | two hosts under weft's entry point                      | tests/submission/test_sagemaker_entry.py::test_entry_two_containers_train
sagemaker-stop     | container stopped, saved, restarted                     | tests/submission/test_sagemaker_entry.py::test_entry_stopped_container_resumes
kubernetes-valid   | manifests match the models of Kubeflow and Kubernetes   | tests/submission/test_kubernetes.py::test_manifest_is_valid_for_the_kubernetes_models
skypilot-valid     | tasks match SkyPilot's schemas                          | tests/submission/test_skypilot.py::test_task_is_valid_for_the_schemas
"

wanted() { # true if NAME... selects the drill
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
            -r tests/submission/sagemaker-toolkit.txt >"$log/toolkit" 2>&1 && mv "$toolkit.part" "$toolkit"
    fi
    [ ! -d "$toolkit" ] || export WEFT_SAGEMAKER_TOOLKIT=$toolkit
fi
agent=$PWD/build/hyperpod-agent
if [ -z "${WEFT_HYPERPOD_AGENT:-}" ] && wanted agent "${@%%-*}"; then
    if [ ! "$agent/installed" -nt pyproject.toml ]; then
        {
            "$PYTHON" -m venv --clear "$agent" \
                && "$agent/bin/python" -m pip install --quiet -r tests/submission/hyperpod-agent.txt . \
                && touch "$agent/installed"
        } >"$log/agent" 2>&1
    fi
    [ ! -e "$agent/installed" ] || export WEFT_HYPERPOD_AGENT=$agent/bin/python
fi
printf '%-18s %-8s %6s  %s\n' drill result seconds outcome
while IFS='|' read -r name what tests; do
    name=${name// /} what=$(sed 's/^ *//; s/ *$//' <<<"$what") tests=${tests// /}
    [ -n "$name" ] && wanted "$name" "$@" || continue
    some=1 began=$SECONDS
    "$PYTHON" -m pytest -q -rs -p no:cacheprovider "$tests" >"$log/$name" 2>&1 </dev/null
    status=$? result=passed
    if [ $status -ne 0 ]; then
        result=FAILED failed=1 what="$what: see $log/$name"
    elif grep -q '^SKIPPED' "$log/$name"; then
        result=skipped what="$what: $(sed -n '/^SKIPPED/{s/^SKIPPED [^ ]* [^ ]* //p;q}' "$log/$name")"
    fi
    printf '%-18s %-8s %6d  %s\n' "$name" "$result" $((SECONDS - began)) "$what"
done <<<"$DRILLS"
[ $some -eq 1 ] || { echo "no drill has such a name" >&2; exit 2; }
exit $failed
