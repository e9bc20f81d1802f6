# shellcheck shell=bash
# What every job.sh reads first: the state file, which is written at the start and, by a trap, at every end that a script
# can notice; and the wait for the job's step. With --retries (HPCJOBS_CONTROL_DIR) node.pyz writes the job's state.
# shellcheck disable=SC2317,SC2329  # functions called by traps and by job.sh
# shellcheck source-path=SCRIPTDIR source=common.bash
. "${BASH_SOURCE[0]%/*}/common.bash" || exit

printf -v _hj_started '%(%s)T' -1
if [ "$HPCJOBS_SCHEDULER" = slurm ]; then
    _hj_nodes=$SLURM_JOB_NODELIST _hj_cluster=${SLURM_CLUSTER_NAME:-}
else
    _hj_cluster=$(hostname)
    _hj_nodes=${_hj_nodes:-$_hj_cluster}
fi
_hj_state_id=$HPCJOBS_JOB_ID # of the state file; a cell of a sweep has one of its own
_hj_array=null # which the raw id of a task does not tell
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || _hj_array="\"$SLURM_ARRAY_JOB_ID\""
_hj_caught='' _hj_early='' _hj_step='' _hj_recorder=''
_hj_marker='' # file that shows that a cell of a sweep is completed
_hj_helpers=() # processes that end with the job
_hj_reader='' # process that reads figures from the log
declare -a _hj_figures # of job.sh, with --metric
declare -a _hj_notify # of job.sh, with --notify

