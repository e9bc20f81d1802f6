# shellcheck shell=bash
# What job.sh reads after job.bash where the job is a batch script: Slurm signals the shell of job.sh alone (--signal=B:...,
# and with proctrack/cgroup the end of the job), and the script is to get what it would get from sbatch.
# shellcheck disable=SC2154,SC2317,SC2329  # variables of job.bash; functions called by traps and by job.sh

_hj_await_step() { # PID: until the script has ended, handing signals on; its exit code, also in _hj_code
    _hj_step=$1
    trap '_hj_on_term; [ -z "${HPCJOBS_CONTROL_DIR:-}" ] || kill -TERM "$_hj_step" 2>/dev/null' TERM
    trap 'kill -INT "$_hj_step" 2>/dev/null' INT
    trap 'kill -HUP "$_hj_step" 2>/dev/null' HUP
    trap 'kill -USR1 "$_hj_step" 2>/dev/null' USR1
    trap 'kill -USR2 "$_hj_step" 2>/dev/null' USR2
    if [ -n "${HPCJOBS_CONTROL_DIR:-}" ]; then
        trap _hj_warn_script USR1 # node.pyz: the time limit, or a preemption, is near
    fi
    _hj_wait "$1"
    [ -z "${HPCJOBS_CONTROL_DIR:-}" ] || echo "$_hj_code" >"$HPCJOBS_CONTROL_DIR/step_code"
    return "$_hj_code"
}

_hj_warn_script() { # its steps, and the script itself if it handles the signal, which would end it otherwise
    local handled
    handled=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$_hj_step/status")
    [ "$((16#${handled:-0} & 0x200))" -eq 0 ] || kill -USR1 "$_hj_step"
    scancel --signal=USR1 "$SLURM_JOB_ID"
}

_hj_record_script_end() { # for `wait` and `show`, as a rank does it
    if [ -n "${HPCJOBS_CONTROL_DIR:-}" ]; then
        _hj_write_control ends/0 "$_hj_code"
        [ "$_hj_code" -ne 0 ] || _hj_write_control completed 0
        [ "$_hj_code" -ne 85 ] || return 0 # saved, and to be started again
    fi
    [ "$_hj_code" -eq 0 ] || echo "$_hj_code 0 $(hostname)" >"$HPCJOBS_RUN_DIR/first_failure"
}
