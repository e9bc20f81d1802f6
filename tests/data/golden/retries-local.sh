#!/bin/bash
# hpcjobs VERSION
# site a10g-box (/SHIPPED/site_configs/a10g-box.yaml)
# template /SHIPPED/templates/job.sh.j2
# made by: hpcjobs submit ...

# shellcheck disable=SC1090,SC1091,SC2016,SC2317,SC2329  # sourced init files; text expanded by each task; functions called by traps
run_dir=/RUN
step_tasks=1

# --- further attempts: this script becomes the process that decides about them, and is run by it (docs/reliability.md)
if [ "${HPCJOBS_ATTEMPTS_PID:-}" != "$PPID" ]; then
    node_python=/PYTHON
    node_program=/RUN/node.pyz
    "$node_python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' || {
        echo "hpcjobs: $(hostname): --retries needs Python 3.6 or newer on the nodes, and $node_python is none:" 'set node_python in /SHIPPED/site_configs/a10g-box.yaml' >&2
        exit 1
    }
    for _ in {1..60}; do # a file server may restart
        [ ! -r "$node_program" ] || break
        sleep 5
    done
    if [ ! -r "$node_program" ]; then
        echo "hpcjobs: $(hostname): there is no $node_program on this node" >&2
        exit 1
    fi
    exec "$node_python" -I "$node_program" attempts --run-dir "$run_dir" --scheduler local \
        --budgets timeout=1000000000,preempt=1000000000,node=3,error=0 \
        --warning 300 --tasks "$step_tasks" --agents \
        -- bash "$0"
fi

job_id=${HPCJOBS_JOB_ID:?run this through hpcjobs, which gives local jobs their number and their slots}
nodes=$(hostname)

# --- state file: written at the start and, by a trap, at every end a script can notice
printf -v started '%(%s)T' -1
cluster=$(hostname)
caught=''
early=''
trap 'early=yes' USR1 # the job's time is over before its step has begun

write_state() { # STATE EXIT_CODE FIRST_FAILURE
    local ended=null # no `date`: a signal to all processes of the job would end it
    [ "$1" = RUNNING ] || printf -v ended '%(%s)T' -1
    printf '{"schema":1,"job_id":"%s","state":"%s","exit_code":%s,"started":%s,"ended":%s,"nodes":"%s","restarts":%s,"first_failure":%s,"cluster":"%s"}\n' \
        "$job_id" "$1" "$2" "$started" "$ended" "$nodes" "${SLURM_RESTART_COUNT:-0}" "$3" "$cluster" >"$run_dir/.state.json" &&
        mv -f -- "$run_dir/.state.json" "$run_dir/state.json"
}

finish() {
    local code=$? state=COMPLETED failure=null rank host
    if [ -s "$run_dir/first_failure" ] && [ "$code" -ne 0 ]; then
        read -r code rank host <"$run_dir/first_failure"
        failure="{\"rank\":$rank,\"host\":\"$host\",\"exit_code\":$code}"
        echo "hpcjobs: first failure: rank $rank on $host, exit code $code" >&2
    fi
    [ "$code" -eq 0 ] || state=FAILED
    [ -z "$caught" ] || state=CANCELLED
    [ ! -s "$HPCJOBS_CONTROL_DIR/requeue" ] || state=REQUEUED
    [ "$BASHPID" = $$ ] || write_state "$state" "$code" "$failure" # the job's own comes from the process above
    trap - EXIT
    exit "$code"
}

die() {
    echo "hpcjobs: $(hostname): $*" >&2
    exit 1
}

