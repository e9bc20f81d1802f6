#!/bin/bash
# One task of a job: bash rank.sh [OPTIONS] -- PROGRAM [ARGUMENTS]...
# It sets the rank's variables, runs PROGRAM, hands signals on, and records the first failure (docs/job_script.md).
#   --label           put the rank before each line of output, where no launcher does
#   --min-tasks=N     so few tasks may be left of an elastic job
#   --python-path=DIR where Python finds this package, in an image that srun has entered
#   --max-errors=N    an elastic agent restarts ranks: after so many restarts an error of the program's own is final
# shellcheck disable=SC2317,SC2329  # functions called by traps
# shellcheck source-path=SCRIPTDIR source=common.bash
. "${BASH_SOURCE[0]%/*}/common.bash" || exit

_hj_label='' _hj_min_tasks='' _hj_python_path='' _hj_max_errors=''
while [ "$1" != -- ]; do
    case $1 in
        --label) _hj_label=yes ;;
        --min-tasks=*) _hj_min_tasks=${1#*=} ;;
        --python-path=*) _hj_python_path=${1#*=} ;;
        --max-errors=*) _hj_max_errors=${1#*=} ;;
        *) die "rank.sh: no option $1" ;;
    esac
    shift
done
shift

# --- the rank, from the variables of the launcher; spawn and torchrun set most of them
case $HPCJOBS_SCHEDULER:$HPCJOBS_LAUNCHED_BY in
    slurm:srun* | slurm:horovod-gloo)
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
        export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$HPCJOBS_NTASKS_PER_NODE
        ;;
    *:torchrun)
        export NODE_RANK=$GROUP_RANK
        ;;
    *:mpirun)
        export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
        export WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
        export NODE_RANK=$((RANK / LOCAL_WORLD_SIZE))
        ;;
    *:horovodrun)
        export RANK=$HOROVOD_RANK LOCAL_RANK=$HOROVOD_LOCAL_RANK NODE_RANK=$HOROVOD_CROSS_RANK
        export WORLD_SIZE=$HOROVOD_SIZE LOCAL_WORLD_SIZE=$HOROVOD_LOCAL_SIZE
        ;;
esac
case $HPCJOBS_LAUNCHED_BY in
    horovod-gloo)
        export HOROVOD_RANK=$RANK HOROVOD_LOCAL_RANK=$LOCAL_RANK HOROVOD_CROSS_RANK=$NODE_RANK
        export HOROVOD_HOSTNAME=${SLURMD_NODENAME:-localhost}
        ;;
    mpirun | 'srun --mpi=pmix'*)
        # Open MPI waits by spinning: with no CPU to spare, the process that it waits for would not run.
        [ "$LOCAL_WORLD_SIZE" -eq 1 ] || [ "$((LOCAL_WORLD_SIZE * OMP_NUM_THREADS))" -lt "$(getconf _NPROCESSORS_ONLN)" ] ||
            export OMPI_MCA_mpi_yield_when_idle=1
        ;;
