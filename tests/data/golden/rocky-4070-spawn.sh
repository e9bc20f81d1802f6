#!/bin/bash
# hpcjobs VERSION
# site rocky-4070 (/SHIPPED/site_configs/rocky-4070.yaml)
# template /SHIPPED/templates/job.sh.j2
# made by: hpcjobs submit ...

# shellcheck disable=SC1090,SC1091,SC2016,SC2317,SC2329  # sourced init files; text expanded by each task; functions called by traps
run_dir=/RUN
job_id=${HPCJOBS_JOB_ID:?run this through hpcjobs, which gives local jobs their number and their slots}
nodes=$(hostname)

# --- state file: written at the start and, by a trap, at every end a script can notice
printf -v started '%(%s)T' -1
cluster=$(hostname)
caught=''

write_state() { # STATE EXIT_CODE FIRST_FAILURE
    local ended=null # no `date`: a signal to all processes of the job would end it
    [ "$1" = RUNNING ] || printf -v ended '%(%s)T' -1
    printf '{"schema":1,"job_id":"%s","state":"%s","exit_code":%s,"started":%s,"ended":%s,"nodes":"%s","restarts":%s,"first_failure":%s,"cluster":"%s"}\n' \
        "$job_id" "$1" "$2" "$started" "$ended" "$nodes" "${SLURM_RESTART_COUNT:-0}" "$3" "$cluster" >"$run_dir/.state.json" &&
        mv -f -- "$run_dir/.state.json" "$run_dir/state.json"
}

finish() {
    local code=$? state=COMPLETED failure=null rank host
    if [ -s "$run_dir/first_failure" ]; then
        read -r code rank host <"$run_dir/first_failure"
        failure="{\"rank\":$rank,\"host\":\"$host\",\"exit_code\":$code}"
        echo "hpcjobs: first failure: rank $rank on $host, exit code $code" >&2
    fi
    [ "$code" -eq 0 ] || state=FAILED
    [ -z "$caught" ] || state=CANCELLED
    write_state "$state" "$code" "$failure"
    trap - EXIT
    exit "$code"
}

die() {
    echo "hpcjobs: $(hostname): $*" >&2
    exit 1
}

await_step() { # PID: wait for it, handing TERM on; its exit code
    step=$1
    trap 'caught=TERM; kill -TERM "$step" 2>/dev/null' TERM
    # A trapped signal interrupts `wait`: ask again until the step has really ended.
    wait "$step"
    step_code=$?
    while kill -0 "$step" 2>/dev/null; do
        wait "$step"
        step_code=$?
    done
    return "$step_code"
}

trap finish EXIT
trap 'caught=TERM; exit 143' TERM
rm -f -- "$run_dir/first_failure"
write_state RUNNING null null

# --- software of the site
command -v mpirun >/dev/null || [ ! -r /etc/profile.d/modules.sh ] || . /etc/profile.d/modules.sh
command -v mpirun >/dev/null || ! command -v module >/dev/null || module load mpi/openmpi-x86_64
export PATH="/usr/local/cuda/bin:$PATH"

# --- what every task is told
MASTER_ADDR=127.0.0.1
# A port that is free on this node, where rank 0 will run; jobs start their search apart from each other.
free_port() { # FROM
    local port=$1
    while grep -qi ":$(printf '%04X' "$port") " /proc/net/tcp /proc/net/tcp6 2>/dev/null; do
        port=$((port + 1))
    done
    echo "$port"
}
MASTER_PORT=$(free_port $((15000 + (10#${job_id//[!0-9]/} * 7 + UID) % 16000)))
export MASTER_ADDR MASTER_PORT
export HPCJOBS_NNODES=1
export HPCJOBS_NTASKS=$((HPCJOBS_NNODES * 2))
export HPCJOBS_JOB_ID=$job_id HPCJOBS_RUN_DIR=$run_dir HPCJOBS_LAUNCHED_BY=spawn
export OMP_NUM_THREADS=1
export HPCJOBS_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
export CUDA_HOME=/usr/local/cuda
export GREETING='it'"'"'s'
unset TORCHELASTIC_RUN_ID
cd -- /HERE || die 'the working folder is not there on this node'

# --- what each task runs: it publishes its rank, runs the program, records the first failure
task=$(
    cat <<'TASK'
if [ "${WORLD_SIZE:-}" != "$HPCJOBS_NTASKS" ]; then
    echo "hpcjobs: $(hostname): this task sees a world of ${WORLD_SIZE:-nobody} and not of $HPCJOBS_NTASKS, started by $HPCJOBS_LAUNCHED_BY" >&2
    exit 10
fi
program='' told=''
hand_on() { # SIGNAL: the program, of the same process group, has heard it too
    told=$1
}
trap 'hand_on TERM' TERM INT # a shell's children in the background do not hear INT
trap 'hand_on HUP' HUP
trap 'hand_on USR1' USR1
trap 'hand_on USR2' USR2
await_program() { # PID: sets `code`
    local again
    program=$1
    [ -z "$told" ] || kill -s "$told" "$program" 2>/dev/null # it came before there was anybody to tell
    wait "$program"
    code=$?
    while [ "$code" -gt 128 ] && kill -0 "$program" 2>/dev/null; do # a signal has ended the waiting
        wait "$program"
        code=$?
    done
    [ "$code" -gt 128 ] || return 0
    trap '' TERM INT HUP USR1 USR2 # for the program, which has ended; the next line must not hear them
    # Of a child that ends as a signal comes bash may forget the code, and would wait for it for ever.
    if ! jobs -rp | grep -qx "$program"; then
        wait "$program" 2>/dev/null
        again=$?
        [ "$again" -eq 127 ] || code=$again # 127: its end was told already
    fi
}
record_failure() { # at once: a rank that fails for want of this one must come second
    [ "$code" -ne 0 ] || return 0
    (set -o noclobber && echo "$code $RANK $(hostname)" >"$HPCJOBS_RUN_DIR/first_failure") 2>/dev/null || return 0
}
# A signal for the whole task must not take the one away who writes its last lines.
# On a full disk it is begun anew: the program must not meet a broken pipe.
exec {labelled}> >(trap '' TERM INT HUP USR1 USR2 && until sed -u "s/^/$RANK: /"; do sleep 1; done)
label=$!
"$@" >&"$labelled" 2>&1 &
await_program $!
record_failure
exec {labelled}>&-
# The last lines are on their way; a process the program left behind may hold the pipe open for ever.
for _ in {1..30}; do kill -0 "$label" 2>/dev/null && sleep 0.1 || break; done
if [ "$code" -ne 0 ]; then
    echo "hpcjobs: rank $RANK on $(hostname) ended with exit code $code" >&2
fi
exit "$code"
TASK
)

# A process group for the step: the TERM that ends this script's group reaches it once, by the trap below.
set -m
/PYTHON -m hpcjobs.runtime.spawn --ntasks=2 -- bash -c "$task" task /PYTHON -u train.py --epochs 3 'two words' </dev/null &
set +m
await_step $!
code=$?
exit "$code"