await_step() { # PID: wait for it, handing TERM on; its exit code
    step=$1
    trap '[ -n "$caught" ] || kill -TERM "$step" 2>/dev/null; caught=TERM' TERM # it may come twice
    trap 'kill -USR1 "$step" 2>/dev/null' USR1
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

# --- software of the site

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
export HPCJOBS_JOB_ID=$job_id HPCJOBS_RUN_DIR=$run_dir HPCJOBS_LAUNCHED_BY=torchrun
export OMP_NUM_THREADS=1
export HPCJOBS_IFNAME=lo GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
export NCCL_P2P_LEVEL=NVL
unset TORCHELASTIC_RUN_ID
cd -- /HERE || die 'the working folder is not there on this node'

# --- what the launcher needs
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# --- what each task runs: it publishes its rank, runs the program, records the first failure
task=$(
    cat <<'TASK'
export NODE_RANK=$GROUP_RANK
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
trap 'told=USR1; kill -USR1 "$program" 2>/dev/null' USR2 # from the agent's shell, since this one was born deaf to USR1
echo $$ >"$HPCJOBS_CONTROL_DIR/ranks-$(hostname)/$LOCAL_RANK"
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
write_control() { # NAME TEXT: also on a disk that is full, or a file system that is away, for a moment
    for _ in {1..60}; do
        { echo "$2" >"$HPCJOBS_CONTROL_DIR/$1"; } 2>/dev/null && return
        sleep 1
    done
    echo "hpcjobs: $(hostname): $HPCJOBS_CONTROL_DIR/$1 cannot be written for a minute: the end of this rank is not recorded" >&2
}
record_failure() { # at once: a rank that fails for want of this one must come second
    # Where the reader of its output was killed (slurmstepd, say), a program that writes fails: not by its own error.
    # A new parent shows it. The parent's /proc entry does not: hidepid hides those of other users, a zombie keeps its own.
    local parent
    read -r _ _ _ parent _ <"/proc/$$/stat"
    if [ "$code" -ne 0 ] && [ "$code" -ne 85 ] && ! { [ "$parent" = "$PPID" ] && kill -0 "$label" 2>/dev/null; }; then
        code=137
    fi
    [ "$RANK" -ne 0 ] || [ "$code" -ne 0 ] || write_control completed "$code"
    # Saved, and to be started again: no failure, nor anything that an elastic agent should restart.
    [ "$code" -ne 85 ] || code=0
    [ "$code" -ne 0 ] || return 0
    (set -o noclobber && echo "$code $RANK $(hostname)" >"$HPCJOBS_RUN_DIR/first_failure") 2>/dev/null || return 0
    [ "$code" -ne 137 ] || echo "${SLURMD_NODENAME:-$(hostname)}" >>"$HPCJOBS_CONTROL_DIR/suspects"
}
# The agent restarts ranks whatever ended them; a program's own error would only come again.
if [ "${TORCHELASTIC_RESTART_COUNT:-0}" -gt 0 ] && read -r code _ <"$HPCJOBS_RUN_DIR/first_failure"; then
    case $code in
        11 | 18 | 19 | 137) rm -f -- "$HPCJOBS_RUN_DIR/first_failure" ;;
        *) exit "$code" ;;
    esac
fi 2>/dev/null
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
agent=$(
    cat <<'AGENT'
node_addr=127.0.0.1
# The ranks are to save and leave first, and not the agent; Slurm may signal this shell alone (proctrack/cgroup does).
ranks=$HPCJOBS_CONTROL_DIR/ranks-$(hostname)
rm -rf -- "$ranks" && mkdir -- "$ranks"
program='' told=''
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
write_control() { # NAME TEXT: also on a disk that is full, or a file system that is away, for a moment
    for _ in {1..60}; do
        { echo "$2" >"$HPCJOBS_CONTROL_DIR/$1"; } 2>/dev/null && return
        sleep 1
    done
    echo "hpcjobs: $(hostname): $HPCJOBS_CONTROL_DIR/$1 cannot be written for a minute: the end of this rank is not recorded" >&2
}
trap 'cat "$ranks"/* 2>/dev/null | xargs -r kill -USR2 2>/dev/null' USR1
trap 'told=TERM; kill -TERM "$program" 2>/dev/null' TERM
(trap "" USR1 && exec /PYTHON -m torch.distributed.run --nnodes="$HPCJOBS_NNODES" --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id="$HPCJOBS_JOB_ID" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-conf="is_host=$(( ${SLURM_NODEID:-0} == 0 ))" --local-addr="$node_addr" --max-restarts=3 --no-python "${@//\$/\$\$}") &
await_program $!
write_control "ends/${SLURM_NODEID:-0}" "$code"
exit "$code"
AGENT
)

[ -z "$early" ] || exit 85
# A process group for the step: the TERM that ends this script's group reaches it once, by the trap below.
set -m
bash -c "$agent" agent bash -c "$task" task true </dev/null &
set +m
await_step $!
code=$?
echo "$code" >"$HPCJOBS_CONTROL_DIR/step_code"
exit "$code"
