# shellcheck shell=bash disable=SC2154,SC2317,SC2329,SC2030,SC2031  # a cell is a small job of its own: folder, state, traps
# Read by the job.sh of a sweep, which is an array: each task runs some lines of the chunk's cells.sh, one cell each.
# A line has the variables and the words of a cell. job.sh defines _hj_launch_cell, which starts the words it is given.

_hj_own_chunk() { # CHUNK: the first array to create the link `owner` has the chunk; a lost or second one leaves
    local owner
    ln -sT -- "$SLURM_ARRAY_JOB_ID" "$1/owner" 2>/dev/null # one step: a link is never there without its text
    owner=$(readlink -- "$1/owner" || cat -- "$1/owner") # a file: of an older hpcjobs
    [ -n "$owner" ] || die "$1/owner cannot be made or is empty (quota, permissions): no cell was run"
    if [ "$owner" != "$SLURM_ARRAY_JOB_ID" ]; then
        echo "hpcjobs: these cells belong to $owner, not to array $SLURM_ARRAY_JOB_ID" >&2
        exit 0
    fi
}

_hj_was_submitted_again() { # CHUNK: whether a later chunk has the cell, which `sweep resume` made since it failed here
    local later
    for later in "${1%/*}"/[0-9]*; do
        [[ ${later##*/} =~ ^[0-9]+$ ]] || continue
        ((10#${later##*/} > 10#${1##*/})) || continue
        [ "$(readlink -- "$later/owner")" != nobody ] || continue # it was given up
        ! grep -q "^export HPCJOBS_CELL=${HPCJOBS_CELL}[ ;]" -- "$later/cells.sh" 2>/dev/null || return 0
    done
    return 1
}

_hj_run_cell() ( # CHUNK LINE
    _hj_task_dir=$HPCJOBS_RUN_DIR
    _hj_cells=$1/cells.sh _hj_line=$2
    eval "$(sed -n "$_hj_line{p;q}" -- "$_hj_cells")" || die "line $_hj_line of $_hj_cells cannot be read"
    export HPCJOBS_RUN_DIR=$HPCJOBS_SWEEP/cells/${HPCJOBS_CELL:?no such line in cells.sh}
    mkdir -p -- "$HPCJOBS_RUN_DIR" || die "$HPCJOBS_RUN_DIR cannot be made"
    [ "$HPCJOBS_PACK" -ne 1 ] || ln -sfn -- "../../../cells/$HPCJOBS_CELL" "$_hj_task_dir/cell"
    _hj_marker=$HPCJOBS_RUN_DIR/.completed _hj_helpers=() _hj_reader=''
    _hj_state_id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    if [ -e "$_hj_marker" ]; then
        echo "hpcjobs: cell $HPCJOBS_CELL is done already" >&2
        # On a full disk its end was not written: without one, every resume would submit the cell again.
        grep -q '"state":"COMPLETED"' -- "$HPCJOBS_RUN_DIR/state.json" 2>/dev/null || _hj_write_state COMPLETED 0 null
        exit 0
    fi
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && _hj_was_submitted_again "${_hj_cells%/*}"; then
        echo "hpcjobs: cell $HPCJOBS_CELL was submitted again since this task began: it is left to that job" >&2
        exit 0
    fi
    [ "$HPCJOBS_PACK" -eq 1 ] || exec >>"$HPCJOBS_RUN_DIR/output.log" 2>&1
    printf -v _hj_started '%(%s)T' -1
    rm -f -- "$HPCJOBS_RUN_DIR/first_failure"
    trap _hj_finish EXIT
    trap '_hj_caught=TERM; exit 143' TERM
    [ -z "${HPCJOBS_CONTROL_DIR:-}" ] || trap : USR1
    _hj_write_state RUNNING null null
    [ ${#_hj_figures[@]} -eq 0 ] || _hj_read_figures
    _hj_launch_cell "$@"
    _hj_await_step $!
    [ ! -s "$HPCJOBS_RUN_DIR/first_failure" ] || cp -- "$HPCJOBS_RUN_DIR/first_failure" "$_hj_task_dir/first_failure"
    exit "$_hj_code"
)

_hj_share_gpus() { # LANE: of the GPUs that this task may use, those of one lane; lanes share them where they are fewer
    local name all=() first count
    # The list of the program's own library counts within that of ROCm's runtime, so it alone is cut where both are set.
    if [ -n "${CUDA_VISIBLE_DEVICES:-}${HIP_VISIBLE_DEVICES:-}" ]; then
        set -- "$1" CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
    else
        set -- "$1" ROCR_VISIBLE_DEVICES
    fi
    for name in "${@:2}"; do
        [ -n "${!name:-}" ] || continue
        IFS=, read -ra all <<<"${!name}"
        count=$((${#all[@]} / HPCJOBS_LANES))
        if [ "$count" -eq 0 ]; then count=1 first=$(($1 % ${#all[@]})); else first=$(($1 * count)); fi
        printf -v "$name" '%s,' "${all[@]:first:count}"
        export "$name=${!name%,}"
    done
}

_hj_run_lane() ( # CHUNK LANE: every HPCJOBS_LANES'th cell of this task, one after the other; the last code that is not 0
    trap '_hj_caught=TERM' TERM
    [ -z "${HPCJOBS_CONTROL_DIR:-}" ] || trap : USR1
    _hj_failed=0
    _hj_last=$(wc -l <"$1/cells.sh")
    _hj_end=$(((SLURM_ARRAY_TASK_ID + 1) * HPCJOBS_PACK))
    [ "$_hj_last" -gt "$_hj_end" ] || _hj_end=$_hj_last
    # A port, a share of the threads and GPUs of its own.
    _hj_share_gpus "$2"
    MASTER_PORT=$(free_port $((MASTER_PORT + 97 * $2)))
    OMP_NUM_THREADS=$((OMP_NUM_THREADS > HPCJOBS_LANES ? OMP_NUM_THREADS / HPCJOBS_LANES : 1))
    for ((_hj_line = SLURM_ARRAY_TASK_ID * HPCJOBS_PACK + 1 + $2; _hj_line <= _hj_end; _hj_line += HPCJOBS_LANES)); do
        [ -z "$_hj_caught" ] || break
        _hj_run_cell "$1" "$_hj_line" &
        _hj_await_step $! || _hj_failed=$_hj_code
    done
    exit "$_hj_failed"
)

_hj_run_cells() { # CHUNK: all lanes at once; the last code that is not 0
    local lane lanes=() failed=0
    for ((lane = 0; lane < HPCJOBS_LANES; lane++)); do
        _hj_run_lane "$1" "$lane" &
        lanes+=("$!")
    done
    trap '_hj_caught=TERM; kill -TERM "${lanes[@]}" 2>/dev/null' TERM
    [ -z "${HPCJOBS_CONTROL_DIR:-}" ] || trap 'kill -USR1 "${lanes[@]}" 2>/dev/null' USR1
    for lane in "${lanes[@]}"; do
        _hj_wait "$lane"
        [ "$_hj_code" -eq 0 ] || failed=$_hj_code
    done
    return "$failed"
}