esac
[ -z "$_hj_python_path" ] || export PYTHONPATH=$_hj_python_path${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$_hj_min_tasks" ] && [ "${WORLD_SIZE:-0}" -lt "$HPCJOBS_NTASKS" ] && [ "${WORLD_SIZE:-0}" -ge "$_hj_min_tasks" ]; then
    # Some nodes have failed; the remaining agents have agreed on this size.
    [ "$RANK" -ne 0 ] || echo "hpcjobs: $HPCJOBS_NTASKS ranks were asked for, $WORLD_SIZE are left" >&2
    export HPCJOBS_NTASKS=$WORLD_SIZE HPCJOBS_NNODES=$((WORLD_SIZE / LOCAL_WORLD_SIZE))
fi
if [ "${WORLD_SIZE:-}" != "$HPCJOBS_NTASKS" ]; then
    echo "hpcjobs: $(hostname): WORLD_SIZE is ${WORLD_SIZE:-not set}, expected $HPCJOBS_NTASKS; started by $HPCJOBS_LAUNCHED_BY" >&2
    exit 10
fi
_hj_node=${SLURMD_NODENAME:-$(hostname)}
_hj_retries=${HPCJOBS_CONTROL_DIR:+yes}
if [ -n "$_hj_retries" ] && [ -z "$_hj_max_errors" ] && [ "$HPCJOBS_SCHEDULER:$LOCAL_RANK" = slurm:0 ]; then
    : >"$HPCJOBS_CONTROL_DIR/started/$_hj_node"
fi

# --- signals
_hj_program='' _hj_signal=''
_hj_hand_on() { # SIGNAL: Slurm may signal this shell alone (proctrack/cgroup); a local program has had it too
    _hj_signal=$1
    [ "$HPCJOBS_SCHEDULER" = local ] || [ -z "$_hj_program" ] || kill -s "$1" "$_hj_program" 2>/dev/null
}
trap '_hj_hand_on TERM' TERM INT # a shell's children in the background do not hear INT
trap '_hj_hand_on HUP' HUP
trap '_hj_hand_on USR1' USR1
trap '_hj_hand_on USR2' USR2
if [ -n "$_hj_retries" ] && [ -n "$_hj_max_errors" ]; then
    trap '_hj_signal=USR1; kill -USR1 "$_hj_program" 2>/dev/null' USR2 # from agent.sh: this shell began with USR1 ignored
    echo $$ >"$HPCJOBS_CONTROL_DIR/ranks-$(hostname)/$LOCAL_RANK"
fi

# --- the end
_hj_record_end() { # at once: a rank that fails because this one is missing must come second
    local parent requeue=85
    if [ -n "$_hj_retries" ]; then
        # Where the reader of its output was killed (slurmstepd, say), a program that writes fails: not by its own error.
        # A new parent shows it. The parent's /proc entry does not: hidepid hides those of other users, a zombie keeps its own.
        read -r _ _ _ parent _ <"/proc/$$/stat"
        if [ "$_hj_code" -ne 0 ] && [ "$_hj_code" -ne "$requeue" ] &&
            ! { [ "$parent" = "$PPID" ] && { [ -z "$_hj_label" ] || kill -0 "$_hj_labeller" 2>/dev/null; }; }; then
            _hj_code=137
        fi
        [ -n "$_hj_max_errors" ] || _hj_write_control "ends/$RANK" "$_hj_code"
        [ "$RANK" -ne 0 ] || [ "$_hj_code" -ne 0 ] || _hj_write_control completed "$_hj_code"
        # Saved, and to be started again: no failure, nor anything that an elastic agent should restart.
        [ "$_hj_code" -ne "$requeue" ] || _hj_code=0
    fi
    [ "$_hj_code" -ne 0 ] || return 0
    (set -o noclobber && echo "$_hj_code $RANK $(hostname)" >"$HPCJOBS_RUN_DIR/first_failure") 2>/dev/null || return 0
    case $_hj_retries$_hj_code in
        yes134 | yes137) echo "$_hj_node" >>"$HPCJOBS_CONTROL_DIR/suspects" ;;
    esac
}

# The agent restarts ranks whatever ended them; a program's own error would only come again, and 23 comes every time.
if [ -n "$_hj_max_errors" ] && [ "${TORCHELASTIC_RESTART_COUNT:-0}" -gt 0 ] &&
    read -r _hj_code _ <"$HPCJOBS_RUN_DIR/first_failure" &&
    { [ "$_hj_code" = 23 ] || [ "$TORCHELASTIC_RESTART_COUNT" -gt "$_hj_max_errors" ]; }; then
    case $_hj_code in
        11 | 18 | 19 | 22 | 134 | 137) rm -f -- "$HPCJOBS_RUN_DIR/first_failure" ;;
        *) exit "$_hj_code" ;;
    esac
fi 2>/dev/null

# --- the program
if [ -n "$_hj_label" ]; then
    # A signal for the whole task must not end the process that writes its last lines; on a full disk it begins anew:
    # the program must not meet a broken pipe.
    exec {_hj_out}> >(trap '' TERM INT HUP USR1 USR2 && until sed -u "s/^/$RANK: /"; do sleep 1; done)
    _hj_labeller=$!
    "$@" >&"$_hj_out" 2>&1 &
    _hj_await_program $!
    _hj_record_end
    exec {_hj_out}>&-
    # The last lines are on their way; a process that the program left behind may hold the pipe open for ever.
    for _ in {1..30}; do
        kill -0 "$_hj_labeller" 2>/dev/null || break
        sleep 0.1
    done
else
    "$@" &
    _hj_await_program $!
    _hj_record_end
fi
[ "$_hj_code" -eq 0 ] || echo "hpcjobs: rank $RANK on $(hostname) ended with exit code $_hj_code" >&2
if [ -n "$_hj_retries" ] && [ "$HPCJOBS_SCHEDULER:$_hj_signal:$RANK" = slurm:TERM:0 ]; then
    sh "$HPCJOBS_CONTROL_DIR/aftermath" # Slurm ends the job; if it killed node.pyz, this rank decides
fi
exit "$_hj_code"