_hj_leave_late_copy() { # slurmctld took this request up after the one that hpcjobs sent in its place, and recorded
    local recorded=''
    [ "${HPCJOBS_REQUEST:-}" = "${HPCJOBS_RUN_DIR%"/${SLURM_ARRAY_TASK_ID:-}"}" ] || return 0
    # The first array to start has the cells of a sweep (sweep.bash).
    [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] && [ ! -e "$HPCJOBS_REQUEST/cells.sh" ] || return 0
    read -r recorded 2>/dev/null <"$HPCJOBS_REQUEST/submitted.json"
    [[ $recorded =~ ^\{\"job_id\":\"([^\"]+)\" ]] || return 0 # not recorded yet, or never
    [ "${BASH_REMATCH[1]}" != "${SLURM_ARRAY_JOB_ID:-$HPCJOBS_JOB_ID}" ] || return 0
    echo "hpcjobs: the request of this job came late, and job ${BASH_REMATCH[1]} was submitted in its place: nothing is left to do" >&2
    exit 0
}

_hj_write_state() { # STATE EXIT_CODE FIRST_FAILURE
    local ended=null # no `date`: a signal to all processes of the job would end it
    [ "$1" = RUNNING ] || printf -v ended '%(%s)T' -1
    printf '{"schema":1,"job_id":"%s","state":"%s","exit_code":%s,"started":%s,"ended":%s,"nodes":"%s","restarts":%s,"first_failure":%s,"cluster":"%s","array_job_id":%s}\n' \
        "$_hj_state_id" "$1" "$2" "$_hj_started" "$ended" "$_hj_nodes" "${SLURM_RESTART_COUNT:-0}" "$3" "$_hj_cluster" "$_hj_array" \
        >"$HPCJOBS_RUN_DIR/.state.json" && mv -f -- "$HPCJOBS_RUN_DIR/.state.json" "$HPCJOBS_RUN_DIR/state.json"
}

_hj_finish() {
    local code=$? state=COMPLETED failure=null rank host
    # Elastic ranks may have failed and been started again.
    if [ -s "$HPCJOBS_RUN_DIR/first_failure" ] && { [ -z "${HPCJOBS_CONTROL_DIR:-}" ] || [ "$code" -ne 0 ]; }; then
        read -r code rank host <"$HPCJOBS_RUN_DIR/first_failure"
        failure="{\"rank\":$rank,\"host\":\"$host\",\"exit_code\":$code}"
        echo "hpcjobs: first failure: rank $rank on $host, exit code $code" >&2
    fi
    [ "$code" -eq 0 ] || state=FAILED
    [ -z "$_hj_caught" ] || state=CANCELLED
    [ ! -s "${HPCJOBS_CONTROL_DIR:-/dev/null}/requeue" ] || state=REQUEUED
    if [ -n "$_hj_reader" ]; then # to the end of the log; whoever sees the job's end sees its figures
        echo "$code" >"$HPCJOBS_RUN_DIR/.exit_code"
        { kill -HUP "$_hj_reader" && wait "$_hj_reader"; } 2>/dev/null
    fi
    if [ ${#_hj_helpers[@]} -ne 0 ]; then
        kill "${_hj_helpers[@]}" 2>/dev/null
        # A sampler of this machine writes its last lines before the queue ends what is left; an srun may wait for a dead node.
        [ "$HPCJOBS_SCHEDULER" = slurm ] || wait "${_hj_helpers[@]}" 2>/dev/null
    fi
    [ -z "$_hj_recorder" ] || { kill "$_hj_recorder" && wait "$_hj_recorder"; } 2>/dev/null
    # With --retries node.pyz writes the job's state; a cell of a sweep writes its own.
    [ -n "${HPCJOBS_CONTROL_DIR:-}" ] && [ "$BASHPID" = $$ ] || _hj_write_state "$state" "$code" "$failure"
    [ -z "$_hj_marker" ] || [ "$state" != COMPLETED ] || : >"$_hj_marker"
    [ -n "${HPCJOBS_CONTROL_DIR:-}" ] || [ "$BASHPID" != $$ ] || _hj_report "$state" "$code"
    trap - EXIT
    exit "$code"
}

_hj_report() { # STATE EXIT_CODE: by --notify; a second signal does not keep it from its work
    [ ${#_hj_notify[@]} -eq 0 ] || (trap '' TERM INT HUP && "${_hj_notify[@]}" "$1" "$2")
}

_hj_record_before_kill() { # KillWait after TERM Slurm kills this script; srun may wait longer for a step that has just begun
    local kill_wait
    kill_wait=$(timeout 5 scontrol show config 2>/dev/null | sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p')
    read -rt "$((${kill_wait:-30} > 8 ? ${kill_wait:-30} - 4 : 4))" <> <(:) # a sleep that leaves no process behind
    _hj_write_state CANCELLED 143 null
}

_hj_on_term() {
    if [ -z "${HPCJOBS_CONTROL_DIR:-}" ]; then
        kill -TERM "$_hj_step" 2>/dev/null
        if [ "$HPCJOBS_SCHEDULER" = slurm ] && [ -z "$_hj_recorder" ]; then
            _hj_record_before_kill &
            _hj_recorder=$!
        fi
    elif [ "$HPCJOBS_SCHEDULER" = local ] && [ -z "$_hj_caught" ]; then # it may come twice
        kill -TERM "$_hj_step" 2>/dev/null
    fi # else Slurm signals the step itself; srun, signalled too, would not let it save
    _hj_caught=TERM
}

_hj_await_step() { # PID: until the step has ended, handing signals on; its exit code, also in _hj_code
    _hj_step=$1
    trap _hj_on_term TERM
    if [ -n "${HPCJOBS_CONTROL_DIR:-}" ]; then
        trap 'kill -USR1 "$_hj_step" 2>/dev/null' USR1 # node.pyz: the time limit, or a preemption, is near
    fi
    _hj_wait "$1"
    [ -z "${HPCJOBS_CONTROL_DIR:-}" ] || echo "$_hj_code" >"$HPCJOBS_CONTROL_DIR/step_code"
    return "$_hj_code"
}

[ -n "${HPCJOBS_CONTROL_DIR:-}" ] || _hj_leave_late_copy
unset HPCJOBS_REQUEST # of this job, and not of those that it submits
mkdir -p -- "$HPCJOBS_RUN_DIR"
trap _hj_finish EXIT
trap '_hj_caught=TERM; exit 143' TERM
if [ -n "${HPCJOBS_CONTROL_DIR:-}" ]; then
    trap '_hj_early=yes' USR1 # the job's time is over before its step has begun
else
    rm -f -- "$HPCJOBS_RUN_DIR/first_failure"
    _hj_write_state RUNNING null null
fi
